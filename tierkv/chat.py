"""`Conversation`: a chat of many turns over one session. Messages in, text out; only new tokens are prefilled.

The conversation keeps the tokens of every message it was told. A call renders what is new, compares it with what the
session holds, crops the session where they part (an edited history, a template that renders an earlier message
otherwise) and runs the rest. What the model generated is continued with its own tokens, never tokenized again from
its text. Each message's tokens are labelled with the region that follows from its role.

An error changes nothing: messages and their tokens are those before the call. Tokens that reached the session stay
there where they serve a retry, and are cropped otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

from tierkv.chat_messages import Message, ToolCall, Turn, parse_tool_calls, read_message, read_messages
from tierkv.chat_render import Renderer, Span
from tierkv.chat_stream import Pieces, Stopped, stream_pieces
from tierkv.errors import TierKVError
from tierkv.geometry import DTypeName
from tierkv.model import CACHE_NAMES, attach
from tierkv.regions import Region, parse_region
from tierkv.tiered_layer import TieredLayer
from tierkv.transformers_cache import TieredCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tierkv.client import Client
    from tierkv.session import Session

MAX_NEW_TOKENS = 256
"""Tokens of a reply at most, where the caller does not say."""


class Reply(NamedTuple):
    """What the assistant said. `str(reply)` is its text.

    `tool_calls` are those found in the text (`parse_tool_calls`). `prompt_tokens` is the whole conversation before the
    reply; the session held `reused_tokens` of them, the others were prefilled.
    """

    text: str
    tool_calls: tuple[ToolCall, ...]
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens

    @property
    def message(self) -> dict[str, object]:
        """The message to append to a list that the caller keeps."""
        return _answer_turn(self.text, self.tool_calls).message()

    def __str__(self) -> str:
        return self.text


class _Told(NamedTuple):
    """A message and its tokens."""

    turn: Turn
    spans: list[Span]
    written: str | None = None
    """The text as the model generated it; its tokens are its own."""
    open: bool = False
    """Generated, and the template's end of the message is not among the tokens yet."""

    def says(self, turn: Turn) -> bool:
        """Whether the caller means this message. Of a generated one ids and outer blanks may differ."""
        if self.written is None:
            return self.turn == turn
        if turn.role != "assistant":
            return False
        if turn.calls:
            return _words(turn) == _words(self.turn)
        return turn.text.strip() == self.written.strip()


