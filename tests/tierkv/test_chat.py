"""A conversation says what the model says over transformers' own cache, and runs each token once."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.faults.harness import Owner, until
from tests.tierkv.chat_tokenizer import CHATML, LOOKAHEAD, SIZE, tokenizer
from tests.tierkv.tiny_models import build, count_forward_tokens, expected
from tierkv.chat import Conversation
from tierkv.errors import OutOfCapacity, OwnerUnavailable, PagesLost, UnknownRegion

SYSTEM = {"role": "system", "content": "You book flights for people who are in a hurry."}
ASK = {"role": "user", "content": "A flight to Oslo, please."}
MORE = {"role": "user", "content": "And back on Sunday?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "find", "arguments": '{"to": "Oslo"}'}}],
}
FOUND = {"role": "tool", "name": "find", "content": "SK 12 at 9:40"}

PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, K and V, heads, tokens, head_dim, float32."""

Start = Callable[..., Conversation]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tierkv-", dir="/dev/shm"))
    owner = Owner(made, 256 * PAGE_BYTES, 8 << 20)
    yield made
    owner.kill()
    shutil.rmtree(made)


@pytest.fixture
def client(folder: Path) -> Iterator[tierkv.Client]:
    with tierkv.connect(folder) as connected:
        yield connected


@pytest.fixture
def start(client: tierkv.Client) -> Iterator[Start]:
    """A conversation with a fresh tiny model, whose greedy output is bytes that are mostly no text."""
    made: list[Conversation] = []

    def conversation(
        template: str | None = CHATML, model: dict[str, Any] | None = None, **options: Any
    ) -> Conversation:
        tiny = build("llama", **{"vocab_size": SIZE, "max_position_embeddings": 2048} | (model or {}))
        made.append(Conversation(tiny, tokenizer(template), client, **{"ladder": "exact"} | options))
        return made[-1]

    yield conversation
    for one in made:
        one.close()


def say(conversation: Conversation, messages: Any, **options: Any) -> str:
    return conversation.reply(messages, **{"max_new_tokens": 12, "do_sample": False} | options).text


def answer_of(
    conversation: Conversation, prompt: list[int], new_tokens: int = 12, **options: Any
) -> list[int]:
    """What the model generates after `prompt` over a DynamicCache."""
    ids = torch.tensor([prompt])
    found = expected(
        conversation.model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        max_new_tokens=new_tokens,
        **options,
    )
    return found[0, len(prompt) :].tolist()


def template_ids(conversation: Conversation, messages: list[Any]) -> list[int]:
    found = conversation.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(found["input_ids"])


def test_the_answer_is_that_of_generate_over_a_dynamic_cache(start: Start) -> None:
    conversation = start()
    prompt = template_ids(conversation, [SYSTEM, ASK])
    want = answer_of(conversation, prompt)
    reply = conversation.reply([SYSTEM, ASK], max_new_tokens=12, do_sample=False)
    assert reply.text == conversation.tokenizer.decode(want)
    assert conversation.tokens == prompt + want
    assert reply[2:] == (len(prompt), 0, 12)


def test_a_second_turn_goes_on_with_the_generated_tokens_and_runs_only_the_new_ones(start: Start) -> None:
    conversation = start()
    messages: list[Any] = [SYSTEM, ASK]
    first = conversation.reply(messages, max_new_tokens=12, do_sample=False)
    assert "\ufffd" in first.text  # tokenized again, the text would be other tokens
    held = conversation.tokens
    messages += [first.message, MORE]
    close = conversation.tokenizer(
        "<|im_end|>\n<|im_start|>user\nAnd back on Sunday?<|im_end|>\n<|im_start|>assistant\n"
    )["input_ids"]
    want = answer_of(conversation, held + close)
    counts = count_forward_tokens(conversation.model)
    second = conversation.reply(messages, max_new_tokens=12, do_sample=False)
    assert conversation.tokens == held + close + want
    # The last token of an answer is not in the cache when generate returns.
    assert counts == [len(close) + 1] + [1] * 11
    assert (second.reused_tokens, second.prefilled_tokens) == (len(held) - 1, len(close) + 1)


