"""`tierkv study overhead`: what observed attention costs a decode step, and how long a policy takes to decide.

A step that is scored beside one that is not, over the same tokens:

tierkv   pages, with a daemon that wants attention after every step (`observe_every` 1), and with one that never does
eager    the paper's way: eager attention, which hands its weights out, and sdpa; nothing is done with the weights

Both of a pair run one after the other, each first by turns, so that a busy machine slows both; the ratio is the median
over pairs. Milliseconds are of this machine at this load, and are not comparable with the paper's, which stand beside.

A decision is made of one observation, of page scores and the choice of what leaves at half of the tokens, and of
cutting that out of a transformers cache, which tierkv never does: its pages leave by copies in the background.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

import tierkv
from tierkv import model_support
from tierkv.study import processes
from tierkv.study.memdecay.ablate import DEFAULTS
from tierkv.study.memdecay.arms import Arm, compared
from tierkv.study.memdecay.evict import budget_tokens, evict, pages_of
from tierkv.study.memdecay.scenarios import Episode
from tierkv.study.memdecay.survival import Told, unheard
from tierkv.study.memdecay.tiered import DTYPE, HOST_BYTES, POLICY
from tierkv.study.memdecay.traces import Trace
from tierkv.study.probe import cache_argument, dynamic_cache, forward
from tierkv.transformers_cache import TieredCache

if TYPE_CHECKING:
    from transformers import Cache, LlamaForCausalLM

    from tierkv import Client

LENGTHS = (466, 1700)
"""Tokens of the context; the paper's figures are at the first."""

PAIRS = 24
WARM = 2
"""Pairs, or rounds, that run first and do not count."""

ROUNDS = 100
NEVER = 1_000_000
"""Decode steps between observations: more than are made."""

BUDGET = 0.5
CHUNK_TOKENS = 256

PAPER_SCORED, PAPER_UNSCORED, PAPER_SELECT, PAPER_EVICT = 69.8, 26.0, 0.27, 4.2
"""arXiv 2607.10582, at 466 tokens, in ms: a scored and an unscored step; scoring and selection; eviction."""

Layer = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[int], float]
"""Runs one token; how long it took, in milliseconds."""


class Paired(msgspec.Struct, frozen=True):
    """Medians in milliseconds; `ratio` is the median over pairs of scored over unscored, between its quartiles."""

    way: str
    tokens: int
    pairs: int
    scored_ms: float
    unscored_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float


class Decision(msgspec.Struct, frozen=True):
    """Medians in milliseconds."""

    policy: str
    tokens: int
    pages: int
    observe_ms: float
    select_ms: float
    evict_ms: float


class Report(msgspec.Struct, frozen=True):
    """`load`: processes that wanted a core, over the minute before."""

    model: str
    threads: int
    load: float
    steps: list[Paired]
    decisions: list[Decision]


def run(
    model: LlamaForCausalLM,
    episode: Episode,
    lengths: Sequence[int] = LENGTHS,
    pairs: int = PAIRS,
    told: Told = unheard,
) -> Report:
    """Over contexts of `lengths` tokens: the episode's, from the first on, as often as it takes.

    Raises:
        TierKVError: a daemon could not start or serve.
    """
    load, work = os.getloadavg()[0], len(lengths)
    contexts = [np.resize(np.array(episode.tokens), n + WARM + pairs).tolist() for n in lengths]
    steps: list[Paired] = []
    for done, (length, tokens) in enumerate(zip(lengths, contexts, strict=True)):
        told(done, 2 * work, f"{length} tokens, eager attention")
        steps.append(by_eager(model, tokens, length))
    attached = tierkv.attach(model)
    try:
        pool = 4 * (max(lengths) + WARM + pairs) * attached.geometry(DTYPE).token_bytes
        with serving(1, pool) as scoring, serving(NEVER, pool) as silent:
            for done, (length, tokens) in enumerate(zip(lengths, contexts, strict=True), work):
                told(done, 2 * work, f"{length} tokens, tierkv")
                steps.append(by_tierkv(attached, (scoring, silent), tokens, length))
    finally:
        attached.detach()
    regions = [int(block.region) for block in episode.blocks for _ in range(block.start, block.stop)]
    decisions = [
        decide(arm, np.resize(np.array(regions, np.int8), length), model)
        for length in lengths
        for arm in compared()
        if arm.name in DEFAULTS
    ]
    told(2 * work, 2 * work, "done")
    name = str(model.config.name_or_path).rstrip("/").rsplit("/", 1)[-1]
    return Report(name, torch.get_num_threads(), load, steps, decisions)


