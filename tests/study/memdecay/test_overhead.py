"""Pairs by hand; that the scored step is the one that is scored; over a tiny model."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from tierkv.regions import Region
from tierkv.session import Session
from tierkv.study.memdecay import overhead
from tierkv.study.memdecay.arms import compared
from tierkv.study.memdecay.scenarios import Block, Episode

U, R = Region.USER, Region.RETRIEVAL
EPISODE = Episode("e", 0, "long", list(range(20)),
                  (Block("opening", U, 0, 12, "", ()), Block("d", R, 12, 20, "", ())), (20,), ())  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_both_of_a_pair_go_first_by_turns_and_ratios_are_taken_pair_by_pair() -> None:
    order: list[str] = []

    def steps(name: str, *times: float) -> Callable[[int], float]:
        left = list(times)

        def step(token: int) -> float:
            order.append(f"{name}{token}")
            return left.pop(0)

        return step

    # The two that warm up would change everything. Ratios: 2, 3, 1.5; of the medians it would be 30 / 10.
    paired = overhead.measure(
        "w", 9, steps("s", 900, 900, 20, 30, 60), steps("u", 1, 1, 10, 10, 40), [1, 2, 3, 4, 5]
    )
    assert order == ["u1", "s1", "s2", "u2", "u3", "s3", "s4", "u4", "u5", "s5"]
    assert (paired.scored_ms, paired.unscored_ms, paired.ratio, paired.pairs) == (30, 10, 2, 3)
    assert (paired.ratio_low, paired.ratio_high) == (1.75, 2.5)


def test_eager_steps_hand_out_attention_and_the_model_is_left_as_it_was(model: LlamaForCausalLM) -> None:
    seen: list[tuple[str, int, bool]] = []

    def see(
        module: torch.nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, object], out: object
    ) -> None:
        attentions = getattr(out, "attentions", None)
        seen.append((model.config._attn_implementation, args[0].shape[1], attentions is not None))

    before = model.config._attn_implementation
    handle = model.register_forward_hook(see, with_kwargs=True)
    try:
        paired = overhead.by_eager(model, [i % 26 for i in range(34)], 30)
    finally:
        handle.remove()
    assert seen[:2] == [("sdpa", 30, False)] * 2
    assert sorted(seen[2:]) == [("eager", 1, True)] * 4 + [("sdpa", 1, False)] * 4
    assert (paired.way, paired.tokens, paired.pairs) == ("eager", 30, 2)
    assert model.config._attn_implementation == before


def test_what_leaves_is_cut_out_of_every_layer() -> None:
    whole = torch.arange(2 * 5 * 3, dtype=torch.float32).view(1, 2, 5, 3)
    kept = np.array([True, False, False, True, True])
    for keys, values in overhead.cut([(whole, -whole), (whole + 1, whole)], kept):
        assert keys.shape == values.shape == (1, 2, 3, 3)
    ((keys, _),) = overhead.cut([(whole, whole)], kept)
    assert keys[0, 1, :, 0].tolist() == [15, 24, 27]  # head 1 starts at 15, a token is 3


def test_a_decision_is_over_the_pages_of_its_arm(model: LlamaForCausalLM) -> None:
    regions = np.array([U] * 20 + [R] * 20, np.int8)
    (arm,) = (arm for arm in compared() if arm.name == "memdecay-lift")
    aligned = overhead.decide(arm, regions, model, rounds=3)
    straddling = overhead.decide(arm._replace(unit="straddling"), regions, model, rounds=3)
    assert (aligned.tokens, aligned.pages, straddling.pages) == (40, 4, 3)
    assert min(aligned.observe_ms, aligned.select_ms, aligned.evict_ms) > 0


@pytest.mark.slow
def test_a_daemon_that_wants_attention_gets_it_every_step_and_the_other_never(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    observe = Session.observe

    def counting(session: Session, mass: np.ndarray, *rest: bool) -> None:
        lengths.append(len(mass))
        observe(session, mass, *rest)

    monkeypatch.setattr(Session, "observe", counting)
    told: list[int] = []
    report = overhead.run(
        model, EPISODE, lengths=(48,), pairs=3, told=lambda done, total, what: told.append(done)
    )
    assert [(one.way, one.tokens, one.pairs) for one in report.steps] == [("eager", 48, 3), ("tierkv", 48, 3)]
    decoded = [length for length in lengths if length > 48]
    assert len(decoded) in (
        4,
        5,
    )  # five steps of one session, the last of which may still be held; none of the other
    assert decoded == list(range(49, 49 + len(decoded)))
    assert told == [0, 1, 2]
    assert [made.policy for made in report.decisions] == ["memdecay", "memdecay-lift"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(overhead.render(report))
    text = console.export_text()
    assert "…" not in text and "2.68" in text  # the paper's 69.8 over 26.0
