"""The middle rung: an optional second packed form between exact and low-bit, attended in place like both.

It is a codec that works in the model's own space and keeps no state (`Codec.in_model_space`), so that attention adds
its pages to the exact sum. A page takes it only with an exact copy in host memory: its low-bit form is made from that,
never from the middle one, so losses do not add up.
"""

from __future__ import annotations

import math

from tierkv.daemon.allocator import SizeClass, aligned
from tierkv.daemon.policy import Thresholds
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant import NAMES, Codec, get

MIDDLE_NAMES = tuple(name for name in NAMES if get(name).in_model_space and name != "exact")
"""Codecs that may be the middle form."""


def middle_codec(name: str) -> Codec:
    """Raises `ConfigError`: this codec cannot be the middle form."""
    if name not in MIDDLE_NAMES:
        raise ConfigError(f"{name} cannot be the middle form, which is one of {', '.join(MIDDLE_NAMES)}")
    return get(name)


def middle_class(codec: Codec, geometry: Geometry, low_bit: SizeClass) -> SizeClass:
    """What pages of the middle form take, several to a frame.

    Raises:
        ConfigError: a frame holds one only, or no fewer than of the low-bit form.
    """
    frame, item = low_bit.frame, aligned(codec.page_bytes(geometry))
    if 2 * item > frame:
        raise ConfigError(
            f"middle = {codec.name} saves nothing in HBM: a page of it takes {item:,} bytes, and the frame of a "
            f"{geometry.dtype} page has {frame:,}, which is room for one; take nf4, or none"
        )
    if item <= low_bit.item:
        raise ConfigError(
            f"middle = {codec.name} is no rung above low-bit: a page of it takes {item:,} bytes, and one of the "
            f"low-bit form {low_bit.item:,}; take a larger form, or none"
        )
    return SizeClass(frame, item)


def middle_below(given: float | None, thresholds: Thresholds) -> float:
    """The score below which a page may take the middle form; unless given, halfway between those around it."""
    if given is not None:
        return given
    halfway = (thresholds.quantize_below + thresholds.promote_above) / 2
    return thresholds.quantize_below if math.isnan(halfway) else halfway
