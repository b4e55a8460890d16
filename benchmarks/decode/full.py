"""One run: the longest prompt read once, then point by point; and prompts read through pages."""

from __future__ import annotations

import datetime
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierkv.benchmarks.decode import ARMS, EXACT, MORE, prefill
from tierkv.benchmarks.decode.arm import Dense
from tierkv.benchmarks.decode.models import Models, first, models, read
from tierkv.benchmarks.decode.plan import Plan
from tierkv.benchmarks.decode.point import measure
from tierkv.benchmarks.decode.records import Found, Measured, Record, Run, records, scaling
from tierkv.benchmarks.decode.watch import Span
from tierkv.benchmarks.pairs import Figures
from tierkv.benchmarks.parts import Parts
from tierkv.benchmarks.report import load, machine
from tierkv.study.model import MODEL_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Told = Callable[[int, int, str], None]
"""Pieces of work done, pieces in all, and the one that begins."""

TRACED = "tierkv-k8"


class Made(NamedTuple):
    records: list[Record]
    run: Run
    spans: Mapping[str, Sequence[Span]]  # of `TRACED`, by context


class Kept(NamedTuple):
    """What an interrupted run left."""

    points: Parts[Measured]
    prefills: Parts[Figures]


def kept(out: Path, resume: bool) -> Kept:
    return Kept(
        Parts(out.with_suffix(".parts"), resume, Measured),
        Parts(out.with_suffix(".prefills"), resume, Figures),
    )


def run(plan: Plan, kept: Kept, plain: PreTrainedModel, told: Told) -> Made:
    """What `kept` holds is taken from there."""
    host = machine()
    skipped: dict[str, str] = {}
    shared = models(plain)
    tokens = prompt(plan.longest, int(plain.config.vocab_size))
    total = len(plan.points) + bool(plan.prefill)
    dense: Dense | None = None
    found: dict[tuple[int, int], dict[str, Measured]] = {}
    for done, point in enumerate(plan.points):
        told(done, total, point.key)
        known = kept.points.under(f"{point.key}, {plan.conditions}, {' '.join(point.arms)}")
        if not known:
            dense = dense or read(plain, tokens)
            measured = measure(shared, first(dense, point.context), point, plan)
            known.update(measured.arms)
            skipped |= measured.skipped
            kept.points.keep()
            gc.collect()
        skipped = {
            arm: "it could not run when that was measured" for arm in point.arms if arm not in known
        } | skipped
        found[point.context, point.batch] = known
    dense = None
    read_through = _prefill(plan, kept.prefills, shared, tokens, total, told)
    shared.paged.detach()
    host["load_after"] = load()
    return _made(plan, found, read_through, host, skipped)


def _prefill(
    plan: Plan, kept: Parts[Figures], shared: Models, tokens: Sequence[int], total: int, told: Told
) -> dict[str, object] | None:
    if plan.prefill is None:
        return None
    told(total - 1, total, f"reading {plan.prefill} tokens through pages")
    known = kept.under(f"{plan.prefill} tokens, {plan.prefills} times, {plan.pages}, {plan.codec}")
    if not known:
        known.update(prefill.measure(shared, tokens[: plan.prefill], plan))
        kept.keep()
    return {"tokens": plan.prefill, **known}


def _made(
    plan: Plan,
    found: Found,
    read_through: dict[str, object] | None,
    host: dict[str, object],
    skipped: dict[str, str],
) -> Made:
    spans = {
        f"{context} tokens": here[TRACED].spans or []
        for (context, _), here in sorted(found.items())
        if TRACED in here
    }
    made = Run(
        " ".join(["tierkv", *sys.argv[1:]]), datetime.date.today().isoformat(), MODEL_ID, host, plan.pages,
        plan.codec, plan.steps, skipped, records(found, MORE), read_through, scaling(found, EXACT), None,
    )  # fmt: skip
    return Made(records(found, ARMS), made, spans)


def prompt(tokens: int, vocabulary: int) -> list[int]:
    """Any tokens: what they say changes no time."""
    drawn: list[int] = np.random.default_rng(tokens).integers(2, vocabulary, tokens).tolist()
    return drawn
