"""Recall as it is served: a daemon and a worker that reads each context and is asked, under a budget of the session.

A question's tokens run as one chunk, its answer as decode steps of its own tokens; then both are cropped off, and the
next question finds pages where this one left them. Digests are those of the model's calibration, where there is one in
the folder that daemons look into. Every observation of these steps is an audit: a look at true attention over all
pages, cold ones included.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch

import tierkv
from tierkv import folders
from tierkv.benchmarks import processes
from tierkv.benchmarks.recall.inputs import Ask, Input
from tierkv.benchmarks.recall.records import Record
from tierkv.errors import CapacityError
from tierkv.figures import SessionFigures
from tierkv.geometry import DTypeName, Geometry
from tierkv.protocol import Audit
from tierkv.recall import RecallMode, RecallOptions
from tierkv.study.episodes import recalled
from tierkv.study.probe import cache_argument
from tierkv.study.replay import LEAST_PAGES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tierkv import Client, Session
    from tierkv.model import AttachedModel
    from tierkv.transformers_cache import TieredCache

log = logging.getLogger(__name__)

MODES: tuple[RecallMode, ...] = get_args(RecallMode)

POOL_DTYPE: DTypeName = "bfloat16"

ANSWER_STEPS = 12
"""Decode steps of an answer; the observed ones are its last and every fourth before."""

RECENT_TOKENS = 32
"""Last tokens that stay exact: a small budget has no room for more."""

POOL_SHARE = 2
"""HBM of the daemon is so many times the context's exact bytes: only the session's budget makes a page leave."""


class Arm(NamedTuple):
    mode: RecallMode
    waste_limit: float | None = None  # the daemon's; None: its default

    @property
    def name(self) -> str:
        return f"served {self.mode}" + ("" if self.waste_limit is None else f", waste {self.waste_limit:g}")


ARMS = tuple(Arm(mode) for mode in MODES)

UNLIMITED = Arm("background", 1.0)
"""What the limit on waste costs is told beside it."""


class Served(NamedTuple):
    """Of all asks of a context."""

    audits: list[Audit]  # of decode steps
    steps: list[float]  # seconds of decode steps that were no audit
    tokens: int  # decoded
    correct: list[bool]
    before: SessionFigures
    after: SessionFigures
    chunk_seconds: float  # blocked in questions' chunks
    brought: dict[str, int]  # pages that came back, over reading and asks, by outcome
    digest_bytes: int  # of a cold page


def budget_bytes(given: Input, share: float, geometry: Geometry) -> int | None:
    """`None`: less than a session can have."""
    wanted = int(share * len(given.tokens) * geometry.token_bytes)
    return wanted if wanted >= LEAST_PAGES * geometry.page_bytes else None


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: Input, budgets: Sequence[float],
    arms: Sequence[Arm] = (*ARMS, UNLIMITED),
) -> Iterator[Record]:  # fmt: skip
    """A record for each budget and arm, but for budgets in which a session cannot be, or has no room for a question."""
    with attached(model) as worker:
        geometry = worker.geometry(POOL_DTYPE)
        for share in budgets:
            budget = budget_bytes(given, share, geometry)
            if budget is None:
                continue
            for arm in arms:
                with daemon(given, geometry, arm) as client:
                    try:
                        served = serve(worker, tokenizer, client, given, budget, arm)
                    except CapacityError as error:
                        log.warning("%s, %s, %.0f%%: %s", given.title, arm.name, 100 * share, error)
                        continue
                    yield record(given, share, arm, geometry, served)


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[AttachedModel]:
    worker = tierkv.attach(model)
    try:
        yield worker
    finally:
        worker.detach()


@contextmanager
def daemon(given: Input, geometry: Geometry, arm: Arm) -> Iterator[Client]:
    """One of its own for each arm and budget: what it learned of waste is of this one."""
    pool = POOL_SHARE * len(given.tokens) * geometry.token_bytes
    options = ["--recent-tokens", str(RECENT_TOKENS)]
    if (calibrated := folders.calibrations()).is_dir():
        options += ["--calibration", str(calibrated)]
    if arm.waste_limit is not None:
        options += ["--waste-limit", str(arm.waste_limit)]
    with (
        processes.service(pool, 2 * pool, "k3v2", *options) as state_dir,
        tierkv.connect(state_dir) as client,
    ):
        yield client


@torch.inference_mode()
def serve(
    worker: AttachedModel, tokenizer: PreTrainedTokenizerBase, client: Client, given: Input, budget: int, arm: Arm
) -> Served:  # fmt: skip
    """Read the context, ask everything."""
    session = worker.open(client, POOL_DTYPE, hbm_budget=budget)
    cache = tierkv.TieredCache(session, recall=RecallOptions(arm.mode, audit_every=1))
    for run in given.runs:
        session.label(run.region, run.tokens)
    try:
        _forward(worker, cache, given.tokens)
        start = _figures(client, session)
        asked = [_ask(worker, tokenizer, client, session, cache, ask) for ask in given.asks]
        end = _figures(client, session)
        digests = session.pool.digests
        cache.close()  # what came and was not attended by now is wasted
        told = client.stats()
        return Served(
            list(chain.from_iterable(one.audits for one in asked)),
            list(chain.from_iterable(one.steps for one in asked)),
            sum(one.tokens for one in asked), [one.correct for one in asked if one.correct is not None],
            start, end, sum(one.chunk_seconds for one in asked),
            {outcome: int(told[f"prefetched_{outcome}"]) for outcome in ("used", "wasted", "filled", "late")},
            0 if digests is None or arm.mode == "off" else digests.shape.nbytes,
        )  # fmt: skip
    finally:
        cache.close()


class _Asked(NamedTuple):
    audits: list[Audit]
    steps: list[float]
    tokens: int
    correct: bool | None
    chunk_seconds: float


def _ask(
    worker: AttachedModel, tokenizer: PreTrainedTokenizerBase, client: Client, session: Session, cache: TieredCache,
    ask: Ask,
) -> _Asked:  # fmt: skip
    """A question and `ANSWER_STEPS` of its answer, or the tokens that are forced, each a step."""
    length, before = session.length, _figures(client, session).blocked_seconds
    if ask.probe is None:
        forced, said = list(ask.tokens), None
    else:
        question = tokenizer(ask.probe.prompt, add_special_tokens=False).input_ids
        session.label("user", len(question))
        forced, said = [], [_forward(worker, cache, question)]
    chunk = _figures(client, session).blocked_seconds - before
    seen, steps, tokens = len(cache.audits), [], 0
    while tokens < (ANSWER_STEPS if said else len(forced)):
        token = said[-1] if said else forced[tokens]
        known, begun = len(cache.audits), time.perf_counter()
        following = _forward(worker, cache, [token])
        took = time.perf_counter() - begun
        tokens += 1
        if said:
            said.append(following)
        if len(cache.audits) == known:
            steps.append(took)
    audits = cache.audits[seen:]
    correct = None if said is None or ask.probe is None else recalled(tokenizer.decode(said), ask.probe.gold)
    cache.crop(length - session.length)
    return _Asked(audits, steps, tokens, correct, chunk)


def record(given: Input, share: float, arm: Arm, geometry: Geometry, served: Served) -> Record:
    brought = served.brought
    blocked = served.after.blocked_seconds - served.before.blocked_seconds - served.chunk_seconds
    mean = statistics.fmean
    return Record(
        given.title, share, arm.name,
        mean(audit.attended for audit in served.audits),
        mean(audit.oracle for audit in served.audits),
        probe_recall=mean(served.correct) if served.correct else None,
        captured_mass=mean(1 - audit.missed for audit in served.audits),
        mass_ratio=_ratio(sum(a.estimated for a in served.audits), sum(a.missed for a in served.audits)),
        digest_bytes_ratio=served.digest_bytes / geometry.page_bytes,
        wasted_ratio=_ratio(brought["wasted"], brought["used"] + brought["wasted"]),
        blocked_ms_per_token=1e3 * blocked / served.tokens,
        step_ms=1e3 * statistics.median(served.steps),
        chunk_blocked_ms=1e3 * served.chunk_seconds / len(given.asks),
        brought=brought["used"] + brought["wasted"],
        filled=brought["filled"],
        questions=len(served.correct),
    )  # fmt: skip


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _figures(client: Client, session: Session) -> SessionFigures:
    return next(one for one in client.sessions() if one.session == session.id)


def _forward(worker: AttachedModel, cache: TieredCache, tokens: Sequence[int]) -> int:
    """The likeliest next token."""
    model = worker.model
    ids = torch.tensor([list(tokens)])
    logits = model(ids, logits_to_keep=1, **{cache_argument(model): cache}).logits
    return int(logits[0, -1].argmax())
