"""Messages as callers write them, and calls as models write them."""

from __future__ import annotations

import pytest

from tierkv.chat_messages import ToolCall, Turn, parse_tool_calls, read_message, read_messages
from tierkv.errors import UnknownRegion
from tierkv.regions import Region

CALL = {"id": "call_7", "type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}


def test_openais_messages_are_read_with_their_calls_and_what_else_they_carry_is_ignored() -> None:
    turns = read_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "fly "}, {"type": "text", "text": "me"}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_7", "name": "find", "content": ""},
            {"role": "user", "content": "from the manual: ...", "region": "retrieval"},
        ]
    )
    assert turns == [
        Turn("developer", "be brief"),
        Turn("user", "fly me"),
        Turn("assistant", "", (ToolCall("call_7", "find", '{"city": "Oslo"}'),)),
        Turn("tool", "", (), "call_7", "find"),
        Turn("user", "from the manual: ...", region=Region.RETRIEVAL),
    ]


def test_what_was_read_is_written_as_it_was() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "SK 12", "tool_call_id": "call_7", "name": "find"},
        {"role": "user", "content": "and back?", "region": "plan"},
    ]
    assert [turn.message() for turn in read_messages(messages)] == messages


def test_arguments_may_be_an_object() -> None:
    call = {"function": {"name": "find", "arguments": {"city": "Zürich"}}}
    turn = read_message({"role": "assistant", "tool_calls": [call]})
    assert turn.calls == (ToolCall("", "find", '{"city": "Zürich"}'),)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hello", "the message is str"),
        ({"content": "x"}, "role None"),
        ({"role": "robot", "content": "x"}, "use one of system, developer, user, assistant, tool"),
        ({"role": "user"}, "neither content nor tool_calls"),
        ({"role": "tool", "content": None}, "neither content nor tool_calls"),
        ({"role": "user", "content": 7}, "content of type int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'; only text"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "only an assistant message calls tools"),
        ({"role": "assistant", "tool_calls": {"name": "x"}}, "they are a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "needs function.name"),
        ({"role": "assistant", "function_call": {"name": "x"}}, "write it as an entry of tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id 3"),
        ({"role": "user", "content": "x", "region": 1.5}, "region 1.5"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_its_reason(message: object, said: str) -> None:
    with pytest.raises(ValueError, match="message") as refused:
        read_message(message)
    assert said in str(refused.value)


def test_the_refusal_names_the_message() -> None:
    with pytest.raises(ValueError, match="message 1 has the role 'bot'"):
        read_messages([{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}])
    with pytest.raises(UnknownRegion, match="'attic'"):
        read_messages([{"role": "user", "content": "x", "region": "attic"}])
    with pytest.raises(ValueError, match="not dict"):
        read_messages({"role": "user", "content": "x"})


def test_calls_in_a_models_text_are_found_as_object_and_as_list() -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>'
    )
    rest, calls = parse_tool_calls(text, first=3)
    assert rest == "I look."
    assert calls == (
        ToolCall("call_3", "find", '{"city": "Oslo"}'),
        ToolCall("call_4", "a", "{}"),
        ToolCall("call_5", "b", "{}"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>[]</tool_call>",
        " a ",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, ())
