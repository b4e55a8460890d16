"""Values of settings, as people write them: sizes, pins, layers, thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

_UNITS = {
    "": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_LAYER = re.compile(r"-?[0-9]{1,5}")
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes from `8GiB`, `512 MiB`, `1.5GB`, `1e9` or a number. `ValueError` says what is understood instead."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is not a size; write for instance 8GiB")
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError("is not a size; write for instance 8GiB, 512MiB, 1e9")
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower())
    if scale is None:
        near = [f"{unit[0].upper()}iB", f"{unit[0].upper()}B"] if unit[0].lower() in "kmgt" else ["GiB"]
        raise ValueError(f"has the unknown unit {unit!r}; write {number}{f' or {number}'.join(near)}")
    if "." not in number and "e" not in number.lower():
        return int(number) * scale
    size = float(number) * scale
    if math.isinf(size):
        raise ValueError("is more than any machine has; write for instance 8GiB")
    return int(size)


def parse_pins(value: object) -> object:
    """`system=attendable,plan=exact` (command line, environment) or a table (file)."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if any(not sign for _, sign, _ in pairs):
        raise ValueError(
            "is not a list of pins; write region=level, for instance system=attendable,plan=exact"
        )
    return {region.strip(): level.strip() for region, _, level in pairs}


def parse_layers(value: object) -> object:
    """`0=exact,-1=exact` (command line, environment) or a table (file); layers are plain integers afterwards."""
    if isinstance(value, str):
        pairs = [
            tuple(part.strip() for part in pair.partition("=")) for pair in value.split(",") if pair.strip()
        ]
        if any(not sign for _, sign, _ in pairs):
            raise ValueError("is not a list of layers; write layer=codec, for instance 0=exact,-1=exact")
    elif isinstance(value, Mapping):
        pairs = [(str(layer), "=", codec) for layer, codec in value.items()]
    else:
        return value
    if wrong := [layer for layer, _, _ in pairs if not _LAYER.fullmatch(layer)]:
        raise ValueError(
            f"names {wrong[0]!r}, which is not a layer; count from 0, or from -1 for the last one"
        )
    read = {str(int(layer)): codec for layer, _, codec in pairs}
    if len(read) < len(pairs):
        raise ValueError("names a layer twice")
    return read


def _some_number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("is not a number; write inf or -inf for always or never")
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
Number = int | float
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Score = Annotated[
    float,
    AfterValidator(_some_number),
    PlainSerializer(lambda score: score if math.isfinite(score) else str(score), when_used="json"),
]
"""A threshold: infinite ones, which JSON lacks, are written as `inf` and `-inf`, and read so."""
PinLevel = Literal["exact", "attendable"]
