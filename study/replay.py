"""Replay recorded conversations over a daemon under a budget, and measure what the tiers cost in quality.

A trace goes through `tierkv.chat.Conversation` message by message, its assistant messages given, not generated. Its
last `SCORED_TOKENS` tokens run as decode steps, one at a time, as if the model wrote them: that is where pages come
back. The distribution after each of these tokens is compared with that of the same model over a DynamicCache, which
keeps everything exact in the model's own dtype; so KL holds the pages' bfloat16 rounding too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from tierkv.chat import Conversation
from tierkv.chat_messages import Turn, read_messages
from tierkv.chat_render import Renderer
from tierkv.errors import ConfigError, TierKVError
from tierkv.geometry import DTypeName
from tierkv.model import attach
from tierkv.study.probe import cache_argument, dynamic_cache
from tierkv.study.traces import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tierkv import Client

SCORED_TOKENS = 64
"""Tokens at a trace's end that run as decode steps and are compared."""

LEAST_PAGES = 8
"""A budget holds at least as many exact pages: the daemon refuses fewer than 3, and a slice of a prompt takes 2."""

POOL_DTYPE: DTypeName = "bfloat16"
CHUNK_TOKENS = 256  # of the full arm's prompt; its result does not depend on it
SETTLE_SECONDS = 5.0
TIERS = ("hbm", "quantized", "host", "dropped")


class Setup(NamedTuple):
    """What every trace runs on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    client: Client
    budget: float  # fraction of a trace's exact KV bytes
    recall: str | None = None
    compare: bool = True
    owner_pid: int | None = None  # whose memory is watched


class Quality(msgspec.Struct):
    """Over the scored tokens: mean KL(full || tiered) in nats, and how often both have the same likeliest token."""

    tokens: int
    kl: float
    top1: float


class TraceReport(msgspec.Struct):
    """One trace. Bytes; memory is private (anonymous) memory, so that the pools are not counted."""

    number: int
    name: str
    error: str | None = None
    messages: int = 0
    messages_cut: int = 0
    tokens: int = 0
    tokens_cut: int = 0
    budget_bytes: int = 0
    hbm_peak_bytes: int = 0
    pages: dict[str, int] = {}
    seconds: float = 0.0
    quality: Quality | None = None
    bytes_left: int = 0
    worker_memory: int = 0
    daemon_memory: int = 0


def replay_trace(setup: Setup, number: int, trace: Trace) -> TraceReport:
    """Replay one trace in a session of its own. What goes wrong is in the report's `error`."""
    report = TraceReport(number, trace.name)
    before = _used_bytes(setup.client)
    try:
        _replay(setup, trace, report)
    except (TierKVError, ValueError) as error:
        report.error = f"{type(error).__name__}: {error}"
    report.bytes_left = _bytes_left(setup.client, before)
    gc.collect()
    report.worker_memory = private_memory(None)
    report.daemon_memory = private_memory(setup.owner_pid) if setup.owner_pid else 0
    return report


def _replay(setup: Setup, trace: Trace, report: TraceReport) -> None:
    model, tokenizer, client = setup.model, setup.tokenizer, setup.client
    turns, lengths = fitting(model, Renderer(tokenizer, trace.tools), read_messages(trace.messages), report)
    report.messages, report.tokens = len(turns), sum(lengths)
    geometry = attach(model).geometry(POOL_DTYPE, client.page_tokens)
    wanted = int(setup.budget * report.tokens * geometry.token_bytes)
    report.budget_bytes = max(wanted, LEAST_PAGES * geometry.page_bytes)
    scored = min(SCORED_TOKENS, report.tokens)
    opened = 0  # the first message of those that hold the scored tokens
    while sum(lengths[opened + 1 :]) >= scored:
        opened += 1
    messages = trace.messages[: len(turns)]
    begin = time.perf_counter()
    with Conversation(
        model, tokenizer, client, tools=trace.tools, dtype=POOL_DTYPE, recall=setup.recall,
        hbm_budget=report.budget_bytes,
    ) as conversation, _watched(model, client, conversation, report):  # fmt: skip
        for message in messages[:opened]:
            conversation.append(message)
        tiered = conversation.follow(messages[opened:], scored)
        numbers = client.stats(conversation.session.id)
        report.pages = {tier: int(numbers[f"pages_{tier}"]) for tier in TIERS if f"pages_{tier}" in numbers}
        report.seconds = time.perf_counter() - begin
        tokens = conversation.tokens
    if setup.compare:
        report.quality = quality(full_logits(model, tokens, scored), tiered)


