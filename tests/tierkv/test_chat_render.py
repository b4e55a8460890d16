"""What templates make of messages: nothing is lost, and every token has the region of who wrote it."""

from __future__ import annotations

import pytest

from tests.tierkv.chat_tokenizer import CHATML, LOOKAHEAD, STRICT, TOOLS, tokenizer
from tierkv.chat_messages import Turn, read_messages
from tierkv.chat_render import Renderer, Rendering

MESSAGES = [
    {"role": "system", "content": "Book flights."},
    {"role": "user", "content": "To Oslo?"},
    {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [{"id": "call_0", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}],
    },
    {"role": "tool", "name": "find", "tool_call_id": "call_0", "content": "SK 12, 9:40"},
    {"role": "tool", "name": "find", "tool_call_id": "call_0", "content": "DY 3, 11:05"},
    {"role": "assistant", "content": "At 9:40."},
]
TURNS = read_messages(MESSAGES)
SCHEMA = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}},
}


def rendered(renderer: Renderer, turns: list[Turn], **how: object) -> Rendering:
    found = renderer.extend(turns, **how)  # type: ignore[arg-type]
    assert found is not None
    return found


def told(renderer: Renderer, found: Rendering) -> list[tuple[str, str]]:
    """(region, text) of every span."""
    spans = [span for turn in [*found.turns, found.opening] for span in turn]
    return [(span.region.label, renderer.tokenizer.decode(span.tokens)) for span in spans]


@pytest.mark.parametrize(
    "template", [CHATML, TOOLS, LOOKAHEAD, None], ids=["chatml", "tools", "lookahead", "none"]
)
def test_nothing_that_was_said_is_lost_whatever_the_template_drops(template: str | None) -> None:
    text = Renderer(tokenizer(template), tools=[SCHEMA]).text(TURNS)
    places = [text.index(word) for word in (
        "Book flights.", "To Oslo?", "I look it up.", '"city": "Oslo"', "SK 12, 9:40", "DY 3, 11:05", "At 9:40."
    )]  # fmt: skip
    assert places == sorted(places)
    assert "Finds." in text


def test_a_template_without_calls_gets_the_documented_plain_form_of_them() -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call>'
    text = Renderer(tokenizer(CHATML)).text(TURNS)
    assert f"<|im_start|>assistant\nI look it up.\n{call}<|im_end|>" in text
    assert "<|im_start|>tool\nSK 12, 9:40<|im_end|>" in text


def test_a_template_that_refuses_tool_messages_gets_them_from_the_user() -> None:
    turns = [TURNS[1], TURNS[2], TURNS[3], TURNS[5]]
    text = Renderer(tokenizer(STRICT)).text(turns)
    assert "[INST]<tool_response>\nSK 12, 9:40\n</tool_response>[/INST]At 9:40." in text


def test_what_the_template_refuses_is_a_value_error_with_its_words() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        Renderer(tokenizer(STRICT)).text([TURNS[1], TURNS[1]])


@pytest.mark.parametrize("template", [CHATML, TOOLS, LOOKAHEAD, STRICT, None])
def test_the_tokens_are_those_of_the_template_and_the_spans_are_all_of_them(template: str | None) -> None:
    turns = [TURNS[1], TURNS[5], TURNS[1]] if template == STRICT else TURNS
    renderer = Renderer(tokenizer(template))
    found = rendered(renderer, turns, answer=True)
    spans = [token for turn in [*found.turns, found.opening] for span in turn for token in span.tokens]
    assert spans == renderer.tokenizer(renderer.text(turns, True), add_special_tokens=False)["input_ids"]
    assert len(found.turns) == len(turns)


@pytest.mark.parametrize("template", [CHATML, TOOLS, LOOKAHEAD])
def test_regions_follow_from_roles_and_the_call_in_a_message_is_a_region_of_its_own(template: str) -> None:
    renderer = Renderer(tokenizer(template))
    spans = told(renderer, rendered(renderer, TURNS, answer=True))
    for region, words in [
        ("system", "Book flights."), ("user", "To Oslo?"), ("scratchpad", "I look it up."), ("tool_in", "Oslo\"}"),
        ("tool_out", "SK 12, 9:40"), ("tool_out", "DY 3, 11:05"), ("scratchpad", "At 9:40."),
    ]:  # fmt: skip
        assert [where for where, text in spans if words in text] == [region], words
    assert spans[-1] == ("scratchpad", "<|im_start|>assistant\n")


def test_regions_can_be_given_by_role_and_by_message() -> None:
    renderer = Renderer(tokenizer(CHATML), regions={"tool": "retrieval"})
    turns = read_messages([MESSAGES[0], MESSAGES[1] | {"region": "plan"}, MESSAGES[3]])
    assert [region for region, _ in told(renderer, rendered(renderer, turns))] == [
        "system",
        "plan",
        "retrieval",
    ]
    with pytest.raises(ValueError, match="'tol'; use some of system"):
        Renderer(tokenizer(CHATML), regions={"tol": "user"})


def test_a_default_system_text_is_system_and_a_lone_first_token_is_not() -> None:
    chat, strict = Renderer(tokenizer(CHATML)), Renderer(tokenizer(STRICT))
    assert told(chat, rendered(chat, TURNS[1:2])) == [
        ("system", "<|im_start|>system\nYou are a helpful model, made of random numbers.<|im_end|>\n"),
        ("user", "<|im_start|>user\nTo Oslo?<|im_end|>\n"),
    ]
    assert told(strict, rendered(strict, TURNS[1:2])) == [("user", "<s>[INST]To Oslo?[/INST]")]


@pytest.mark.parametrize("held", [1, 2, 3, 5, 6])
def test_what_follows_held_messages_is_the_rest_of_the_whole(held: int) -> None:
    renderer = Renderer(tokenizer(CHATML))
    whole, rest = rendered(renderer, TURNS, answer=True), rendered(renderer, TURNS, held=held, answer=True)
    assert rest == whole._replace(first=held, turns=whole.turns[held:])


def test_a_generated_answer_is_closed_and_continued_without_its_text() -> None:
    renderer = Renderer(tokenizer(CHATML))
    turns = [TURNS[0], TURNS[1], TURNS[5], Turn("user", "Thanks")]
    found = rendered(renderer, turns, held=3, open_answer=True, answer=True)
    assert found.first == 2
    assert told(renderer, found) == [
        ("scratchpad", "<|im_end|>\n"),
        ("user", "<|im_start|>user\nThanks<|im_end|>\n"),
        ("scratchpad", "<|im_start|>assistant\n"),
    ]


def test_a_template_that_looks_ahead_is_told_apart_and_an_earlier_start_works() -> None:
    renderer = Renderer(tokenizer(LOOKAHEAD))
    assert renderer.extend(TURNS, held=4) is None  # the end of the first tool message moved behind the second
    assert renderer.extend(TURNS, held=3) is not None


def test_python_functions_are_tools_too() -> None:
    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name.
        """
        return city

    for template in (CHATML, TOOLS):
        assert "Weather of a city." in Renderer(tokenizer(template), tools=[weather]).text(TURNS)