def test_the_whole_list_the_next_message_and_what_was_appended_lead_to_the_same_tokens(start: Start) -> None:
    whole, next_one, appended = start(), start(), start()
    messages: list[Any] = [SYSTEM, ASK]
    first = whole.reply(messages, max_new_tokens=12, do_sample=False)
    say(whole, [*messages, first.message, MORE])

    next_one.append(SYSTEM)
    say(next_one, ASK)
    say(next_one, "And back on Sunday?")

    appended.append([SYSTEM, ASK])
    say(appended, None)
    appended.append(MORE)
    say(appended, None)
    assert whole.tokens == next_one.tokens == appended.tokens
    assert [m["role"] for m in whole.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_caller_may_give_the_answer_back_stripped_and_with_more_keys(start: Start) -> None:
    conversation = start()
    text = say(conversation, [SYSTEM, ASK])
    held = conversation.tokens
    message = {"role": "assistant", "content": f" {text} ", "refusal": None, "annotations": []}
    say(conversation, [SYSTEM, ASK, message, MORE])
    assert conversation.tokens[: len(held)] == held


def test_an_edited_history_is_cropped_where_it_changed(start: Start) -> None:
    conversation, fresh = start(), start()
    say(conversation, [SYSTEM, ASK])
    other = {"role": "user", "content": "A flight to Rome, please."}
    counts = count_forward_tokens(conversation.model)
    found = say(conversation, [SYSTEM, other])
    same = (
        len("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nA flight to ")
        - len("<|im_start|>" * 2 + "<|im_end|>")
        + 3
    )
    same += len(str(SYSTEM["content"]))
    assert counts[0] == len(template_ids(conversation, [SYSTEM, other])) - same
    assert found == say(fresh, [SYSTEM, other])
    assert conversation.tokens == fresh.tokens
    assert conversation.session.length == len(conversation.tokens) - 1


def test_asking_the_same_again_runs_one_token_of_the_prompt(start: Start) -> None:
    conversation = start()
    first = say(conversation, [SYSTEM, ASK])
    counts = count_forward_tokens(conversation.model)
    assert say(conversation, [SYSTEM, ASK]) == first
    assert counts == [1] * 12


def test_a_template_that_moves_its_ends_is_cropped_a_little_and_gives_its_own_tokens(start: Start) -> None:
    conversation = start(LOOKAHEAD)
    messages = [SYSTEM, ASK, CALL, FOUND]
    conversation.append(messages)
    prefilled = conversation.append(FOUND | {"content": "DY 3 at 11:05"})
    assert prefilled == len("\n<tool_response>DY 3 at 11:05</tool_response>") + 2
    prompt = template_ids(
        conversation, [*map(_with_parsed_arguments, messages), FOUND | {"content": "DY 3 at 11:05"}]
    )
    say(conversation, None)
    assert conversation.tokens == prompt + answer_of(conversation, prompt)


def test_the_answer_ends_at_the_models_end_token_which_the_template_may_write_too(start: Start) -> None:
    conversation = start()
    prompt = template_ids(conversation, [SYSTEM, ASK])
    end = next(t for t in answer_of(conversation, prompt)[3:] if t > 3)
    options = {"eos_token_id": end, "pad_token_id": 0}
    reply = conversation.reply([SYSTEM, ASK], max_new_tokens=12, do_sample=False, **options)
    want = answer_of(conversation, prompt, **options)
    assert want[-1] == end and len(want) < 12
    assert reply.generated_tokens == len(want)
    assert conversation.tokens == prompt + want[:-1]  # the template closes the message in its own way
    say(conversation, MORE)
    close = conversation.tokenizer("<|im_end|>\n<|im_start|>user\n")["input_ids"]
    assert conversation.tokens[len(prompt) + len(want) - 1 :][: len(close)] == close


def test_tool_calls_that_the_model_wrote_are_read_and_may_be_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = start()
    written = 'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"to": "Oslo"}}\n</tool_call>'
    ids = conversation.tokenizer(written)["input_ids"]
    dictate(conversation, ids, monkeypatch)
    reply = conversation.reply([SYSTEM, ASK], max_new_tokens=len(ids), region="tool_in")
    assert reply.text == "Let me look."
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("find", '{"to": "Oslo"}')]
    held = conversation.tokens
    assert conversation.spans[-1].region is tierkv.Region.TOOL_IN
    call_id = reply.tool_calls[0].id
    conversation.append({"role": "tool", "tool_call_id": call_id, "content": "SK 12"})
    say(
        conversation,
        [SYSTEM, ASK, reply.message, {"role": "tool", "tool_call_id": call_id, "content": "SK 12"}],
    )
    assert conversation.tokens[: len(held)] == held


