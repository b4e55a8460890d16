"""The quantizer tables fulfil Lloyd's two conditions for a unit Gaussian; gains are nearest in the logarithm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv.quant import lloyd

TABLES = [
    pytest.param(lloyd.LEVELS_8, lloyd.BOUNDARIES_8, lloyd.DISTORTION_8, 0.03454, id="8 levels"),
    pytest.param(lloyd.LEVELS_4, lloyd.BOUNDARIES_4, lloyd.DISTORTION_4, 0.1175, id="4 levels"),
]


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize(("levels", "boundaries", "distortion", "published"), TABLES)
def test_tables_are_optimal_for_a_unit_gaussian(
    levels: NDArray[np.float32], boundaries: NDArray[np.float32], distortion: float, published: float
) -> None:
    edges = [0.0, *boundaries.tolist(), 40.0]
    error = 1.0
    for low, high, level in zip(edges, edges[1:], levels.tolist(), strict=False):
        mass = below(high) - below(low)
        assert level == pytest.approx((density(low) - density(high)) / mass, abs=1e-6)  # the mean of its cell
        error -= 2 * mass * level**2
    np.testing.assert_allclose(boundaries, (levels[1:] + levels[:-1]) / 2, atol=1e-6)  # midpoints
    assert distortion == pytest.approx(error, abs=1e-6)
    assert distortion == pytest.approx(published, abs=1e-4)  # Max 1960, table I


def test_gains_span_sixteen_octaves_in_steps_of_a_sixteenth() -> None:
    assert lloyd.GAINS.shape == (256,)
    assert lloyd.GAINS[0] == 1.0
    assert lloyd.GAINS[16] == 0.5
    assert lloyd.GAINS[32] == 0.25
    assert lloyd.GAINS[lloyd.NO_GAIN] == 0.0
    assert lloyd.GAIN_FLOORS.shape == (255,)
    np.testing.assert_allclose(lloyd.GAIN_FLOORS, lloyd.GAINS[:255] * 2 ** (-1 / 32), rtol=1e-6)