def fitting(
    model: PreTrainedModel, renderer: Renderer, turns: list[Turn], report: TraceReport
) -> tuple[list[Turn], list[int]]:
    """The messages from the first on that the model's context takes, and the tokens of each; the report tells the rest.

    Raises:
        ValueError: not even the first message fits.
    """
    rendering = renderer.extend(turns)
    assert rendering is not None  # nothing is held
    lengths = [sum(len(span.tokens) for span in spans) for spans in rendering.turns]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    kept = len(turns)
    while limit is not None and sum(lengths[:kept]) > limit:
        kept -= 1
    if not kept:
        raise ValueError(f"the first message has {lengths[0]} tokens; the model takes {limit}")
    report.messages_cut, report.tokens_cut = len(turns) - kept, sum(lengths[kept:])
    return turns[:kept], lengths[:kept]


@torch.inference_mode()
def full_logits(model: PreTrainedModel, tokens: list[int], last: int) -> torch.Tensor:
    """Logits `[last, vocabulary]` after each of the last tokens, over a DynamicCache."""
    cache, name = dynamic_cache(model), cache_argument(model)
    start = len(tokens) - last
    for first in range(0, start, CHUNK_TOKENS):
        part = torch.tensor([tokens[first : min(first + CHUNK_TOKENS, start)]])
        model(part, logits_to_keep=1, **{name: cache})
    logits: torch.Tensor = model(torch.tensor([tokens[start:]]), logits_to_keep=last, **{name: cache}).logits[
        0
    ]
    return logits


def quality(full: torch.Tensor, tiered: torch.Tensor) -> Quality:
    """Compare next-token distributions, logits `[tokens, vocabulary]` each."""
    p, q = full.double().log_softmax(-1), tiered.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    same = (full.argmax(-1) == tiered.argmax(-1)).double().mean()
    return Quality(len(full), float(kl), float(same))


@contextmanager
def _watched(
    model: PreTrainedModel, client: Client, conversation: Conversation, report: TraceReport
) -> Iterator[None]:
    """Note the session's HBM bytes in every slice and step, when its new pages are taken."""

    def look(*_: object) -> None:
        taken = int(client.stats(conversation.session.id)["hbm_bytes"])
        report.hbm_peak_bytes = max(report.hbm_peak_bytes, taken)

    hook = model.get_input_embeddings().register_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()


def load_model(
    folder: Path | None, dtype: torch.dtype | str = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2 (extra `study`), or the transformers model of a folder; `auto` is the dtype that it was saved in.

    Raises:
        ConfigError: it is not there or cannot be read.
    """
    if folder is None:
        from tierkv.study.model import load_smollm2

        return load_smollm2(dtype)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one with a transformers model and its tokenizer")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no model with a tokenizer that transformers can read: {error}"
        ) from error


def private_memory(pid: int | None) -> int:
    """Anonymous resident bytes of a process (this one: None); 0 where it cannot be read."""
    try:
        lines = Path("/proc", "self" if pid is None else str(pid), "status").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in lines)
    return int(found.get("RssAnon", "0 kB").split()[0]) << 10


def _used_bytes(client: Client) -> int:
    numbers = client.stats()
    return int(numbers["hbm_used_bytes"] + numbers["host_used_bytes"])


def _bytes_left(client: Client, before: int, wait: Callable[[float], None] = time.sleep) -> int:
    """Bytes of pages in use beyond `before`, once what was closed has been given back."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := _used_bytes(client) - before) > 0 and time.monotonic() < deadline:
        wait(0.02)
    return max(0, left)