def test_pages_have_the_regions_of_the_roles(start: Start) -> None:
    conversation = start()
    conversation.append([SYSTEM, ASK, CALL, FOUND])
    say(conversation, None)
    table = conversation.session.state()[0].table
    regions = [tierkv.Region(row.region).label for row in table.pages for _ in range(row.count)]
    want = [span.region.label for span in conversation.spans for _ in span.tokens]
    assert regions == want[:-1]  # the last token of the answer is not in pages yet
    assert [region for region, _ in itertools.groupby(want)] == [
        "system",
        "user",
        "tool_in",
        "tool_out",
        "scratchpad",
    ]


def test_the_pieces_of_a_stream_are_the_text(start: Start) -> None:
    conversation, other = start(), start()
    pieces = list(conversation.stream([SYSTEM, ASK], max_new_tokens=12, do_sample=False))
    assert len(pieces) > 1
    assert "".join(pieces) == say(other, [SYSTEM, ASK])
    assert conversation.last is not None and conversation.last.text == "".join(pieces)
    assert conversation.tokens == other.tokens


def test_a_character_of_several_tokens_comes_whole(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = start()
    ids = conversation.tokenizer("é, 東京 🛫!")["input_ids"]
    dictate(conversation, ids, monkeypatch)
    pieces = list(conversation.stream([SYSTEM, ASK], max_new_tokens=len(ids)))
    assert pieces == list("é, 東京 🛫!")


def test_closing_a_stream_early_ends_the_generation_and_keeps_what_was_said(start: Start) -> None:
    conversation = start()
    stream = conversation.stream([SYSTEM, ASK], max_new_tokens=1500, do_sample=False)
    piece = next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert conversation.last is not None
    assert 1 <= conversation.last.generated_tokens < 1000
    assert conversation.last.text.startswith(piece)
    assert conversation.messages[-1]["role"] == "assistant"
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-conversation"]
    prompt = len(conversation.tokens)
    say(conversation, MORE)
    assert conversation.last.reused_tokens == prompt - 1


def test_another_call_within_a_stream_is_refused_and_the_stream_goes_on(start: Start) -> None:
    conversation = start()
    stream = conversation.stream([SYSTEM, ASK], max_new_tokens=12, do_sample=False)
    first = next(stream)
    with pytest.raises(RuntimeError, match="finish or close its stream"):
        conversation.append(MORE)
    assert first + "".join(stream) == conversation.last.text  # type: ignore[union-attr]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_while_generating_reaches_the_caller_and_changes_nothing(
    start: Start, streamed: bool
) -> None:
    conversation, fresh = start(), start()
    say(conversation, [SYSTEM, ASK])
    messages, tokens = conversation.messages, conversation.tokens
    fail_at_forward(conversation, 4)
    with pytest.raises(FloatingPointError, match="forward 4"):
        if streamed:
            list(conversation.stream(MORE, max_new_tokens=12, do_sample=False))
        else:
            say(conversation, MORE)
    assert (conversation.messages, conversation.tokens) == (messages, tokens)
    say(fresh, [SYSTEM, ASK])
    counts = count_forward_tokens(conversation.model)
    assert say(conversation, MORE) == say(fresh, MORE)
    assert counts[0] == 1  # the prompt is there already
    assert conversation.tokens == fresh.tokens


