"""One run: every form over every input, then its speed."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tierkv import quant
from tierkv.benchmarks.quant import FORCED, RECENT, SINKS, facts, forms, in_place, speed
from tierkv.benchmarks.quant.calibrate import Calibration, fit
from tierkv.benchmarks.quant.exact import Listener
from tierkv.benchmarks.quant.forms import Form
from tierkv.benchmarks.quant.inputs import REPORT, Text, read
from tierkv.benchmarks.quant.pages import to_pages
from tierkv.benchmarks.quant.parts import Parts
from tierkv.benchmarks.quant.plan import Plan, Told, calibrated
from tierkv.benchmarks.quant.quality import Judge, Loss
from tierkv.benchmarks.quant.records import Record, Run, Timed, record
from tierkv.benchmarks.report import load, machine
from tierkv.geometry import Geometry
from tierkv.quant.moments import standard
from tierkv.study.episodes import load_episodes
from tierkv.study.model import MODEL_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EIGHT_B_QUERY_HEADS = 32

Keep = Callable[[Sequence[Text]], Parts]


def run(
    plan: Plan, keep: Keep, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, told: Told
) -> list[Record]:
    """A record a form. Losses that `keep` opens are taken from there.

    Args:
        keep: the losses by the texts that forms are fitted on.
    """
    texts = read(REPORT, tokenizer, plan.data, plan.context, plan.inputs)
    host = machine()
    told(0, len(texts), "reading the calibration texts")
    others, seen = calibrated(plan, model, tokenizer)
    found, skipped = forms.build(plan.names, seen)
    losses = _quality(model, texts, found, keep(others), told)
    known = facts.ask(model, tokenizer, found, load_episodes(), told) if plan.facts else {}
    told(len(texts), len(texts), "speed")
    here = _speeds(found, seen, model.config.num_attention_heads, plan.quick)
    layer = _gaussian(speed.EIGHT_B)
    eight_b = _speeds(forms.build(plan.names, layer)[0], layer, EIGHT_B_QUERY_HEADS, plan.quick)
    host["load_after"] = load()
    shared = Run(
        " ".join(["tierkv", *sys.argv[1:]]), datetime.date.today().isoformat(), MODEL_ID, host,
        [text.context for text in texts], SINKS, RECENT, FORCED, in_place.TOKENS,
        [text.title for text in texts], [text.title for text in others], {one.name: one.why for one in skipped},
        known[facts.EXACT_CACHE].facts if known else None,
    )  # fmt: skip
    return [
        record(
            one.name, one.peer, one.note, losses[one.name], losses[forms.BASELINE], here[one.name],
            eight_b.get(one.name), shared, known.get(one.name),
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
