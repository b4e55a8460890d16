"""Low-bit forms of a page. `get("k3v2")` is a codec; kernels know it by its code.

Importing this package imports neither torch nor bitsandbytes: the references that need them are imported when called.
"""

from __future__ import annotations

from functools import cache

from tierkv.errors import ConfigError
from tierkv.quant import layered
from tierkv.quant.blockwise import NF4, Int8
from tierkv.quant.contract import Codec, NonFiniteValues
from tierkv.quant.exact import Exact
from tierkv.quant.kivi2 import Kivi2
from tierkv.quant.klt import KLT2, KLT25
from tierkv.quant.rotated import K3V2, Rotated2

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (K3V2(), KLT2(), KLT25(), Rotated2(), Kivi2(), Int8(), NF4(), Exact())
}

NAMES: tuple[str, ...] = tuple(_CODECS)
"""Every codec's name; the first is the default."""


def get(name: str) -> Codec:
    """The codec of that name, which may have exceptions for layers: `k3v2,0=exact,-1=exact` (`layered.py`).

    Raises:
        ConfigError: there is none.
    """
    return _layered(name) if "," in name else _plain(name)


@cache
def _layered(name: str) -> Codec:
    return layered.read(name, _plain)


def _plain(name: str) -> Codec:
    if name not in _CODECS:
        raise ConfigError(f"there is no codec {name!r}; the known ones are {', '.join(NAMES)}")
    return _CODECS[name]


def by_code(code: int) -> Codec:
    """The codec whose pages kernels and tables mark with this number.

    Raises:
        ConfigError: there is none, for instance because a newer version wrote it.
    """
    for codec in _CODECS.values():
        if codec.code == code:
            return codec
    known = ", ".join(f"{codec.code} ({codec.name})" for codec in _CODECS.values())
    raise ConfigError(f"there is no codec with code {code}; the known ones are {known}")


__all__ = ["NAMES", "Codec", "NonFiniteValues", "by_code", "get"]
