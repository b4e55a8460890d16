"""Regions found from a template's markers: those of whoever wrote each token, by templates of four families."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tierkv.chat_tokenizer import CHATML, SPECIAL, STRICT, tokenizer
from tierkv.markers import Markers
from tierkv.regions import Region, Run

QWEN = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA = (
    "{{ bos_token }}{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "<|start|>system<|end|>\n\nToday is 26 Jul 2024\n\n{{ told }}<|eot|>"
    "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant<|end|>\n\n"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}<|eot|>"
    "{% elif m.role == 'tool' %}<|start|>ipython<|end|>\n\n{{ m.content | tojson }}<|eot|>"
    "{% elif m.role != 'system' %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% set told = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{% if loop.last and told %}{{ told + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    '{% elif m.tool_calls %}[TOOL_CALLS][{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "arguments": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ ', \"id\": \"' + m.tool_calls[0].id + '\"}]' }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ '{\"content\": ' }}{{ m.content | tojson }}"
    "{{ ', \"call_id\": \"' + m.tool_call_id + '\"}' }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


class Family(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    parts: list[tuple[str, str]]  # (region, text) of the conversation below, with an answer's opening


CONVERSATION = [
    {"role": "system", "content": "Book flights."},
    {"role": "user", "content": "To Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {"city": "Oslo"}}},
    ]},
    {"role": "tool", "name": "find", "tool_call_id": "call00000", "content": "SK 12, 9:40"},
    {"role": "assistant", "content": "At 9:40."},
    {"role": "user", "content": "And back?"},
]  # fmt: skip

FAMILIES = {
    "qwen": Family(
        tokenizer(QWEN, (*SPECIAL, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
        [
            ("system", "<|im_start|>system\nBook flights.<|im_end|>\n"),
            ("user", "<|im_start|>user\nTo Oslo?<|im_end|>\n"),
            ("tool_in", '<|im_start|>assistant\n<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n'
             "</tool_call><|im_end|>\n"),
            ("tool_out", "<|im_start|>user\n<tool_response>\nSK 12, 9:40\n</tool_response><|im_end|>\n"),
            ("scratchpad", "<|im_start|>assistant\nAt 9:40.<|im_end|>\n"),
            ("user", "<|im_start|>user\nAnd back?<|im_end|>\n"),
            ("scratchpad", "<|im_start|>assistant\n"),
        ],
    ),
    "llama": Family(
        tokenizer(LLAMA, ("<pad>", "<s>", "<|start|>", "<|end|>", "<|eot|>", "<|im_end|>")),
        [
            ("system", "<s><|start|>system<|end|>\n\nToday is 26 Jul 2024\n\nBook flights.<|eot|>"),
            ("user", "<|start|>user<|end|>\n\nTo Oslo?<|eot|>"),
            ("tool_in", '<|start|>assistant<|end|>\n\n{"name": "find", "parameters": {"city": "Oslo"}}<|eot|>'),
            ("tool_out", '<|start|>ipython<|end|>\n\n"SK 12, 9:40"<|eot|>'),
            ("scratchpad", "<|start|>assistant<|end|>\n\nAt 9:40.<|eot|>"),
            ("user", "<|start|>user<|end|>\n\nAnd back?<|eot|>"),
            ("scratchpad", "<|start|>assistant<|end|>\n\n"),
        ],
    ),
    "mistral": Family(
        tokenizer(
            MISTRAL,
            ("<pad>", "<s>", "</s>", "<|im_end|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
             "[/TOOL_RESULTS]"),
        ),
        [
            ("user", "<s>[INST]To Oslo?"),
            ("tool_in", '[/INST][TOOL_CALLS][{"name": "find", "arguments": {"city": "Oslo"}, "id": "call00000"}]</s>'),
            ("tool_out", '[TOOL_RESULTS]{"content": "SK 12, 9:40", "call_id": "call00000"}'),
            ("scratchpad", "[/TOOL_RESULTS]At 9:40.</s>"),
            ("user", "[INST]Book flights.\n\nAnd back?"),  # it has no place for the system's
            ("scratchpad", "[/INST]"),
        ],
    ),
    "smollm2": Family(
        tokenizer(CHATML, bos="<|im_start|>"),  # its BOS opens every message
        [
            ("system", "<|im_start|>system\nBook flights.<|im_end|>\n"),
            ("user", "<|im_start|>user\nTo Oslo?<|im_end|>\n"),
            ("scratchpad", "<|im_start|>assistant\n<|im_end|>\n"),  # drops calls
            ("tool_out", "<|im_start|>tool\nSK 12, 9:40<|im_end|>\n"),
            ("scratchpad", "<|im_start|>assistant\nAt 9:40.<|im_end|>\n"),
            ("user", "<|im_start|>user\nAnd back?<|im_end|>\n"),
            ("scratchpad", "<|im_start|>assistant\n"),
        ],
    ),
}  # fmt: skip


NEWLINE = "\u010a"
"""How the tokenizer's vocabulary writes it."""


def told(tokenizer: PreTrainedTokenizerFast, runs: list[Run], ids: list[int]) -> list[tuple[str, str]]:
    """(region, text) of each run."""
    assert sum(run.tokens for run in runs) == len(ids)
    stops = [sum(run.tokens for run in runs[: i + 1]) for i in range(len(runs))]
    return [
        (run.region.label, tokenizer.decode(ids[stop - run.tokens : stop]))
        for run, stop in zip(runs, stops, strict=True)
    ]


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_message_of_a_conversation_has_its_roles_region(name: str) -> None:
    tokenizer, parts = FAMILIES[name]
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text == "".join(part for _, part in parts)
    ids = encoded(tokenizer, text)
    assert told(tokenizer, Markers.of(tokenizer).label(ids), ids) == parts


