"""What is packed, and what is counted as its loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.benchmarks.quant.through import Zeros, kept
from tierkv.benchmarks.quant import RECENT, SINKS, forms, records
from tierkv.benchmarks.quant.calibrate import Calibration
from tierkv.benchmarks.quant.exact import Exact
from tierkv.benchmarks.quant.forms import Form
from tierkv.benchmarks.quant.pages import from_pages, to_pages
from tierkv.benchmarks.quant.quality import Judge
from tierkv.benchmarks.quant.run import through
from tierkv.geometry import Geometry
from tierkv.quant.moments import standard


def test_sinks_and_recent_tokens_stay_exact_and_nothing_between_them_does() -> None:
    kv = torch.ones(2, 2, 1, SINKS + 64 + RECENT, 4)
    given = through(Form("zeros", True, Zeros, 64), kv)
    tokens = given.amax((0, 1, 2, 4))
    assert torch.equal(tokens, given.amin((0, 1, 2, 4)))
    assert tokens.tolist() == [1.0] * 16 + [0.0] * 64 + [1.0] * 80
    assert kv.min() == 1  # the exact K/V are still there


def test_a_page_holds_sixteen_tokens_of_every_layer_and_head() -> None:
    geometry = Geometry(2, 3, 8, "bfloat16")
    kv = torch.arange(2 * 2 * 3 * 48 * 8).view(2, 2, 3, 48, 8).remainder(251).bfloat16()
    pages = to_pages(geometry, kv)
    assert pages.shape == (3, geometry.page_bytes)
    second = torch.from_numpy(pages[1]).view(torch.bfloat16).view(geometry.shape)
    assert torch.equal(second, kv[:, :, :, 16:32])
    assert torch.equal(from_pages(geometry, pages), kv)


def test_a_codec_packs_for_real() -> None:
    geometry = Geometry(2, 1, 64, "float32")
    kv = torch.randn(2, 2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    (form, _), _ = forms.build(
        ["k3v2", "kivi-g32"], Calibration(geometry, list(to_pages(geometry, kv)), standard(geometry))
    )
    held = form.hold(kv)
    given = kept(held)
    # a head's page: keys 4 + 16 + 16 * 64 * 3 / 8 bytes, values 4 + 16 + 16 * 64 * 2 / 8
    assert held.bits_per_value == 8 * ((20 + 384) + (20 + 256)) / (2 * 16 * 64)
    error = (given - kv).square().mean((0, 2, 3, 4)) / kv.square().mean((0, 2, 3, 4))
    # Lloyd-Max on Gaussian data: .0345 of the energy at 3 bits, .1175 at 2
    assert error.tolist() == pytest.approx([0.0345, 0.1175], rel=0.1)


def exact_of(context: float, forced: Sequence[float], tokens: int) -> Exact:
    """One layer, one head of one channel, queries of zero: attention is the mean of the values that are seen."""
    new = torch.tensor(forced)[None, None, :, None]
    logits = torch.tensor([[0.0, 0.0]] * len(forced))
    return Exact(
        torch.full((1, 2, 1, tokens, 1), context), torch.stack((new, new), 1), torch.zeros(1, 1, len(forced), 1),
        1.0, logits, [0] * len(forced), torch.zeros(len(forced), dtype=torch.long),
    )  # fmt: skip


def test_a_forced_token_sees_the_context_and_those_up_to_itself() -> None:
    exact = exact_of(1.0, [5.0, 9.0], tokens=3)
    seen = exact.attend(0, exact.kv[0]).flatten().tolist()
    assert seen == pytest.approx([(3 + 5) / 4, (3 + 5 + 9) / 5])


def test_attention_error_is_the_squared_distance_over_the_squared_length() -> None:
    exact = exact_of(1.0, [1.0], tokens=3)
    judge = Judge(None, exact)  # type: ignore[arg-type]
    assert judge.attention_error(exact.kv) == [0.0]
    assert judge.attention_error(torch.zeros(1, 2, 1, 3, 1)) == [0.75**2]  # a quarter of 1 is left


def test_loss_is_kl_top1_and_the_change_of_nll(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = exact_of(1.0, [1.0], tokens=3)  # both tokens at one half, the first one follows
    monkeypatch.setattr(
        "tierkv.benchmarks.quant.quality.continue_over",
        lambda model, kv, forced: torch.tensor([[0.25, 0.75]]).log(),
    )
    loss = Judge(None, exact).measure(exact.kv)  # type: ignore[arg-type]
    assert loss.kl == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75))
    assert loss.dnll == pytest.approx(np.log(0.5 / 0.25))
    assert loss.top1 == 0.0  # of equal logits the first counts as the largest


def test_an_interval_of_equal_values_has_no_width_and_of_others_it_spans_the_mean() -> None:
    assert records.mean([0.25] * 5) == (0.25, 0.25, 0.25)
    estimate = records.mean([0.0, 1.0] * 50)
    assert estimate.value == 0.5
    # the mean of 100 draws of a fair coin: its standard deviation is .05
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)


def test_a_ratio_draws_the_same_inputs_for_both() -> None:
    theirs = [0.01, 0.1, 1.0, 10.0]
    assert records.ratio([value / 2 for value in theirs], theirs) == pytest.approx((0.5, 0.5, 0.5))
