"""What a codec is fitted from."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from tests.tierkv.tiny_models import build
from tierkv.benchmarks.quant import FORCED, RECENT, SINKS
from tierkv.benchmarks.quant.calibrate import Calibration, fit, observe
from tierkv.benchmarks.quant.inputs import Text
from tierkv.calibration import observe as observe_moments
from tierkv.geometry import Geometry
from tierkv.quant.contract import Floats
from tierkv.quant.moments import Moments, standard
from tierkv.quant.rotated import K3V2

GEOMETRY = Geometry(3, 2, 16, "float32")  # of tiny_models


class FromMoments(K3V2):
    """Its state is the mean keys too, from moments."""

    takes_moments: ClassVar[bool] = True

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        return moments.key_mean.ravel()


@pytest.fixture(scope="module")
def text() -> Text:
    tokens = np.random.default_rng(0).integers(2, 97, SINKS + RECENT + 64 + FORCED + 1).tolist()
    return Text("prose", "random", tokens)


def test_a_codec_is_fitted_from_moments_if_it_takes_them_and_else_from_pages(text: Text) -> None:
    seen = observe(build("llama"), GEOMETRY, [text])
    assert len(seen.pages) == (RECENT + 64) // 16
    keys = np.stack([page.view(np.float32).reshape(GEOMETRY.shape)[:, 0] for page in seen.pages])
    expected = keys.mean((0, 3)).ravel()  # [pages, layers, heads, tokens, dim]
    np.testing.assert_allclose(fit(K3V2(), seen), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(fit(FromMoments(), seen), seen.moments.key_mean.ravel())


def test_moments_are_of_the_context_alone_and_far_is_what_a_run_packs(text: Text) -> None:
    seen = observe(build("llama"), GEOMETRY, [text])
    alone = observe_moments(build("llama"), [text.tokens[: -FORCED - 1]], SINKS, RECENT)
    for a, b in zip(seen.moments, alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_speed_of_a_codec_that_takes_moments_needs_no_text() -> None:
    seen = Calibration(GEOMETRY, [], standard(GEOMETRY))
    np.testing.assert_array_equal(fit(FromMoments(), seen), np.zeros(3 * 2 * 16))
