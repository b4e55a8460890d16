"""`tierkv study record`: attention traces of episodes and of chats in a folder, so that scores are studied from them.

What is there already is not recorded again. A file that is damaged, or of other tokens, heads or another model, is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tierkv.chat_messages import read_messages
from tierkv.chat_render import Renderer
from tierkv.errors import ConfigError
from tierkv.study.memdecay.attention import StudyAttention
from tierkv.study.memdecay.record import WINDOW, Reading, label, of_episode, record
from tierkv.study.memdecay.scenarios import TIERS, VARIANTS, Episode, Tier, episodes, load_scenarios
from tierkv.study.memdecay.traces import Trace, load_trace
from tierkv.study.traces import Trace as Chat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHAT_TOKENS = 8192
"""What SmolLM2 was trained on; a longer chat is cut there."""

CHAT_WINDOW = 16
"""Queries that are recorded at the end of each message: 48 of a chat by head would be a quarter of a gigabyte."""

Split = Literal["all", "dev", "report"]

Told = Callable[[int, int, str], None]
"""Hears, before each piece of work and after the last: how many are done, how many there are, and what comes."""


class Recorded(NamedTuple):
    """Traces that are in `folder` now: `new` were recorded, `kept` had been there."""

    folder: Path
    new: tuple[str, ...]
    kept: tuple[str, ...]


def of_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, tokens: int = CHAT_TOKENS) -> Reading:
    """A stage a message, a block a span of one region; cut after `tokens`.

    Raises:
        ConfigError: the tokenizer's template refuses the messages, or renders none of them.
    """
    try:
        rendering = Renderer(tokenizer, chat.tools).extend(read_messages(chat.messages))
    except ValueError as error:
        raise ConfigError(f"chat {chat.name}: {error}") from error
    assert rendering is not None  # nothing is held
    ids: list[int] = []
    regions: list[int] = []
    blocks: list[int] = []
    stages: list[int] = []
    for spans in rendering.turns:
        for span in spans:
            fitting = span.tokens[: tokens - len(ids)]
            if fitting:
                blocks.append(len(ids))
                ids += fitting
                regions += [int(span.region)] * len(fitting)
        if ids and (not stages or len(ids) > stages[-1]):
            stages.append(len(ids))
    if not ids:
        raise ConfigError(f"chat {chat.name} has no tokens; nothing can be recorded of it")
    return Reading(chat.name, ids, regions, blocks, stages)


def holds(file: Path, reading: Reading, model: str, window: int, every: int = 0, heads: int = 0) -> bool:
    """Whether `file` is the whole trace of this reading. heads: how many (layer, head) the model has."""
    try:
        trace = load_trace(file)
    except ConfigError:
        return False
    begins = [0, *reading.stages[:-1]]
    queries = [q for a, b in zip(begins, reading.stages, strict=True) for q in range(max(a, b - window), b)]
    shape = (-(-heads // every), trace.mass.shape[-1]) if every else (trace.mass.shape[-1],)
    return (
        trace.model == model
        and trace.mass.shape == shape
        and trace.tokens.tolist() == reading.tokens
        and trace.regions.tolist() == reading.regions
        and trace.stages.tolist() == reading.stages
        and trace.queries.tolist() == queries
    )


def run(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    split: Split = "all",
    tiers: Sequence[Tier] = ("short", "long"),
    variants: Sequence[int] = (0, 1, 2),
    chats: Sequence[Chat] = (),
    tokens: int = CHAT_TOKENS,
    every: int = 0,
    window: int | None = None,
    told: Told = lambda done, total, what: None,
) -> Recorded:
    """Record episodes, or with `chats` these instead.

    Args:
        tokens: a chat is cut there, and in any case at the model's longest context.
        every: 0 averages over layers and heads; n keeps each n-th (layer, head) by itself, in files `*.by-n`.
        window: queries of each stage; by default 48 of an episode's, 16 of a chat's.

    Raises:
        ConfigError: a chat cannot be rendered, or two would be one file.
    """
    limit = min(tokens, model.config.max_position_embeddings)
    if chats:
        work = [of_chat(chat, tokenizer, limit) for chat in chats]
    else:
        work = [of_episode(e) for e in _episodes(split, tiers, variants, tokenizer)]
    named = Counter(file_name(reading.name, every) for reading in work)
    if doubled := [name for name, times in named.items() if times > 1]:
        raise ConfigError(
            f"{named[doubled[0]]} chats would all be {doubled[0]}.safetensors; give each a name of its own"
        )
    window = window or (CHAT_WINDOW if chats else WINDOW)
    attention, heads = (
        StudyAttention(model),
        model.config.num_hidden_layers * model.config.num_attention_heads,
    )
    new: list[str] = []
    kept: list[str] = []
    for done, reading in enumerate(work):
        file = folder / f"{file_name(reading.name, every)}.safetensors"
        told(done, len(work), reading.name)
        if holds(file, reading, label(model), window, every, heads):
            kept.append(file.stem)
            continue
        _, trace = record(model, attention, reading, window, every)
        trace.save(file)
        new.append(file.stem)
    told(len(work), len(work), "done")
    return Recorded(folder, tuple(new), tuple(kept))


def file_name(name: str, every: int = 0) -> str:
    """A chat's name may hold anything; a file's holds letters, digits, dots and dashes."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "chat"
    return f"{plain}.by-{every}" if every else plain


def _episodes(
    split: Split, tiers: Iterable[Tier], variants: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Episode]:
    scenarios = load_scenarios(None if split == "all" else split)
    for tier in tiers:
        yield from (e for e in episodes(scenarios, tier, tokenizer) if e.variant in variants)


def load_folder(folder: Path, by_head: bool = False, options: str = "") -> Iterator[Trace]:
    """The folder's traces, one after another by name: those averaged over heads, or those by head.

    options: of `tierkv study record`, that make such traces; an error names them.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    files = [
        f for f in sorted(folder.glob("*.safetensors")) if bool(re.search(r"\.by-\d+$", f.stem)) == by_head
    ]
    if not files:
        kind = "by head " if by_head else ""
        raise ConfigError(f"{folder} holds no attention trace {kind}yet; {_record(folder, options)}")
    yield from map(load_trace, files)


def load_pairs(
    folder: Path, split: Split, tokenizer: PreTrainedTokenizerBase, every: int = 0, options: str = ""
) -> Iterator[tuple[Episode, Trace]]:
    """The split's episodes that the folder has a trace of, of that `every` (see `run`), with it. options: as above.

    Raises:
        ConfigError: there is none, or a trace cannot be read.
    """
    found = False
    for episode in _episodes(split, TIERS, range(VARIANTS), tokenizer):
        file = folder / f"{file_name(episode.name, every)}.safetensors"
        if file.exists():
            found = True
            yield episode, load_trace(file)
    if not found:
        kind = "by head " if every else ""
        raise ConfigError(
            f"{folder} holds no attention trace {kind}of the {split} scenarios; {_record(folder, options)}"
        )


def _record(folder: Path, options: str) -> str:
    return " ".join(["run: tierkv study record", *options.split(), "--out", str(folder)])
