"""What a run measures, and what it fits codecs from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant import forms
from tierkv.benchmarks.quant.calibrate import Calibration, observe
from tierkv.benchmarks.quant.inputs import (
    CALIBRATION,
    CONTEXT,
    QUICK_CALIBRATION_CONTEXT,
    QUICK_CONTEXT,
    Text,
    read,
)
from tierkv.geometry import Geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Told = Callable[[int, int, str], None]
"""Pieces of work done, pieces in all, and the one that begins."""

INPUTS, QUICK_INPUTS = 12, 3


class Plan(NamedTuple):
    names: tuple[str, ...]
    inputs: int = INPUTS
    context: int = CONTEXT
    calibration_context: int = CONTEXT
    data: Path | None = None
    quick: bool = False
    facts: bool = False


def plan(
    names: Sequence[str], count: int | None, data: Path | None, quick: bool, facts: bool = False
) -> Plan:
    """Raises `ConfigError` for a form that does not exist."""
    chosen = forms.choose(names)
    if quick:
        return Plan(
            chosen, count or QUICK_INPUTS, QUICK_CONTEXT, QUICK_CALIBRATION_CONTEXT, data, quick, facts
        )
    return Plan(chosen, count or INPUTS, data=data, facts=facts)


def calibrated(
    plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Text], Calibration]:
    """The texts that codecs are fitted from, and what was seen of them: float32 pages of this model."""
    count = plan.inputs if plan.quick else None
    texts = read(CALIBRATION, tokenizer, plan.data, plan.calibration_context, count)
    config = model.config
    geometry = Geometry(
        config.num_hidden_layers, config.num_key_value_heads, config.hidden_size // config.num_attention_heads,
        "float32",
    )  # fmt: skip
    return texts, observe(model, geometry, texts)
