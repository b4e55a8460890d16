"""The rotation equals its matrix, built here from Kronecker products and the Rudin-Shapiro sequence's definition."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tierkv.quant import rotation

BLOCKS = {8: [8], 64: [64], 80: [64, 16], 96: [64, 32], 128: [128], 120: [64, 32, 16, 8]}


def matrix(head_dim: int) -> NDArray[np.float64]:
    """H diag(signs), row by row as the docstring defines it."""
    whole = np.zeros((head_dim, head_dim))
    start = 0
    for size in BLOCKS[head_dim]:
        block = np.ones((1, 1))
        while block.shape[0] < size:
            block = np.kron(np.array([[1, 1], [1, -1]]), block)
        signs = np.empty(size)
        for n in range(size):  # overlapping 11s count
            digits = format(n, "b")
            signs[n] = (-1) ** sum(digits[i : i + 2] == "11" for i in range(len(digits)))
        whole[start : start + size, start : start + size] = block / np.sqrt(size) * signs
        start += size
    return whole


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_kernels_apply_the_matrix_and_its_inverse(head_dim: int) -> None:
    x = np.random.default_rng(0).standard_normal(head_dim).astype(np.float32)
    turned = x.copy()
    rotation.apply_signs(turned)
    rotation.hadamard(turned)
    np.testing.assert_allclose(turned, matrix(head_dim) @ x, atol=1e-5)
    rotation.hadamard(turned)
    rotation.apply_signs(turned)
    np.testing.assert_allclose(turned, x, atol=1e-5)


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_columns_are_transformed_like_vectors(head_dim: int) -> None:
    columns = np.random.default_rng(1).standard_normal((head_dim, 16)).astype(np.float32)
    vectors = columns.T.copy()
    rotation.hadamard_columns(columns.reshape(-1), head_dim)
    for token in range(16):
        rotation.hadamard(vectors[token])
    np.testing.assert_array_equal(columns.T, vectors)


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_python_and_kernel_signs_agree_with_the_definition(head_dim: int) -> None:
    ones = np.ones(head_dim, np.float32)
    rotation.apply_signs(ones)
    np.testing.assert_array_equal(ones, rotation.signs(head_dim))
    scale = np.sqrt(np.repeat(BLOCKS[head_dim], BLOCKS[head_dim]))
    starts = np.repeat(np.cumsum([0, *BLOCKS[head_dim][:-1]]), BLOCKS[head_dim])
    first_rows = matrix(head_dim)[
        starts, np.arange(head_dim)
    ]  # the first row of a Hadamard block is all ones
    np.testing.assert_allclose(ones, first_rows * scale, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_constant_vector_is_spread_over_the_channels(head_dim: int) -> None:
    """Rudin and Shapiro: the largest coefficient is at most sqrt(2) times the root mean square."""
    assert abs(matrix(head_dim) @ np.ones(head_dim)).max() <= np.sqrt(2) + 1e-9