def test_an_error_in_the_middle_of_a_prompt_changes_nothing_and_mixes_no_regions(start: Start) -> None:
    conversation = start(chunk_tokens=32)
    conversation.append(SYSTEM)
    tokens = conversation.tokens
    fail_at_forward(conversation, 2)
    with pytest.raises(FloatingPointError):
        conversation.append([FOUND | {"content": "SK 12 at 9:40, " * 10}])
    assert conversation.tokens == tokens and len(conversation.messages) == 1
    conversation.append([ASK, CALL])
    pages = conversation.session.state()[0].table.pages
    assert {tierkv.Region(row.region).label for row in pages} == {"system", "user", "tool_in"}


def test_an_error_of_the_listener_ends_the_generation(start: Start) -> None:
    conversation = start()

    def hang_up(piece: str) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        say(conversation, [SYSTEM, ASK], on_text=hang_up)
    assert conversation.messages == []
    assert say(conversation, [SYSTEM, ASK]) == say(start(), [SYSTEM, ASK])


def test_what_cannot_be_asked_is_refused_before_anything_runs(start: Start) -> None:
    conversation = start()
    conversation.append([SYSTEM, ASK])
    length = conversation.session.length
    for messages, options, said in [
        ([], {}, "no message to answer"),
        ([SYSTEM, ASK, {"role": "assistant", "content": "x"}], {}, "the last message is the assistant's"),
        ([{"role": "robot", "content": "x"}], {}, "message 0 has the role 'robot'"),
        (MORE, {"num_beams": 2}, "a conversation is one sequence"),
        (MORE, {"prompt_lookup_num_tokens": 4}, "cannot continue a cache"),
        (MORE, {"attention_mask": None}, "the conversation's own"),
        (MORE, {"max_new_tokens": 0}, "at least 1"),
        ({"role": "user", "content": "x" * 3000}, {}, "the model takes 2048"),
    ]:
        with pytest.raises(ValueError, match=said):
            say(conversation, messages, **options)
    with pytest.raises(UnknownRegion):
        say(conversation, MORE, region="attic")
    with pytest.raises(ValueError, match="decode steps"):
        conversation.follow(MORE, 1500)
    assert conversation.session.length == length
    assert len(conversation.messages) == 2


def test_no_room_is_told_and_a_smaller_message_still_fits(start: Start, client: tierkv.Client) -> None:
    conversation = start(hbm_budget=12 * PAGE_BYTES)
    conversation.append([SYSTEM])
    with pytest.raises(OutOfCapacity):
        conversation.append({"role": "user", "content": "x" * 400})
    conversation.append(ASK)
    assert len(conversation.messages) == 2
    assert client.stats(conversation.session.id)["tokens"] >= len(conversation.tokens)


def test_a_small_budget_shortens_the_slices_of_a_prompt(start: Start) -> None:
    conversation = start(hbm_budget=16 * PAGE_BYTES, ladder="tiered")
    counts = count_forward_tokens(conversation.model)
    conversation.append({"role": "user", "content": "word " * 100})
    assert max(counts) == 10 * 16  # two thirds of the budget, in tokens
    assert counts == sorted(counts, reverse=True) and len(counts) > 1
    assert client_pages(conversation) > 16