@pytest.mark.parametrize("name", ["qwen", "smollm2"])
def test_a_default_system_text_is_the_systems(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    ids = encoded(tokenizer, text)
    default, message = told(tokenizer, Markers.of(tokenizer).label(ids), ids)
    assert default[0] == "system" and default[1].startswith("<|im_start|>system\nYou are")
    assert message == ("user", "<|im_start|>user\nHi<|im_end|>\n")


def test_a_date_in_the_systems_opening_may_change() -> None:
    tokenizer = FAMILIES["llama"].tokenizer
    ids = encoded(tokenizer, "<s><|start|>system<|end|>\n\nToday is 1 Jan 2031\n\nHi<|eot|>")
    assert Markers.of(tokenizer).label(ids) == [Run(Region.SYSTEM, len(ids))]


def test_a_call_after_text_begins_where_the_call_does() -> None:
    tokenizer = FAMILIES["qwen"].tokenizer
    text = '<|im_start|>assistant\nI look it up.\n<tool_call>\n{"name": "find"}\n</tool_call><|im_end|>\n'
    ids = encoded(tokenizer, text)
    at = text.index("<tool_call>")
    assert told(tokenizer, Markers.of(tokenizer).label(ids), ids) == [
        ("scratchpad", text[:at]), ("tool_in", text[at:]),
    ]  # fmt: skip


def test_thinking_that_a_template_opens_is_the_assistants_and_no_call() -> None:
    """Such templates put an empty thought before an answer that is the last, and none before earlier ones."""
    thought = "<think>\n\n</think>\n\n"
    last = (
        "{% if m.role == 'assistant' and loop.last %}{{ '\n"
        + thought.replace("\n", "\\n")
        + "' }}{% endif %}"
    )
    content = "{% if m.content %}{{ '\n' + m.content }}"
    template = QWEN.replace(content, last + content).removesuffix("{% endif %}") + "<think>\n{% endif %}"
    tokenizer_ = tokenizer(template, (*SPECIAL, "<think>", "</think>", "<tool_call>", "</tool_call>"))
    markers = Markers.of(tokenizer_)
    system = ("system", "<|im_start|>system\nBook flights.<|im_end|>\n")
    asked = ("user", "<|im_start|>user\nTo Oslo?<|im_end|>\n")
    call = '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
    for count, prompt, parts in (
        (2, True, [system, asked, ("scratchpad", "<|im_start|>assistant\n<think>\n")]),
        (3, False, [system, asked, ("scratchpad", f"<|im_start|>assistant\n{thought}\n"), ("tool_in", call)]),
    ):
        text = tokenizer_.apply_chat_template(
            CONVERSATION[:count], tokenize=False, add_generation_prompt=prompt
        )
        assert text == "".join(part for _, part in parts)
        ids = encoded(tokenizer_, text)
        assert told(tokenizer_, markers.label(ids), ids) == parts


def test_a_call_that_instructions_show_is_none() -> None:
    tokenizer = FAMILIES["qwen"].tokenizer
    ids = encoded(tokenizer, "<|im_start|>system\nCall so: <tool_call>{}</tool_call><|im_end|>\n")
    assert Markers.of(tokenizer).label(ids) == [Run(Region.SYSTEM, len(ids))]


def test_what_a_template_drops_is_found_in_its_plain_form() -> None:
    """`Conversation` writes calls so where the template has no form of its own."""
    tokenizer = FAMILIES["smollm2"].tokenizer
    text = '<|im_start|>assistant\nA moment.\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call><|im_end|>\n'
    ids = encoded(tokenizer, text)
    at = text.index("<tool_call>")
    assert told(tokenizer, Markers.of(tokenizer).label(ids), ids) == [
        ("scratchpad", text[:at]), ("tool_in", text[at:]),
    ]  # fmt: skip


def test_markers_of_plain_text_are_found_too() -> None:
    tokenizer_ = tokenizer(STRICT)  # no added token but those around a conversation
    ids = encoded(tokenizer_, "<s>[INST]To Oslo?[/INST]At 9:40.</s>[INST]And back?[/INST]")
    assert told(tokenizer_, Markers.of(tokenizer_).label(ids), ids) == [
        ("user", "<s>[INST]To Oslo?"), ("scratchpad", "[/INST]At 9:40.</s>"), ("user", "[INST]And back?"),
        ("scratchpad", "[/INST]"),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["", ".", "\n"])
def test_a_marker_is_found_where_the_text_before_takes_blanks_into_its_last_token(end: str) -> None:
    tokenizer_ = tokenizer(None, merges=((NEWLINE, NEWLINE),))
    parts = [("user", f"User:\nTo Oslo{end}\n\n"), ("scratchpad", "Assistant:\nAt 9:40.\n\n")]
    ids = encoded(tokenizer_, "".join(text for _, text in parts))
    assert told(tokenizer_, Markers.of(tokenizer_).label(ids), ids) == parts


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
    "{{ 1 / 0 }}",
], ids=["nothing", "the-same-for-all", "an-error"])  # fmt: skip
def test_a_template_that_does_not_tell_who_speaks_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"nothing that opens a message of the (user|assistant)"):
        Markers.of(tokenizer(template))
