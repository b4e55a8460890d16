"""The mean key of each layer and head, which the rotated family and klt2 take off before they code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Floats, NonFiniteValues
from tierkv.quant.floats import KIND, page_words
from tierkv.quant.rotated_encode import add_keys


def mean_keys(name: str, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
    """`[layers, kv_heads, head_dim]` over the written tokens; zeros without any token. `name` is the codec's.

    Raises:
        NonFiniteValues: a page holds NaN or infinity.
    """
    total = np.zeros((geometry.num_layers, geometry.num_kv_heads, geometry.head_dim), np.float64)
    for page, count in zip(pages, counts, strict=True):
        add_keys(page_words(geometry, page), KIND[geometry.dtype], count, total)
    if not np.isfinite(total).all():
        raise NonFiniteValues(
            f"a page to fit {name}'s mean keys from holds NaN or infinity; fit from other pages"
        )
    mean: Floats = (total / max(1, sum(counts))).astype(np.float32)
    return mean
