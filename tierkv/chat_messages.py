"""Messages of a chat, in OpenAI's format, read into one plain shape; and tool calls, read out of a model's text.

A message is a mapping with `role` (`system`, `developer`, `user`, `assistant`, `tool`) and `content`: a string, `None`,
or a list of text parts. An assistant message may carry `tool_calls`, a tool message `tool_call_id` and `name`. Any
message may carry `region`, which overrules what follows from its role. Other keys (`refusal`, `annotations`, ...) are
ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tierkv.regions import Region, parse_region

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, object]
"""One message as a caller writes it."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """`arguments` is JSON text, as OpenAI's are; a model may have written something else."""

    id: str
    name: str
    arguments: str

    def message(self) -> dict[str, object]:
        """As an entry of `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Turn(NamedTuple):
    """A message that was read: two messages that say the same are equal."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    region: Region | None = None

    def message(self) -> dict[str, object]:
        """As a caller would write it; content is null where there are calls only."""
        written: dict[str, object] = {"role": self.role, "content": self.text}
        if self.calls:
            written["content"] = self.text or None
            written["tool_calls"] = [call.message() for call in self.calls]
        for key, value in (("tool_call_id", self.call_id), ("name", self.name)):
            if value:
                written[key] = value
        if self.region is not None:
            written["region"] = self.region.label
        return written


def read_messages(messages: object) -> list[Turn]:
    """Read a list of messages.

    Raises:
        ValueError: what is wrong, and with which message.
        UnknownRegion: a message names a `region` that does not exist.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages are a list of mappings, not {type(messages).__name__}")
    return [read_message(message, f"message {index}") for index, message in enumerate(messages)]


def read_message(message: object, what: str = "the message") -> Turn:
    """Read one message; `what` names it in errors. Raises what `read_messages` does."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{what} is {type(message).__name__}; it must be a mapping with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{what} has the role {role!r}; use one of {', '.join(ROLES)}")
    if message.get("function_call") is not None:
        raise ValueError(f"{what} has a function_call; write it as an entry of tool_calls")
    text = _read_content(message.get("content"), f"{what} ({role})")
    calls = _read_calls(message.get("tool_calls"), f"{what} ({role})")
    if calls and role != "assistant":
        raise ValueError(f"{what} has tool_calls; only an assistant message calls tools, not {role}")
    if text is None and not calls:
        raise ValueError(f"{what} ({role}) has neither content nor tool_calls")
    region = message.get("region")
    if region is not None and not isinstance(region, str | int):
        raise ValueError(f"{what} has the region {region!r}; it is a name")
    return Turn(
        str(role),
        text or "",
        calls,
        _read_string(message, "tool_call_id", what),
        _read_string(message, "name", what),
        None if region is None else parse_region(region),
    )


def parse_tool_calls(text: str, first: int = 0) -> tuple[str, tuple[ToolCall, ...]]:
    """What a model wrote: the text outside its calls, and the calls.

    Read is `<tool_call>JSON</tool_call>`, JSON being an object `{"name": ..., "arguments": {...}}` or a list of them
    (how Hermes, Qwen and SmolLM2 call). A block that is not that stays in the text. Ids count from `call_<first>`.
    """
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        try:
            found = json.loads(block[1])
        except ValueError:
            return block[0]
        entries = found if isinstance(found, list) else [found]
        if not entries or not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries):
            return block[0]
        for entry in entries:
            arguments = entry.get("arguments", {})
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(f"call_{first + len(calls)}", entry["name"], written))
        return ""

    rest = _CALL.sub(take, text)
    return (rest.strip() if calls else text), tuple(calls)


def _read_content(content: object, what: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(
            f"{what} has content of type {type(content).__name__}; it is a string, null or text parts"
        )
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"{what} has a content part of type {kind!r}; only text is understood")
        parts.append(text)
    return "".join(parts)


def _read_calls(calls: object, what: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise ValueError(f"{what} has tool_calls of type {type(calls).__name__}; they are a list")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{what} has the tool call {call!r}; it needs function.name and function.arguments"
            )
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str | Mapping):
            raise ValueError(
                f"{what} calls {function['name']} with {arguments!r}; arguments are a JSON object"
            )
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(ToolCall(_read_string(call, "id", what), str(function["name"]), written))
    return tuple(found)


def _read_string(message: Message, key: str, what: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{what} has the {key} {value!r}; it is a string")
    return value or ""


__all__ = ["ROLES", "Message", "ToolCall", "Turn", "parse_tool_calls", "read_message", "read_messages"]
