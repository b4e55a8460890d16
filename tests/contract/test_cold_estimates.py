"""Estimates of cold pages against the truth, over pages of whose keys something is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.contract.dense_cold import softmax
from tests.contract.test_attention import random_query
from tierkv import quant
from tierkv.attention.contract import Cold, ColdPages, ColdSeen, PagedAttention, Pages, PoolView
from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.digests import Digests
from tierkv.prefetch.transform import Sample, fit
from tierkv.prefetch.transform_digests import TransformForm, flat_state


class TestEstimates:
    @staticmethod
    def estimated_and_true(
        implementation: PagedAttention,
        pages: NDArray[np.float32],
        count: int,
        scale: float,
        softcap: float = 0.0,
        digests: Digests | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Shares of cold pages with keys `[pages, tokens, head_dim]` for one query head, a tenth of attention in all.

        Nine tenths go to one token in HBM, so that no estimate is near the most that a share can be.
        """
        n, tokens, dim = pages.shape
        geometry = Geometry(1, 1, dim, "float32", tokens)
        digests = digests or DEVIATION.of(geometry, 0)
        shape = digests.shape
        host = np.zeros((n, *geometry.shape), np.float32)
        host[:, 0, 0, 0] = pages
        host_bytes = host.view(np.uint8).reshape(n, -1)
        hbm = np.zeros(geometry.page_bytes + n * shape.nbytes, np.uint8)
        offsets = geometry.page_bytes + np.arange(n) * shape.nbytes
        for page in range(n):
            digests.write(host_bytes[page], count, hbm[offsets[page] :][: shape.nbytes])
        view = PoolView(hbm, geometry, quant.get("k3v2"), np.zeros(0, np.float32), digests)
        query = random_query(1, 1, 1, dim)
        q = query[0, 0].double()
        _, log_mass = softmax(torch.from_numpy(pages[:, :count]).double().reshape(-1, dim) @ q * scale)
        key = (q / (q @ q) * (log_mass + math.log(9)) / scale).numpy()
        hbm[: 4 * dim] = key.astype(np.float32).view(np.uint8)
        cold = ColdPages(
            offsets, np.arange(n) * geometry.page_bytes, np.ones(n, np.int8), np.full(n, count, np.int32),
            np.arange(n) * tokens + 1, np.array([0, n]),
        )  # fmt: skip
        one = Pages(
            np.zeros(1, np.int64), np.ones(1, np.int8), np.ones(1, np.int32), np.zeros(1, np.int64),
            np.array([0, 1]), 1 + n * tokens,
        )  # fmt: skip
        seen = ColdSeen(np.zeros(n, np.float32), np.zeros(n, np.float32))
        whole = Cold(cold, view._replace(data=host_bytes.reshape(-1)), 0)
        implementation.decode(query, view, one, 0, scale, cold=whole, seen=seen, softcap=softcap)
        assert seen.true is not None
        return seen.estimates, seen.true

    @pytest.mark.parametrize("softcap", [0.0, 2.0])
    @pytest.mark.parametrize("count", [1, 5, 16])
    def test_pages_of_identical_keys_are_estimated_exactly(
        self, implementation: PagedAttention, count: int, softcap: float
    ) -> None:
        keys = np.random.default_rng(0).integers(-127, 128, (8, 1, 64)).astype(np.float32)
        keys[:, :, 0] = 127  # then the digest's codes are the keys themselves
        estimated, true = self.estimated_and_true(
            implementation, keys.repeat(16, 1) / 64, count, 0.125, softcap
        )
        np.testing.assert_allclose(estimated, true, rtol=1e-4)

    def test_pages_of_many_normal_keys_are_estimated_closely(self, implementation: PagedAttention) -> None:
        """4,096 tokens with sigma about 1: the sample's own noise is a few percent."""
        rng = np.random.default_rng(1)
        keys = rng.standard_normal((6, 1, 64)) + rng.standard_normal((6, 4096, 64))
        estimated, true = self.estimated_and_true(implementation, keys.astype(np.float32), 4096, 0.125)
        np.testing.assert_allclose(estimated, true, rtol=0.15)

    @pytest.mark.parametrize(
        ("scale", "softcap", "size"),
        [
            *((0.125, 0, 0), (0.25, 0, 0), (0.5, 0, 0), (0.25, 5, 0), (0.5, 5, 0)),
            *((0.125, 0, 120), (0.25, 0, 120), (0.25, 5, 120)),
        ],
    )
    def test_estimates_of_clustered_keys_sum_to_about_the_truth(
        self, implementation: PagedAttention, scale: float, softcap: float, size: int
    ) -> None:
        """200 pages of two clusters each; the logits' sigma is about .9, 1.7 and 3.5, and a = sqrt(2 ln 16) = 2.4."""
        rng = np.random.default_rng(2)
        clusters = rng.standard_normal((200, 2, 1, 64)) + 0.5 * rng.standard_normal((200, 2, 8, 64))
        keys = clusters.reshape(200, 16, 64).astype(np.float32)
        digests = transform_of(size, keys) if size else None
        estimated, true = self.estimated_and_true(implementation, keys, 16, scale, softcap, digests)
        assert 0.5 < estimated.sum() / true.sum() < 2.0

    @pytest.mark.parametrize("softcap", [0.0, 5.0])
    @pytest.mark.parametrize("count", [1, 7, 16])
    def test_long_records_of_a_transform_tell_nearly_everything(
        self, implementation: PagedAttention, count: int, softcap: float
    ) -> None:
        """Nearly four bits a value: an error of .015 of its variance, 2, and so about .3 of a logit."""
        rng = np.random.default_rng(3)
        keys = (rng.standard_normal((60, 1, 16)) + rng.standard_normal((60, 16, 16))).astype(np.float32)
        digests = transform_of(120, keys)
        estimated, true = self.estimated_and_true(implementation, keys, count, 0.5, softcap, digests)
        off = np.log(estimated / true)
        assert np.median(np.abs(off)) < 0.3 and 0.8 < estimated.sum() / true.sum() < 1.25


def transform_of(size: int, keys: NDArray[np.float32]) -> Digests:
    """Fitted to pages `[pages, tokens, dim]` and queries of no direction."""
    pages, tokens, dim = keys.shape
    queries = np.random.default_rng(4).standard_normal((1, 1, 400, dim)).astype(np.float32)
    state = fit([Sample(keys[None, None], np.full(pages, tokens), queries)])
    return TransformForm(size).of(Geometry(1, 1, dim, "float32", tokens), 0, flat_state(state))
