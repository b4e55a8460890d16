"""A small random model through every arm that is installed, a daemon and all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from rich.console import Console

from tests.tierkv.tiny_models import build
from tierkv.benchmarks.decode import ARMS, AT_BASE, MORE, full, paged, peers, picture, point, table
from tierkv.benchmarks.decode.models import first, models, read
from tierkv.benchmarks.decode.plan import Plan, plan

LAYERS, HEADS, DIM = 3, 2, 16  # of the model
CONTEXTS, STEPS = (96, 160, 224), 8
RUN_STEPS = 4 + STEPS + 1  # warm-up, and the one whose memory is taken
TOKEN = LAYERS * 2 * HEADS * DIM
"""Values of a token's K/V."""

PROMPT = [*range(2, 97), 3]

KEYS = {"context", "batch", "arm", "ms_per_token", "ratio_to_dynamic", "kv_bytes"}


class Ran(NamedTuple):
    made: full.Made
    plan: Plan
    out: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    out = tmp_path_factory.mktemp("decode") / "decode.json"
    asked = plan(CONTEXTS, [1, 2], [arm for arm in (*ARMS, *MORE) if arm != "quanto2"], STEPS, quick=True)
    asked = asked._replace(points=tuple(p for p in asked.points if p.batch == 1 or p.context == CONTEXTS[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "FORWARD_SECONDS", 0.02)  # this model's forwards are quick too
        made = full.run(asked, full.kept(out, False), build("llama"), lambda *told: None)
    yield Ran(made, asked, out)


def test_there_is_a_record_an_arm_context_and_batch_with_what_the_issue_names(ran: Ran) -> None:
    written = msgspec.json.decode(msgspec.json.encode(ran.made.records))
    assert all(set(one) >= KEYS for one in written)
    arms = [arm for arm in ARMS if arm not in ran.made.run.skipped and arm != "quanto2"]
    points = [*((1, context) for context in CONTEXTS), (2, CONTEXTS[0])]
    wanted = [(batch, context, arm) for batch, context in points for arm in arms]
    assert [(one["batch"], one["context"], one["arm"]) for one in written] == wanted
    assert all(one["ms_per_token"] > 0 and one["ratio_to_dynamic"] > 0 for one in written)
    assert {one.arm for one in ran.made.run.more} == set(MORE)
    assert set(ran.made.run.skipped) <= {"hqq2"}


def test_kv_bytes_of_dense_caches_are_those_of_all_tokens_in_float32(ran: Ran) -> None:
    dense = [one for one in ran.made.records if one.arm in ("dynamic", "eager", "offloaded")]
    assert len(dense) == 3 * (len(CONTEXTS) + 1)
    for one in dense:
        assert one.kv_bytes == 4 * TOKEN * one.batch * (
            one.context + RUN_STEPS - 1
        )  # held before the last step


def test_exact_pages_hold_whole_bfloat16_pages_and_attend_their_tokens(ran: Ran) -> None:
    exact = [one for one in ran.made.records if one.arm == "tierkv-exact"]
    for one in exact:
        tokens = one.context + RUN_STEPS - 1
        assert one.attended_bytes == 2 * TOKEN * one.batch * tokens
        pages = one.batch * -(-tokens // 16)
        assert one.pages == {"exact": pages, "low_bit": 0, "cold": 0} and one.host_bytes == 0
        assert (
            pages <= one.kv_bytes / (16 * 2 * TOKEN) <= pages + 2 * one.batch
        )  # one page reserved ahead a row


def test_under_a_budget_no_more_is_held_than_that(ran: Ran) -> None:
    for one in ran.made.records:
        if one.arm == "tierkv-25":
            budget = max(12 * 16, one.context / 4) * 2 * TOKEN
            assert one.kv_bytes <= budget * one.batch
            assert one.pages is not None
            if one.context > 12 * 16:
                assert one.pages["low_bit"] + one.pages["cold"] > 0 and one.host_bytes > 0


def test_only_arms_of_pages_have_calls_and_the_traced_one_has_all_its_steps(ran: Ran) -> None:
    for one in (*ran.made.records, *ran.made.run.more):
        assert (one.blocked_ms is not None) == one.arm.startswith("tierkv")
        assert one.blocked_ms is None or 0 <= one.blocked_ms <= (one.daemon_ms or 0)
    assert list(ran.made.spans) == [f"{context} tokens" for context in CONTEXTS]
    for spans in ran.made.spans.values():
        names = [span.name for span in spans]
        assert names.count("step") == names.count("begin") == names.count("end") == STEPS
        assert names.count("observe") == 1  # of 8 steps


def test_a_prompt_is_read_through_pages_beside_the_peer(ran: Ran) -> None:
    assert ran.made.run.prefill is not None
    assert set(ran.made.run.prefill) == {"tokens", "tierkv-exact", "tierkv-25"}
    assert ran.made.run.prefill["tokens"] == max(CONTEXTS)


def test_the_tables_fit_100_columns_and_name_every_arm(ran: Ran) -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table.render(ran.made.records, ran.made.run))
    shown = captured.get()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 100
    arms = {one.arm for one in (*ran.made.records, *ran.made.run.more)} - {"tierkv-unobserved"}
    assert all(arm in shown for arm in arms)
    assert "x unobserved" in shown and "Under a budget" in shown and "read through pages" in shown


def test_the_picture_is_drawn(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "new" / "decode.png"
    picture.draw(ran.made.records, "a model", file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_resumes_takes_every_figure_from_before(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(full, "measure", refuse)
    monkeypatch.setattr(full.prefill, "measure", refuse)
    again = full.run(ran.plan, full.kept(ran.out, True), build("llama"), lambda *told: None)
    assert again.records == ran.made.records and again.run.prefill == ran.made.run.prefill
    for resume, asked in ((False, ran.plan), (True, ran.plan._replace(pages="float32"))):
        other = ran.out.with_name("other.json") if not resume else ran.out
        with pytest.raises(AssertionError, match="measured again"):
            full.run(asked, full.kept(other, resume), build("llama"), lambda *told: None)


def test_a_peer_that_is_not_installed_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PACKAGE", {"hqq": "not_installed_1", "quanto": "not_installed_2"})
    plain = build("llama")
    shared = models(plain)
    asked = plan([96], [1], ["quanto2", "hqq2", "eager"], 2, quick=True)
    found = point.measure(shared, read(plain, PROMPT), asked.points[0], asked)
    assert set(found.arms) == {"dynamic", "eager"}
    assert set(found.skipped) == {"hqq2", "quanto2"}
    assert all("pip install" in why for why in found.skipped.values())


@pytest.mark.parametrize("name", ["dynamic", "eager", "offloaded", "hqq2"])
def test_a_filled_cache_goes_on_as_the_one_that_read_the_prompt(name: str) -> None:
    if name == "hqq2" and importlib.util.find_spec("hqq") is None:
        pytest.skip("needs the extra `bench`")
    plain = build("llama")
    tokens = torch.arange(2, 66)
    filled = peers.peer(name + AT_BASE, models(plain), read(plain, tokens.tolist()), 2)
    with torch.inference_mode():
        last = torch.tensor([[7], [7]])
        got = filled.model(last, **{filled._argument: filled.cache}).logits[:, -1]
        want = plain(torch.cat((tokens, torch.tensor([7])))[None]).logits[:, -1]
    assert filled.cache.get_seq_length() == 65
    if name != "hqq2":  # two bits of a random model's K/V say something else
        assert torch.allclose(got, want.expand(2, -1), atol=1e-4)


def test_bytes_of_a_quantized_cache_count_codes_scales_zeros_and_the_exact_rest() -> None:
    if importlib.util.find_spec("hqq") is None:
        pytest.skip("needs the extra `bench`")
    plain = build("llama")
    shared = models(plain)
    arm = peers.peer("hqq2", shared, first(read(plain, list(range(2, 66))), 64), 1)
    packed = 64 * TOKEN * (2 + 2 * 32 / 64) / 8  # 2 bits, and a float32 scale and zero for 64 values
    assert arm.held().kv == packed
    arm.step(torch.tensor([[5]]))
    assert arm.held().kv == packed + 4 * TOKEN
