"""What a codec's per-model state is fitted from: moments or exact pages of texts that nothing is reported on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant import RECENT, SINKS
from tierkv.benchmarks.quant.exact import prefill
from tierkv.benchmarks.quant.inputs import Text
from tierkv.benchmarks.quant.pages import to_pages
from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Codec, Floats
from tierkv.quant.moments import Moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = 1056
"""Tokens of a text that are kept as pages, at most: a mean needs no more, and all of twelve texts would take 1.5 GB."""


class Calibration(NamedTuple):
    geometry: Geometry
    pages: list[Bytes]  # all full
    moments: Moments


def observe(model: PreTrainedModel, geometry: Geometry, texts: Sequence[Text]) -> Calibration:
    """Moments of each text's context, and pages of its first tokens but the sinks, whose keys are unlike others."""
    from tierkv.calibration import observe as observe_moments

    pages: list[Bytes] = []
    for text in texts:
        kv = prefill(model, text.tokens[: min(text.context, PAGED)])[:, :, :, SINKS:]
        pages += list(to_pages(geometry, kv))
    contexts = [text.tokens[: text.context] for text in texts]
    return Calibration(geometry, pages, observe_moments(model, contexts, SINKS, RECENT))


def fit(codec: Codec, seen: Calibration) -> Floats:
    """The codec's state: from moments, if it takes them."""
    if codec.takes_moments:
        return codec.fit_moments(seen.geometry, seen.moments)
    return codec.fit_state(seen.geometry, seen.pages, [seen.geometry.page_tokens] * len(seen.pages))
