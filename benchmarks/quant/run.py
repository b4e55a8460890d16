"""One run: every form over every input, then its speed."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tierkv import quant
from tierkv.benchmarks.quant import FORCED, RECENT, SINKS, forms, in_place, speed
from tierkv.benchmarks.quant.calibrate import Calibration, fit, observe
from tierkv.benchmarks.quant.exact import Listener
from tierkv.benchmarks.quant.forms import Form
from tierkv.benchmarks.quant.inputs import (
    CALIBRATION,
    CONTEXT,
    QUICK_CALIBRATION_CONTEXT,
    QUICK_CONTEXT,
    REPORT,
    Text,
    read,
)
from tierkv.benchmarks.quant.pages import to_pages
from tierkv.benchmarks.quant.parts import Parts
from tierkv.benchmarks.quant.quality import Judge, Loss
from tierkv.benchmarks.quant.records import Record, Run, Timed, record
from tierkv.benchmarks.report import load, machine
from tierkv.geometry import Geometry
from tierkv.quant.moments import standard
from tierkv.study.model import MODEL_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Told = Callable[[int, int, str], None]
"""Pieces of work done, pieces in all, and the one that begins."""

EIGHT_B_QUERY_HEADS = 32
INPUTS, QUICK_INPUTS = 12, 3


class Plan(NamedTuple):
    names: tuple[str, ...]
    inputs: int = INPUTS
    context: int = CONTEXT
    calibration_context: int = CONTEXT
    data: Path | None = None
    quick: bool = False


def plan(names: Sequence[str], count: int | None, data: Path | None, quick: bool) -> Plan:
    """Raises `ConfigError` for a form that does not exist."""
    chosen = forms.choose(names)
    if quick:
        return Plan(chosen, count or QUICK_INPUTS, QUICK_CONTEXT, QUICK_CALIBRATION_CONTEXT, data, quick)
    return Plan(chosen, count or INPUTS, data=data)


def run(
    plan: Plan, parts: Parts, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, told: Told
) -> list[Record]:
    """A record a form. Losses that `parts` holds are taken from there."""
    texts = read(REPORT, tokenizer, plan.data, plan.context, plan.inputs)
    others = read(
        CALIBRATION,
        tokenizer,
        plan.data,
        plan.calibration_context,
        plan.inputs if plan.quick else None,
    )
    config = model.config
    geometry = Geometry(
        config.num_hidden_layers, config.num_key_value_heads, config.hidden_size // config.num_attention_heads,
        "float32",
    )  # fmt: skip
    host = machine()
    told(0, len(texts), "reading the calibration texts")
    seen = observe(model, geometry, others)
    found, skipped = forms.build(plan.names, seen)
    losses = _quality(model, texts, found, parts, told)
    told(len(texts), len(texts), "speed")
    here = _speeds(found, seen, config.num_attention_heads, plan.quick)
    layer = _gaussian(speed.EIGHT_B)
    eight_b = _speeds(forms.build(plan.names, layer)[0], layer, EIGHT_B_QUERY_HEADS, plan.quick)
    host["load_after"] = load()
    shared = Run(
        " ".join(["tierkv", *sys.argv[1:]]), datetime.date.today().isoformat(), MODEL_ID, host,
        [text.context for text in texts], SINKS, RECENT, FORCED, in_place.TOKENS,
        [text.title for text in texts], [text.title for text in others], {one.name: one.why for one in skipped},
    )  # fmt: skip
    return [
        record(
            one.name, one.peer, one.note, losses[one.name], losses[forms.BASELINE], here[one.name],
            eight_b.get(one.name), shared,
        )
        for one in found
    ]  # fmt: skip


def _quality(
    model: PreTrainedModel, texts: Sequence[Text], found: Sequence[Form], parts: Parts, told: Told
) -> dict[str, list[Loss]]:
    """By form, then by text."""
    listener = Listener(model)
    for done, text in enumerate(texts):
        told(done, len(texts), text.title)
        known = parts.of(text)
        missing = [form for form in found if form.name not in known]
        if not missing:
            continue
        exact = listener.run(text)
        judge = Judge(model, exact)
        for form in missing:
            known[form.name] = judge.measure(through(form, exact.kv))
        parts.keep()
    return {form.name: [parts.of(text)[form.name] for text in texts] for form in found}


def through(form: Form, kv: torch.Tensor) -> torch.Tensor:
    """The context's K/V after the form had all but the sinks and the recent tokens."""
    span = slice(SINKS, kv.shape[3] - RECENT)
    held = form.hold(kv[:, :, :, span])
    held.encode()
    held.decode()
    given = kv.clone()
    given[:, :, :, span] = held.kv()
    return given


def _speeds(found: Sequence[Form], seen: Calibration, q_heads: int, quick: bool) -> dict[str, Timed]:
    kv = speed.window(seen.geometry, quick)
    timed = {}
    for form in found:
        with speed.one_thread():
            bits, fast = speed.measure(form, kv, quick)
        attended = None
        if not form.peer:
            codec = quant.get(form.name)
            attended = in_place.measure(codec, fit(codec, seen), seen.geometry, q_heads, quick)
        timed[form.name] = Timed(bits, fast, attended)
    return timed


def _gaussian(geometry: Geometry) -> Calibration:
    """For speed alone."""
    pages = list(to_pages(geometry, speed.window(geometry, quick=True)))
    return Calibration(geometry, pages, standard(geometry))