class Conversation:
    """A context manager. One caller at a time; `close` gives the pages back.

    Args:
        model: is attached (`tierkv.attach`), and stays so.
        tools: for the template, JSON schemas or functions.
        regions: region by role, over `chat_render.REGIONS`.
        dtype: of exact pages; default the model's.
        recall: mode of the `TieredCache`; None takes its default.
        chunk_tokens: prompt tokens a forward at most; default that of `TieredCache`.
        template_options: more variables for the chat template, such as `enable_thinking`.
        session_options: those of `Client.open`: `ladder`, `hbm_budget`, `pins`.

    Raises:
        ValueError: `regions` names no role.
        TierKVError: what `attach` and `Client.open` raise.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        client: Client,
        *,
        tools: Sequence[Any] | None = None,
        regions: Mapping[str, str | Region] | None = None,
        dtype: DTypeName | None = None,
        recall: str | None = None,
        chunk_tokens: int | None = None,
        template_options: Mapping[str, object] | None = None,
        **session_options: Any,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.last: Reply | None = None
        """The last reply that was completed; `stream` leaves it here."""
        self._renderer = Renderer(tokenizer, tools, regions, template_options)
        self._told: list[_Told] = []
        self._held: list[tuple[Region, int]] = []
        self._busy = threading.Lock()
        attached = attach(model)
        names = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in CACHE_NAMES if name in names)
        self.session: Session = attached.open(client, dtype, **session_options)
        self._cache_options: dict[str, Any] = {"chunk_tokens": chunk_tokens}
        if recall is not None:
            self._cache_options["recall"] = recall
        try:
            self._cache = TieredCache(self.session, **self._cache_options)
        except BaseException:
            self.session.close()
            raise

    # What was said --------------------------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, object]]:
        """Every message so far, replies included."""
        return [told.turn.message() for told in self._told]

    @property
    def spans(self) -> list[Span]:
        """Every token so far, with its region."""
        return [span for told in self._told for span in told.spans]

    @property
    def tokens(self) -> list[int]:
        """Ids of every token so far."""
        return _ids(self.spans)

    # Turns ----------------------------------------------------------------------------------------------------

    def append(self, messages: str | Message | Iterable[Message]) -> int:
        """Tell the conversation more messages (a string is the user's) and prefill them; nothing is generated.

        Returns:
            The tokens that were prefilled.

        Raises:
            ValueError: a message cannot be read, the template refuses it, or the model's context is full.
            PagesLost: a new owner could not adopt everything; the same call again prefills what is lost.
            TierKVError: no room, or no daemon.
        """
        with self._turn():
            return self._append(messages, 0)[0]

    def follow(self, messages: str | Message | Iterable[Message], steps: int) -> torch.Tensor:
        """`append`, but the last `steps` tokens run one decode step each, as if the model wrote them.

        Where the new messages have fewer tokens, the last ones before them run again.

        Returns:
            Logits `[steps, vocabulary]` after each of these tokens, in the model's dtype.

        Raises:
            ValueError: what `append` raises it for, or there are fewer tokens than `steps`.
        """
        if steps < 1:
            raise ValueError(f"follow takes at least one step, not {steps}")
        with self._turn():
            return torch.stack(self._append(messages, steps)[1])

    def reply(
        self,
        messages: str | Message | Sequence[Message] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        region: str | Region | None = None,
        on_text: Callable[[str], None] | None = None,
        **generate_options: Any,
    ) -> Reply:
        """Let the model answer, and keep the answer as the assistant's message.

        Args:
            messages: a list is the whole conversation so far (what the session holds of it is not run again, and an
                edited history is cropped where it changed); a mapping is the next message, a string the user's next
                one; None answers what was appended.
            region: of the answer's tokens; default the assistant's (`scratchpad`). `plan`, `tool_in`, ...
            on_text: told each piece of the text as it comes. What it raises ends the generation.
            generate_options: those of `model.generate`, for one sequence.

        Raises:
            ValueError: a message cannot be read, the last one is the assistant's, the template refuses them, the
                model's context is full, or the options ask for several sequences.
            PagesLost: a new owner could not adopt everything; the same call again prefills what is lost.
            TierKVError: no room, or no daemon.
        """
        ask = self._ask(messages, max_new_tokens, region, generate_options)
        with self._turn():
            return self._reply(ask, on_text, threading.Event())

    def stream(
        self,
        messages: str | Message | Sequence[Message] | None = None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        region: str | Region | None = None,
        **generate_options: Any,
    ) -> Iterator[str]:
        """Pieces of the answer's text as they come; `last` holds the reply afterwards. Takes what `reply` takes.

        The model runs in a thread of its own, and what it raises is raised here. Closing the iterator early (or leaving
        the loop) ends the generation after the token at hand; what was written so far is the assistant's message.
        """
        ask = self._ask(messages, max_new_tokens, region, generate_options)
        return self._stream(ask)

    def close(self) -> None:
        """Give every page back; the model stays attached. Closing twice does nothing."""
        self.session.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this conversation is in a turn: finish or close its stream first")
        try:
            yield
        finally:
            self._busy.release()

    def _ask(
        self, messages: object, max_new_tokens: int, region: str | Region | None, options: dict[str, Any]
    ) -> _Ask:
        """Everything of a call that can be checked before anything runs."""
        for name in ("num_beams", "num_return_sequences"):
            given = options.get(name, getattr(self.model.generation_config, name, None))
            if given not in (None, 1):
                raise ValueError(f"{name} = {given}: a conversation is one sequence")
        for name in ("prompt_lookup_num_tokens", "assistant_model"):
            if options.get(name, getattr(self.model.generation_config, name, None)) is not None:
                raise ValueError(
                    f"{name}: transformers' draft verification cannot continue a cache that holds earlier turns"
                )
        for name in ("input_ids", "inputs", "attention_mask", "streamer", *CACHE_NAMES):
            if name in options:
                raise ValueError(f"{name} is the conversation's own; it cannot be given")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        told = [known.turn for known in self._told]
        if messages is None:
            turns = told
        elif isinstance(messages, str | Mapping):
            turns = told + _new_turns(messages)
        else:
            turns = read_messages(messages)
        if not turns:
            raise ValueError("there is no message to answer")
        if turns[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: append a user or tool message to answer")
        found = self._renderer.regions["assistant"] if region is None else parse_region(region)
        return _Ask(turns, max_new_tokens, found, options)

    def _tell(self, turns: list[Turn], answer: bool) -> tuple[list[_Told], list[Span]]:
        """The conversation as it will be, and what opens the answer. Changes nothing."""
        same = 0
        while same < min(len(turns), len(self._told)) and self._told[same].says(turns[same]):
            same += 1
        while True:
            is_open = same > 0 and self._told[same - 1].open
            found = self._renderer.extend(turns, same, is_open, answer)
            if found is not None:
                break
            same -= 1  # the template renders earlier messages otherwise by now
        told = self._told[:same]
        ends = iter(found.turns)
        if is_open:
            answer_spans = told[-1].spans
            end = [Span(answer_spans[-1].region, span.tokens) for span in next(ends)]
            told[-1] = told[-1]._replace(spans=answer_spans + end, open=False)
        told += [_Told(turn, spans) for turn, spans in zip(turns[same:], ends, strict=True)]
        return told, found.opening

    def _append(self, messages: object, steps: int) -> tuple[int, list[torch.Tensor]]:
        told, _ = self._tell([known.turn for known in self._told] + _new_turns(messages), False)
        spans = [span for one in told for span in one.spans]
        ids = _ids(spans)
        self._check_room(len(ids), 0)
        if steps > len(ids):
            raise ValueError(f"{steps} decode steps of {len(ids)} tokens; follow more at once")
        start = self._align(spans, len(ids) - steps)
        logits = []
        with self._running(spans, start):
            edges = [start, *range(len(ids) - steps, len(ids) + 1)]
            for first, stop in itertools.pairwise(edges):
                if first < stop:
                    logits.append(self._forward(ids[first:stop]))
        self._told = told
        return len(ids) - start, logits[len(logits) - steps :]

    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Run tokens; the logits `[vocabulary]` after the last one."""
        given = torch.tensor([ids], device=self.model.device)
        options = {self._cache_name: self._cache, "logits_to_keep": 1}
        logits: torch.Tensor = self.model(input_ids=given, **options).logits[0, -1]
        return logits.clone()

    def _reply(self, ask: _Ask, on_text: Callable[[str], None] | None, stop: threading.Event) -> Reply:
        told, opening = self._tell(ask.turns, True)
        opening = [Span(ask.region, span.tokens) for span in opening]
        spans = [span for one in told for span in one.spans] + opening
        ids = _ids(spans)
        new_tokens = self._check_room(len(ids), ask.max_new_tokens)
        reused = self._align(spans, len(ids) - 1)
        options: dict[str, Any] = dict(ask.options)
        if options.get("stop_strings") is not None:
            options.setdefault("tokenizer", self.tokenizer)
        criteria = [*options.get("stopping_criteria", ()), Stopped(stop)]
        options["stopping_criteria"] = StoppingCriteriaList(criteria)
        given = torch.tensor([ids], device=self.model.device)
        with self._running(spans, reused):
            self.session.label(ask.region, new_tokens)
            found = self.model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=new_tokens,
                streamer=None if on_text is None else Pieces(self._decode, on_text),
                **{self._cache_name: self._cache}, **options,
            )  # fmt: skip
            everything: list[int] = getattr(found, "sequences", found)[0].tolist()
        written = everything[len(ids) :]
        self._held = _labelled([*spans, Span(ask.region, written)])[: self._cache.padded_length]
        own = written[:-1] if written and written[-1] in self._ends(options) else written
        text = self._decode(own)
        rest, calls = parse_tool_calls(text, sum(len(one.turn.calls) for one in told))
        turn = _answer_turn(rest, calls)
        told.append(_Told(turn, [*opening, Span(ask.region, own)], written=text, open=True))
        self._told = told
        self.last = Reply(rest, calls, len(ids), reused, len(written))
        return self.last

    def _stream(self, ask: _Ask) -> Iterator[str]:
        with self._turn():
            yield from stream_pieces(lambda told, stop: self._reply(ask, told, stop))

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _ends(self, options: dict[str, Any]) -> set[int]:
        """Tokens that end a generation."""
        ends = options.get("eos_token_id", self.model.generation_config.eos_token_id)
        return set(ends) if isinstance(ends, list | tuple) else set() if ends is None else {int(ends)}

    def _check_room(self, tokens: int, new_tokens: int) -> int:
        """New tokens that the model's context has room for, at most `new_tokens`."""
        limit: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is None:
            return new_tokens
        if tokens + min(new_tokens, 1) > limit:
            raise ValueError(
                f"the conversation has {tokens} tokens; the model takes {limit}: start another one"
            )
        return min(new_tokens, limit - tokens)

    # The session ----------------------------------------------------------------------------------------------

    def _align(self, spans: list[Span], limit: int) -> int:
        """Crop the session to the longest prefix of `spans` that it holds, at most `limit`; its length."""
        if self._cache.padded_length != self.session.length:  # a crop failed half-way
            if any(not isinstance(layer, TieredLayer) for layer in self._cache.layers):
                self.session.crop(0)  # sliding windows go on from the start only
            self._cache = TieredCache(self.session, **self._cache_options)
        wanted_tokens = _labelled(spans)
        common = 0
        for held, wanted in zip(self._held[: self.session.length], wanted_tokens[:limit], strict=False):
            if held != wanted:
                break
            common += 1
        if self.session.lost:  # what a new owner could not adopt is prefilled again
            common = min(common, *(start for start, _ in self.session.lost))
        if common < self._cache.padded_length:
            try:
                self._cache.crop(common - self._cache.padded_length)
            except RuntimeError:  # a sliding window that went on: what it held before is gone
                self._cache.reset()
                common = 0
        self._held = wanted_tokens[:common]
        return common

    @contextlib.contextmanager
    def _running(self, spans: list[Span], start: int) -> Iterator[None]:
        """Run the tokens from `start` on, labelled. However it ends, no label waits and `_held` is what is held."""
        passed = 0
        for region, tokens in spans:
            passed += len(tokens)
            self.session.label(region, min(len(tokens), passed - start))
        try:
            yield
        except BaseException:
            with contextlib.suppress(TierKVError, RuntimeError):
                self._cache.crop(-max(0, self._cache.padded_length - passed))
            raise
        finally:
            self.session.unlabel()
            self._held = _labelled(spans)[: min(self._cache.padded_length, self.session.length)]


class _Ask(NamedTuple):
    turns: list[Turn]
    max_new_tokens: int
    region: Region
    options: dict[str, Any]


def _new_turns(messages: object) -> list[Turn]:
    if isinstance(messages, str):
        return [Turn("user", messages)]
    return [read_message(messages)] if isinstance(messages, Mapping) else read_messages(messages)


def _answer_turn(text: str, calls: Sequence[ToolCall]) -> Turn:
    return Turn("assistant", text, tuple(calls))


def _words(turn: Turn) -> tuple[str, list[tuple[str, str]]]:
    return turn.text.strip(), [(call.name, call.arguments) for call in turn.calls]


def _ids(spans: Iterable[Span]) -> list[int]:
    return [token for span in spans for token in span.tokens]


def _labelled(spans: Iterable[Span]) -> list[tuple[Region, int]]:
    return [(span.region, token) for span in spans for token in span.tokens]


__all__ = ["MAX_NEW_TOKENS", "Conversation", "Reply"]