def test_following_gives_the_logits_after_each_of_the_last_tokens(start: Start) -> None:
    conversation, plain = start(), build("llama", vocab_size=SIZE, max_position_embeddings=2048)
    conversation.append([SYSTEM])
    counts = count_forward_tokens(conversation.model)
    logits = conversation.follow([ASK, CALL, FOUND], 20)
    assert counts[1:] == [1] * 20
    with torch.no_grad():
        want = plain(torch.tensor([conversation.tokens])).logits[0, -20:]
    torch.testing.assert_close(logits, want, atol=2e-4, rtol=2e-4)
    again = conversation.follow([], 20)  # the same tokens, run again
    torch.testing.assert_close(again, want, atol=2e-4, rtol=2e-4)


def test_pages_that_a_new_owner_lost_are_prefilled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, fresh = start(), start()
    conversation.append([SYSTEM, ASK])
    conversation.session.lost.append((16, 32))
    with pytest.raises(PagesLost):
        conversation.session.begin(1)
    counts = count_forward_tokens(conversation.model)
    found = say(conversation, None)
    assert counts[0] == len(template_ids(conversation, [SYSTEM, ASK])) - 16
    assert found == say(fresh, [SYSTEM, ASK])


def test_a_sliding_window_that_went_on_starts_over_where_a_history_is_edited(client: tierkv.Client) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"vocab_size": SIZE, "max_position_embeddings": 2048, "sliding_window": 8, "layer_types": kinds}
    tiny, codec = build("qwen2", use_sliding_window=True, **shape), tokenizer()
    other = {"role": "user", "content": "A flight to Rome, please."}
    with Conversation(tiny, codec, client) as edited, Conversation(tiny, codec, client) as fresh:
        say(edited, [SYSTEM, ASK])
        say(edited, MORE)
        prompt = edited.tokens[: -len(edited.spans[-1].tokens)]
        assert edited.spans[-1].tokens == answer_of(edited, prompt)  # a second turn just goes on
        assert say(edited, [SYSTEM, other]) == say(fresh, [SYSTEM, other])
        assert edited.tokens == fresh.tokens


def test_a_crop_that_fails_changes_nothing_and_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, fresh = start(), start()
    say(conversation, [SYSTEM, ASK])
    tokens, other = conversation.tokens, {"role": "user", "content": "A flight to Rome, please."}

    def crop(length: int) -> None:
        raise OwnerUnavailable("nobody is there")

    monkeypatch.setattr(conversation.session, "crop", crop)
    with pytest.raises(OwnerUnavailable):
        say(conversation, [SYSTEM, other])
    assert conversation.tokens == tokens
    monkeypatch.undo()
    assert say(conversation, [SYSTEM, other]) == say(fresh, [SYSTEM, other])
    assert conversation.tokens == fresh.tokens


def test_closing_gives_every_page_back(start: Start, client: tierkv.Client) -> None:
    before = client.stats()["hbm_used_bytes"]
    with start() as conversation:
        conversation.append([SYSTEM, ASK])
        assert client.stats()["hbm_used_bytes"] > before
    conversation.close()
    until(lambda: client.stats()["hbm_used_bytes"] == before, 5.0)


def client_pages(conversation: Conversation) -> int:
    return len(conversation.session.state()[0].table.pages)


def dictate(conversation: Conversation, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's next answer is `ids`, whatever it would say."""
    from transformers import LogitsProcessor, LogitsProcessorList

    rest = iter(ids)

    class Dictation(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            wanted = torch.full_like(scores, -torch.inf)
            wanted[:, next(rest)] = 0.0
            return wanted

    generate = conversation.model.generate

    def dictated(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        return generate(*args, logits_processor=LogitsProcessorList([Dictation()]), **options)

    monkeypatch.setattr(conversation.model, "generate", dictated)


def fail_at_forward(conversation: Conversation, number: int) -> None:
    """The `number`th forward from now on fails in the model's last layer, once."""
    count = itertools.count(1)

    def hook(*_: object) -> None:
        if next(count) == number:
            raise FloatingPointError(f"forward {number}")

    conversation.model.model.layers[-1].register_forward_hook(hook)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """As templates want them."""
    if message is not CALL:
        return message
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "find", "arguments": {"to": "Oslo"}}}],
    }
