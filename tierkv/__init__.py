"""tierkv: a tiered KV-cache memory manager for LLM agents. This package is what a worker imports.

`attach`, `AttachedModel` and `TieredCache` need transformers (and torch), which take seconds to import: they are
imported when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tierkv.client import Client, connect
from tierkv.geometry import Geometry
from tierkv.regions import Region
from tierkv.session import Session

if TYPE_CHECKING:
    from tierkv.model import AttachedModel, attach
    from tierkv.transformers_cache import TieredCache

_LATE = {
    "attach": "tierkv.model",
    "AttachedModel": "tierkv.model",
    "TieredCache": "tierkv.transformers_cache",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_LATE[name]), name)
    globals()[name] = found
    return found


__all__ = ["AttachedModel", "Client", "Geometry", "Region", "Session", "TieredCache", "attach", "connect"]
