"""`tierkv bench attention`: arms, figures, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from tierkv.benchmarks.attention import run, table
from tierkv.benchmarks.attention.sides import MODELS, NAMES, Model, Shape, side
from tierkv.benchmarks.parts import Parts
from tierkv.errors import ConfigError

SMALL = Shape(Model("small", 2, 2, 4, 32), 48, 3)


def small(arms: list[str]) -> run.Plan:
    return run.plan([48], [3], arms, quick=True)._replace(shapes=(SMALL,))


def test_shapes_take_turns_with_as_many_layers_as_make_64_mib_of_dense_kv() -> None:
    smollm, large = MODELS
    assert Shape(smollm, 4096, 1).dense_bytes(4) == 2 * 3 * 4096 * 64 * 4
    assert Shape(smollm, 4096, 1).layers == 11  # 6 MiB each
    assert Shape(smollm, 512, 1).layers == 30  # all there are
    assert Shape(large, 8192, 4).layers == 1


@pytest.mark.parametrize("name", ["sdpa", "sdpa-repeated", "eager"])
def test_peers_attend_as_plain_arithmetic_does(name: str) -> None:
    got = side(name, SMALL).attend(1)
    out = got[0] if isinstance(got, tuple) else got.transpose(1, 2)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 2, 48, 32, generator=generator)[1]
    query = SMALL.query.view(3, 2, 2, 32)  # two query heads a KV head
    weights = torch.softmax(torch.einsum("bhgd,bhtd->bhgt", query, keys) / 32**0.5, -1)
    wanted = torch.einsum("bhgt,bhtd->bhgd", weights, values).reshape(3, 1, 4, 32)
    assert torch.allclose(out, wanted, atol=1e-5)


def test_figures_agree_with_each_other_and_bytes_are_those_of_the_form(tmp_path: Path) -> None:
    arms = ["sdpa", "sdpa-bfloat16", "eager", "float32", "bfloat16", "k3v2"]
    made = run.run(small(arms), Parts(tmp_path / "parts", False, run.Record), lambda *told: None)
    assert [one.arm for one in made.records] == arms and made.skipped == {}
    values = 3 * 48 * 2 * 2 * 32
    bits = {"sdpa": 32, "sdpa-bfloat16": 16, "eager": 32, "float32": 32, "bfloat16": 16}
    for one in made.records:
        if one.arm in bits:
            assert one.attended_bytes == values * bits[one.arm] / 8
        assert one.gbps == pytest.approx(one.attended_bytes / one.ms_per_layer / 1e6)
        assert one.pairs == 3 and one.ratio_low <= one.ratio_to_sdpa <= one.ratio_high
    low_bit = made.records[-1]
    assert values * 2 / 8 < low_bit.attended_bytes < values * 4 / 8
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table.render(made))
    assert all(arm in captured.get() for arm in arms) and "…" not in captured.get()
    assert max(map(len, captured.get().splitlines())) <= 100


def test_a_run_that_resumes_takes_figures_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, file = small(["bfloat16"]), tmp_path / "parts"
    made = run.run(planned, Parts(file, False, run.Record), lambda *told: None)
    monkeypatch.setattr(run, "side", lambda *given: pytest.fail("it was measured again"))
    again = run.run(planned, Parts(file, True, run.Record), lambda *told: None)
    assert msgspec.to_builtins(again) == msgspec.to_builtins(made)


def test_an_arm_that_cannot_run_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "side", lambda name, shape: side(name, shape) if name == "sdpa" else _refuse())
    made = run.run(small(["kivi2"]), Parts(tmp_path / "parts", False, run.Record), lambda *told: None)
    assert [one.arm for one in made.records] == ["sdpa"] and made.skipped == {"kivi2": "it needs something"}


def _refuse() -> None:
    raise ConfigError("it needs something")


def test_unknown_arms_and_cut_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*sdpa.*k3v2"):
        run.plan(arms=["flash"])
    with pytest.raises(ConfigError, match="100 tokens"):
        run.plan([100])
    assert run.plan().arms == NAMES
