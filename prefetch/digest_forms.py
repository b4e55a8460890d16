"""The forms of digests by name, and which of them a model's pages have."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.digest_settings import LEAST_BYTES, MOST_BYTES, DigestSetting
from tierkv.prefetch.digests import DigestForm
from tierkv.prefetch.transform_digests import PREFIX, SLOTS, TransformForm
from tierkv.quant.moments import About


def get(name: str) -> DigestForm:
    """Raises `ValueError`: there is no form of that name."""
    if name == DEVIATION.name:
        return DEVIATION
    size = name.removeprefix(PREFIX)
    if size == name or not size.isdecimal() or not LEAST_BYTES <= int(size) <= MOST_BYTES:
        raise ValueError(f"there is no digest form {name!r}")
    return TransformForm(int(size))


def form_of(
    setting: DigestSetting, size: int, model_id: str, geometry: Geometry, known: Sequence[About], room: int
) -> DigestForm:
    """The form of a model's digests, given what calibrations are at hand.

    Args:
        room: bytes that digests and their state may take: `auto` takes no state that is larger.

    Raises:
        ConfigError: `transform` is wanted, and there is no calibration for it.
    """
    if setting == "deviation":
        return DEVIATION
    form = TransformForm(size)
    calibrated = any(describes(about, model_id, geometry) for about in known)
    if setting == "auto":
        return form if calibrated and 4 * form.state_floats(geometry) <= room else DEVIATION
    if calibrated:
        return form
    raise ConfigError(
        f"digest = transform, and no calibration of {model_id!r} with pages of {SLOTS} tokens was at hand when the "
        "daemon started: run tierkv calibrate and start it again, or set digest = auto"
    )


def describes(about: About, model_id: str, geometry: Geometry) -> bool:
    """Whether a calibration's `KeyTransform` is that of the model's pages."""
    return (
        about.is_of(model_id) and about.fits(geometry) and about.page_tokens == geometry.page_tokens == SLOTS
    )


__all__ = ["describes", "form_of", "get"]
