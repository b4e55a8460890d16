"""What a codec's per-model state is fitted from: exact pages of texts that nothing is reported on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant import SINKS
from tierkv.benchmarks.quant.exact import prefill
from tierkv.benchmarks.quant.inputs import Text
from tierkv.benchmarks.quant.pages import to_pages
from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Codec, Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Calibration(NamedTuple):
    geometry: Geometry
    pages: list[Bytes]  # all full


def observe(model: PreTrainedModel, geometry: Geometry, texts: Sequence[Text]) -> Calibration:
    """Pages of each text's context behind the sinks, whose keys are unlike all others."""
    pages: list[Bytes] = []
    for text in texts:
        kv = prefill(model, text.tokens[: text.context])[:, :, :, SINKS:]
        pages += list(to_pages(geometry, kv))
    return Calibration(geometry, pages)


def fit(codec: Codec, seen: Calibration) -> Floats:
    """The codec's state."""
    return codec.fit_state(seen.geometry, seen.pages, [seen.geometry.page_tokens] * len(seen.pages))
