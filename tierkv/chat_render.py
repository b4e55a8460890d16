"""From messages to tokens: what the tokenizer's chat template makes of them, cut into spans of one region each.

Nothing that a caller said may get lost on the way. A template is asked once what it renders; for what it drops there
is a plain form, that of Hermes and Qwen, inside the messages that it does render:

- a tool call        `<tool_call>` newline `{"name": ..., "arguments": ...}` newline `</tool_call>`, after the text
- a tool's answer    a user message: `<tool_response>` newline, the text, newline `</tool_response>`
- the tools          `<tools>`, one JSON schema a line, `</tools>`, at the end of the system message
- developer          a system message

A tokenizer without a chat template gets `PLAIN`. Borders of messages come from rendering prefixes of the list; where
a template has no such prefixes (it looks ahead, or wants a user message), from finding the message's text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.utils import get_json_schema

from tierkv.chat_messages import ToolCall, Turn
from tierkv.regions import Region, parse_region

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}{{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""The chat template of tokenizers that have none."""

REGIONS: Mapping[str, Region] = {
    "system": Region.SYSTEM,
    "developer": Region.SYSTEM,
    "user": Region.USER,
    "assistant": Region.SCRATCHPAD,
    "tool_calls": Region.TOOL_IN,
    "tool": Region.TOOL_OUT,
}
"""Region of what each role says; `tool_calls` is the part of an assistant message that calls."""

PREAMBLE_CHARACTERS = 32
"""What a template puts before the first message is a region of its own (system) from this length on: a lone BOS token
is not worth a page."""

_ANSWER = "tierkv-answer-5d0c"
"""Stands for an answer whose own tokens are kept: only what the template puts after it is wanted."""

_PROBE = ("tierkv_probe_a", "tierkv_probe_b", "tierkv_probe_c")
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What a template raises that does not take some messages; it computes with what they hold."""

_PROBE_CALL = ToolCall("probe0000", _PROBE[0], json.dumps({_PROBE[1]: _PROBE[1]}))


class Span(NamedTuple):
    """Consecutive tokens of one region."""

    region: Region
    tokens: list[int]


class Rendering(NamedTuple):
    """Spans of each message from `first` on, and of the answer's opening (empty where none was asked for)."""

    first: int
    turns: list[list[Span]]
    opening: list[Span]


