"""The texts: which are reported on, and which a codec may be fitted on. No text is in both.

Runs of tau-airline share their system prompt, so what counts here begins after it. All other families come with this
package or with Python. Families take turns, so that the first few inputs are of different ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.benchmarks.quant import FORCED, RECENT, SINKS
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Names = Mapping[str, tuple[str, ...]]

REPORT: Names = {
    "tau-airline": ("task 0, trial 0", "task 10, trial 0", "task 25, trial 0", "task 30, trial 1"),
    "prose": ("string-methods", "typesseq", "typesmapping", "debugger"),
    "code": ("statistics", "difflib", "zipfile", "threading"),
    "agent": ("brewery, clinic", "harbour, newsroom", "observatory, railway", "satellite, vineyard"),
}
CALIBRATION: Names = {
    "tau-airline": ("task 5, trial 1", "task 20, trial 1", "task 15, trial 0"),
    "prose": ("compound", "types", "specialnames"),
    "code": ("textwrap", "socketserver", "argparse"),
    "agent": ("loan, theatre", "tunnel, depot", "orchard, library"),
}
"""By family: a run; a topic of `pydoc_data.topics`; a module of the standard library; two scenarios of the study, one
after the other."""

DESIGNED_ON: Names = {
    "tau-airline": tuple(f"task {task}, trial {trial}" for trial in (2, 3) for task in range(0, 50, 5)),
    "prose": ("compound", "specialnames", "types", "formatstrings"),
    "code": ("argparse", "tarfile", "inspect", "typing"),
}
"""Looked at while codecs were designed: never reported on."""

DATA = Path("../shared/data/tau_airline")
FILE = "trajectories.json"

CONTEXT = 2848
"""Tokens that are cached: 178 pages, of which 172 are packed. Texts to fit on are as long."""

QUICK_CONTEXT = 928
QUICK_CALIBRATION_CONTEXT = 544

GRAIN = 64
"""What is packed is a multiple of so many tokens: the longest group of a form."""


def find_data(given: Path | None) -> Path | None:
    """The folder of tau-airline, or `None` where there is none and none was asked for."""
    folder = given or DATA
    if (folder / FILE).is_file():
        return folder
    if given is not None:
        raise ConfigError(
            f"{given} holds no {FILE}; leave --data out to run on the texts that are here anyway"
        )
    return None


class Text(NamedTuple):
    family: str
    name: str
    tokens: list[int]  # the context, then FORCED + 1 more (the last one is only predicted)

    @property
    def context(self) -> int:
        return len(self.tokens) - FORCED - 1

    @property
    def title(self) -> str:
        return f"{self.family}: {self.name}"


def read(
    names: Names,
    tokenizer: PreTrainedTokenizerBase,
    data: Path | None,
    context: int,
    count: int | None = None,
) -> list[Text]:
    """The first `count` texts, families in turn, each with at most `context` tokens to cache.

    Args:
        data: folder of tau-airline; `None` leaves that family out.

    Raises:
        ConfigError: a text is missing or too short.
    """
    families = [
        _family(family, wanted, tokenizer, data)
        for family, wanted in names.items()
        if family != "tau-airline" or data is not None
    ]
    turns = chain.from_iterable(zip_longest(*families))
    found = [_cut(text, context) for text in turns if text is not None]
    return found[:count]


def _cut(text: Text, context: int) -> Text:
    exact = SINKS + RECENT
    room = (len(text.tokens) - FORCED - 1 - exact) // GRAIN * GRAIN + exact
    if room <= exact:
        raise ConfigError(f"{text.title} has only {len(text.tokens)} tokens; name a longer text")
    return text._replace(tokens=text.tokens[: min(room, context) + FORCED + 1])


def _family(
    family: str, names: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, data: Path | None
) -> Iterator[Text]:
    if family == "tau-airline":
        assert data is not None
        found: Iterable[list[int]] = _runs(names, tokenizer, data)
    elif family == "agent":
        found = (_scenarios(name.split(", "), tokenizer) for name in names)
    else:
        texts = _topics(names) if family == "prose" else map(_module, names)
        found = (tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts)
    for name, tokens in zip(names, found, strict=True):
        yield Text(family, name, tokens)


def _runs(names: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, data: Path) -> Iterator[list[int]]:
    """Each run from its second message on: the first is the system prompt, the same in all."""
    from tierkv.chat_messages import read_messages
    from tierkv.chat_render import Renderer
    from tierkv.study.traces import load_traces

    traces = {trace.name: trace for trace in load_traces(data / FILE)}
    for name in names:
        if name not in traces:
            raise ConfigError(
                f"{data / FILE} holds no run called {name!r}; name tau-airline's folder with --data"
            )
        rendering = Renderer(tokenizer, traces[name].tools).extend(read_messages(traces[name].messages))
        assert rendering is not None  # nothing is held
        yield [token for spans in rendering.turns[1:] for span in spans for token in span.tokens]


def _topics(names: tuple[str, ...]) -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in names]


def _module(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"this Python has no source of its module {name}")
    return Path(spec.origin).read_text(encoding="utf-8")


def _scenarios(names: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    from tierkv.study.memdecay.scenarios import build, load_scenarios

    known = {scenario.name: scenario for scenario in load_scenarios()}
    return [token for name in names for token in build(known[name], 0, "long", tokenizer).tokens]
