"""Which form the digests of a model's pages have, by the brain's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.digest_forms import form_of
from tierkv.prefetch.digests import DigestForm

if TYPE_CHECKING:
    from tierkv.daemon.brain_config import BrainConfig


def chosen_form(config: BrainConfig, model_id: str, geometry: Geometry) -> DigestForm:
    """Raises `ConfigError`: a transform is wanted, and no calibration of the model is at hand."""
    if not config.digest_share:
        return DEVIATION
    room = int(config.digest_share * config.hbm_bytes)
    return form_of(config.digest, config.digest_bytes, model_id, geometry, config.digest_models, room)