def measure(way: str, length: int, scored: Step, unscored: Step, tokens: Sequence[int]) -> Paired:
    """One pair a token, of which the first `WARM` do not count."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn, token in enumerate(tokens):
        for which in (0, 1) if turn % 2 else (1, 0):
            spent[which].append((scored, unscored)[which](token))
    first, second = (np.array(one[WARM:]) for one in spent)
    ratios = first / second
    low, high = np.percentile(ratios, [25, 75]).tolist()
    return Paired(
        way, length, len(ratios), float(np.median(first)), float(np.median(second)), float(np.median(ratios)), low, high
    )  # fmt: skip


def stepping(
    model: LlamaForCausalLM, cache: Cache, implementation: str | None = None, **options: bool
) -> Step:
    """implementation: of attention, set before the clock starts."""

    @torch.inference_mode()
    def step(token: int) -> float:
        if implementation is not None:
            model.set_attn_implementation(implementation)
        ids, arguments = torch.tensor([[token]]), {cache_argument(model): cache, **options}
        begin = time.perf_counter()
        model(ids, logits_to_keep=1, **arguments)
        return 1e3 * (time.perf_counter() - begin)

    return step


def by_eager(model: LlamaForCausalLM, tokens: Sequence[int], length: int) -> Paired:
    """tokens: `length` of context, then one a pair."""
    before = model.config._attn_implementation
    caches = [dynamic_cache(model) for _ in range(2)]
    try:
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            for cache in caches:
                forward(model, cache, tokens[:length])
        scored = stepping(model, caches[0], "eager", output_attentions=True)
        unscored = stepping(model, caches[1], "sdpa")
        return measure("eager", length, scored, unscored, tokens[length:])
    finally:
        model.set_attn_implementation(before)


def by_tierkv(
    attached: tierkv.AttachedModel, clients: tuple[Client, Client], tokens: Sequence[int], length: int
) -> Paired:
    """clients: of a daemon that wants attention, and of one that does not. All pages are exact and in HBM."""
    with ExitStack() as stack:

        def filled(client: Client) -> Step:
            session = attached.open(client, DTYPE, ladder="tiered", pins={})
            stack.callback(session.close)
            session.label("user", length)
            cache = TieredCache(session, chunk_tokens=CHUNK_TOKENS)
            with torch.inference_mode():
                forward(attached.model, cache, tokens[:length])
            return stepping(attached.model, cache)

        scored, silent = map(filled, clients)
        return measure("tierkv", length, scored, silent, tokens[length:])


@contextmanager
def serving(observe_every: int, pool: int) -> Iterator[Client]:
    """A daemon of `pool` bytes of HBM, and a client of it."""
    settings = {"policy": POLICY, "observe_every": observe_every, "low_watermark": 0, "high_watermark": 0}
    with processes.serving(pool, HOST_BYTES, settings) as client:
        yield client


def decide(arm: Arm, regions: NDArray[np.int8], model: LlamaForCausalLM, rounds: int = ROUNDS) -> Decision:
    """Over a context of these regions; masses and keys are drawn, since no time depends on them."""
    length, rng = len(regions), np.random.default_rng(0)
    tokens, none, masses = np.arange(length, dtype=np.int32), np.zeros(0, np.int32), np.zeros(0, np.float16)
    context = Trace("", "", tokens, regions, none, none, none, masses)
    pages = pages_of(context, arm.unit, arm.page_tokens)
    free, budget = np.zeros(len(pages.starts), bool), budget_tokens(context, BUDGET)
    geometry = model_support.geometry(model, DTYPE)
    shape = (1, geometry.num_kv_heads, length, geometry.head_dim)
    held = [(torch.randn(shape), torch.randn(shape)) for _ in range(geometry.num_layers)]
    state = arm.policy.new_state()
    state.append(regions, 0)
    spent: list[tuple[float, float, float]] = []
    for step in range(1, WARM + rounds + 1):
        mass = rng.dirichlet(np.ones(length)).astype(np.float32)
        begin = time.perf_counter()
        state.observe(mass, step)
        observed = time.perf_counter()
        kept = evict(pages, state.page_scores(pages.starts, pages.counts, step), free, budget)
        selected = time.perf_counter()
        cut(held, kept)
        spent.append((observed - begin, selected - observed, time.perf_counter() - selected))
    observe, select, leave = (1e3 * statistics.median(one) for one in zip(*spent[WARM:], strict=True))
    return Decision(arm.name, length, len(pages.starts), observe, select, leave)


def cut(held: Sequence[Layer], kept: NDArray[np.bool_]) -> list[Layer]:
    """Keys and values, `[1, kv_heads, tokens, head_dim]` of each layer, of the tokens that are kept."""
    index = torch.from_numpy(np.flatnonzero(kept))
    return [(keys.index_select(2, index), values.index_select(2, index)) for keys, values in held]


def render(report: Report) -> Group:
    steps = _table("A decode step, ms", "way", "tokens", "scored", "unscored", "ratio", "quartiles")
    for one in report.steps:
        steps.add_row(
            one.way, f"{one.tokens}", f"{one.scored_ms:.1f}", f"{one.unscored_ms:.1f}", f"{one.ratio:.2f}",
            f"{one.ratio_low:.2f}-{one.ratio_high:.2f}",
        )  # fmt: skip
    ratio = f"{PAPER_SCORED / PAPER_UNSCORED:.2f}"
    steps.add_row("paper (eager)", "466", f"{PAPER_SCORED}", f"{PAPER_UNSCORED}", ratio, "", style="dim")
    decisions = _table("A decision, ms", "policy", "tokens", "pages", "observe", "select", "cut out")
    for made in report.decisions:
        decisions.add_row(
            made.policy, f"{made.tokens}", f"{made.pages}", f"{made.observe_ms:.3f}", f"{made.select_ms:.3f}",
            f"{made.evict_ms:.2f}",
        )  # fmt: skip
    decisions.add_row("paper", "466", "", "", f"{PAPER_SELECT}", f"{PAPER_EVICT}", style="dim")
    note = (
        f"{report.model}, {report.threads} threads, medians; load before: {report.load:.1f}. The paper's figures are "
        "of another model and machine: ratios are to be held beside, milliseconds only to see their order."
    )
    return Group(steps, decisions, Text(note, style="dim"))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, title_justify="left"
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("way", "policy") else "right", no_wrap=True)
    return table
