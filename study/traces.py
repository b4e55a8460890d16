"""Traces: conversations that were recorded, read from a file.

- JSON: a list of traces, one trace, or the messages of one; a trace is an object with `messages` in OpenAI's format,
  maybe `tools`, and maybe `name` or tau-bench's `task_id` and `trial`
- JSONL: one trace, one list of messages, or one message a line
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierkv.chat_messages import Message, read_messages
from tierkv.errors import ConfigError, UnknownRegion


class Trace(NamedTuple):
    name: str
    messages: list[Message]
    tools: list[object] | None = None


def load_traces(file: Path) -> list[Trace]:
    """Every trace of a file, in its order.

    Raises:
        ConfigError: the file cannot be read, is of another shape, or a message is not what it should be.
    """
    try:
        content = _parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON or JSONL: {error}") from error
    entries = content if isinstance(content, list) else [content]
    if entries and all(isinstance(entry, dict) and "role" in entry for entry in entries):
        entries = [entries]
    traces = [_trace(entry, index, file) for index, entry in enumerate(entries)]
    if not traces:
        raise ConfigError(f"{file} holds no trace")
    return traces


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _trace(entry: object, index: int, file: Path) -> Trace:
    messages, tools, name = entry, None, str(index)
    if isinstance(entry, dict):
        messages, tools = entry.get("messages"), entry.get("tools")
        if isinstance(entry.get("name"), str):
            name = entry["name"]
        elif "task_id" in entry:
            name = f"task {entry['task_id']}, trial {entry.get('trial', 0)}"
    what = f"{file}, trace {index}"
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{what}: no messages; a trace is a list of them, or an object with `messages`")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{what}: tools of type {type(tools).__name__}; they are a list")
    try:
        read_messages(messages)
    except (ValueError, UnknownRegion) as error:
        raise ConfigError(f"{what}: {error}") from error
    return Trace(name, messages, tools)


def choose(traces: Sequence[Trace], numbers: Sequence[int], limit: int | None) -> list[tuple[int, Trace]]:
    """The traces with these numbers (all of them where none is given), at most `limit`, each with its number.

    Raises:
        ConfigError: there is no trace of that number.
    """
    wrong = [number for number in numbers if not 0 <= number < len(traces)]
    if wrong:
        raise ConfigError(f"there is no trace {wrong[0]}: the file holds 0 to {len(traces) - 1}")
    chosen = list(numbers) or list(range(len(traces)))
    return [(number, traces[number]) for number in chosen[:limit]]