class Renderer:
    """Renders for one tokenizer.

    Args:
        tools: JSON schemas as OpenAI's, or Python functions with type hints and docstrings.
        regions: overrides of `REGIONS`, by its keys.
        options: more variables for the template (`enable_thinking`, ...).

    Raises:
        ValueError: `regions` has a key that is none. `UnknownRegion`: a region that does not exist.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Any] | None = None,
        regions: Mapping[str, str | Region] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        unknown = set(regions or {}) - set(REGIONS)
        if unknown:
            raise ValueError(f"regions has the key {min(unknown)!r}; use some of {', '.join(REGIONS)}")
        self.tokenizer = tokenizer
        self.regions = dict(REGIONS) | {key: parse_region(name) for key, name in (regions or {}).items()}
        self._tools = [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools or ()]
        self._options = dict(options or {})
        self._template = None if tokenizer.chat_template else PLAIN

    def text(self, turns: Sequence[Turn], answer: bool = False) -> str:
        """The messages as the model reads them; with `answer`, what opens the assistant's next one as well.

        Raises:
            ValueError: the template refuses these messages, and why.
        """
        try:
            return self._apply(self._entries(turns), answer, self._tools if self._takes_tools else None)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the tokenizer's chat template refuses these messages: {error}") from error

    def extend(
        self, turns: Sequence[Turn], held: int = 0, open_answer: bool = False, answer: bool = False
    ) -> Rendering | None:
        """Tokens that follow those of the first `held` messages.

        Args:
            turns: the whole conversation.
            held: messages whose tokens are there already.
            open_answer: the last held one was generated: the template's end of it is still to come, and is the first
                entry of the rendering (whose `first` is `held - 1` then).
            answer: open the assistant's next message.

        Returns:
            None where the template renders the first `held` messages otherwise once more follow: render from an earlier
            one (0 always works).

        Raises:
            ValueError: the template refuses these messages.
        """
        turns = list(turns)
        first = held - 1 if open_answer else held
        if open_answer:
            turns[first] = Turn("assistant", _ANSWER)
            text = self._prefix(turns, answer)
            if text is None or text.count(_ANSWER) != 1:
                return None
            start = text.index(_ANSWER) + len(_ANSWER)
        else:
            text = self.text(turns, answer)
            before = self._prefix(turns[:held]) if held else ""
            if before is None or not text.startswith(before):
                return None
            start = len(before)
        return self._cut(turns, first, text, start, answer)

    # Inside ---------------------------------------------------------------------------------------------------

    def _cut(self, turns: list[Turn], first: int, text: str, start: int, answer: bool) -> Rendering:
        """Tokens of `text[start:]` by message and region."""
        cuts, regions, owners = [start], [], []

        def cut(stop: int, region: Region, owner: int) -> None:
            if stop > cuts[-1]:
                cuts.append(stop)
                regions.append(region)
                owners.append(owner)

        for index in range(first, len(turns)):
            turn, stop = turns[index], self._stop(turns, index, text, cuts[-1], answer)
            if index == 0 and start == 0 and (own := self._preamble(turns)) >= PREAMBLE_CHARACTERS:
                cut(min(own, stop), Region.SYSTEM, 0)
            key = "tool_calls" if turn.calls else turn.role
            if turn.calls and turn.text.strip():
                said = text.find(turn.text.strip(), cuts[-1], stop)
                if said >= 0:
                    cut(said + len(turn.text.strip()), turn.region or self.regions[turn.role], index)
            cut(stop, self.regions[key] if turn.region is None else turn.region, index)
        cut(len(text), self.regions["assistant"], len(turns))
        found: list[list[Span]] = [[] for _ in range(len(turns) - first + 1)]
        for tokens, region, owner in zip(self._tokens(text, cuts), regions, owners, strict=True):
            if tokens:
                found[owner - first].append(Span(region, tokens))
        return Rendering(first, found[:-1], found[-1])

    def _stop(self, turns: list[Turn], index: int, text: str, start: int, answer: bool) -> int:
        """Where message `index` ends in `text`; as near as can be known where the template has no prefixes."""
        if index == len(turns) - 1 and not answer:
            return len(text)
        prefix = self._prefix(turns[: index + 1])
        if prefix is not None and len(prefix) >= start and text.startswith(prefix):
            return len(prefix)
        turn = turns[index]
        needle = turn.calls[-1].name if turn.calls else turn.text.strip()
        found = text.find(needle, start)
        return start if found < 0 else found + len(needle)

    def _preamble(self, turns: list[Turn]) -> int:
        """Characters that the template puts before the first message on its own account (a default system text)."""
        if turns[0].role in ("system", "developer"):
            return 0
        told = Turn("system", _PROBE[0])
        alone, before, both = (self._prefix(some) for some in (turns[:1], [told], [told, turns[0]]))
        if alone is None or before is None or both is None or not both.startswith(before):
            return 0
        own = both[len(before) :]
        return len(alone) - len(own) if own and alone.endswith(own) else 0

    def _tokens(self, text: str, cuts: list[int]) -> list[list[int]]:
        """Tokens of `text` between neighbouring `cuts`; one that crosses a cut belongs to the part it starts in."""
        if not self.tokenizer.is_fast:
            return [self._encode(text[start:stop])["input_ids"] for start, stop in itertools.pairwise(cuts)]
        found = self._encode(text, return_offsets_mapping=True)
        places = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
        if any(start < cuts[0] < stop for _, (start, stop) in places):
            # A token reaches from what is held into what is new: what is new is told on its own.
            return self._tokens(text[cuts[0] :], [cut - cuts[0] for cut in cuts])
        parts: list[list[int]] = [[] for _ in cuts[1:]]
        part = 0
        for token, (start, _) in places:
            if start >= cuts[0]:
                while part < len(parts) - 1 and start >= cuts[part + 1]:
                    part += 1
                parts[part].append(token)
        return parts

    def _encode(self, text: str, **options: bool) -> Any:
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _prefix(self, turns: list[Turn], answer: bool = False) -> str | None:
        """`text`, or None where the template refuses to render so few messages."""
        try:
            return self.text(turns, answer)
        except ValueError:
            return None

    def _apply(self, entries: list[dict[str, Any]], answer: bool, tools: list[Any] | None) -> str:
        text = self.tokenizer.apply_chat_template(
            entries,
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=answer,
            tokenize=False,
            **self._options,
        )
        assert isinstance(text, str)
        return text

    def _entries(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The messages as the template can take them; none is dropped."""
        entries = [entry for turn in turns for entry in self._entry(turn)]
        if self._tools and not self._takes_tools:
            schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools)
            text = f"You may call these tools:\n<tools>\n{schemas}\n</tools>"
            if not self._takes_calls:
                text += f"\nThis is how:\n{_plain_call('NAME', '{ARGUMENTS}')}"
            if entries and entries[0]["role"] == "system":
                entries[0]["content"] += f"\n\n{text}"
            else:
                entries.insert(0, {"role": "system", "content": text})
        return entries

    def _entry(self, turn: Turn) -> list[dict[str, Any]]:
        if turn.role == "developer" and not self._takes_developer:
            return [{"role": "system", "content": turn.text}]
        if turn.role == "tool" and not self._takes_answers:
            return [{"role": "user", "content": f"<tool_response>\n{turn.text}\n</tool_response>"}]
        entry: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.role == "tool":
            given = {"tool_call_id": turn.call_id, "name": turn.name}
            entry |= {key: value for key, value in given.items() if value}
        if not turn.calls:
            return [entry]
        if not self._takes_calls:
            blocks = [_plain_call(call.name, call.arguments) for call in turn.calls]
            return [entry | {"content": "\n".join(([turn.text] if turn.text else []) + blocks)}]
        calls = [_for_template(call) for call in turn.calls]
        if turn.text and not self._takes_text_with_calls:
            return [entry, {"role": "assistant", "content": "", "tool_calls": calls}]
        return [entry | {"tool_calls": calls}]

    # What the template renders, asked once --------------------------------------------------------------------

    @cached_property
    def _takes_tools(self) -> bool:
        function = {
            "name": _PROBE[0],
            "description": _PROBE[1],
            "parameters": {"type": "object", "properties": {}},
        }
        return self._shows(
            [{"role": "user", "content": "x"}], _PROBE[:2], [{"type": "function", "function": function}]
        )

    @cached_property
    def _takes_calls(self) -> bool:
        return self._shows(_probe_call(""), _PROBE[:2])

    @cached_property
    def _takes_text_with_calls(self) -> bool:
        return self._shows(_probe_call(_PROBE[2]), _PROBE)

    @cached_property
    def _takes_answers(self) -> bool:
        called = (
            _probe_call("")
            if self._takes_calls
            else [*_probe_call("")[:1], {"role": "assistant", "content": "x"}]
        )
        answer = {
            "role": "tool",
            "content": _PROBE[2],
            "tool_call_id": _PROBE_CALL.id,
            "name": _PROBE_CALL.name,
        }
        return self._shows([*called, answer], _PROBE[2:])

    @cached_property
    def _takes_developer(self) -> bool:
        return self._shows(
            [{"role": "developer", "content": _PROBE[0]}, {"role": "user", "content": "x"}], _PROBE[:1]
        )

    def _shows(
        self, entries: list[dict[str, Any]], words: Sequence[str], tools: list[Any] | None = None
    ) -> bool:
        try:
            text = self._apply(entries, False, tools)
        except TEMPLATE_ERRORS:
            return False
        return all(word in text for word in words)


def _probe_call(text: str) -> list[dict[str, Any]]:
    call = {"role": "assistant", "content": text, "tool_calls": [_for_template(_PROBE_CALL)]}
    return [{"role": "user", "content": "x"}, call]


def _plain_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments or "{}"}}}\n</tool_call>'


def _for_template(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments with `tojson`: they want the object, not its JSON text."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


__all__ = ["PLAIN", "PREAMBLE_CHARACTERS", "REGIONS", "Renderer", "Rendering", "Span"]
