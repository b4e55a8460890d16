"""Which steps and layers are looked at, and what is told of a window of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.tierkv.local_session import LocalPool
from tests.tierkv.tiny_models import CACHE, build
from tierkv import attach
from tierkv.observing import Mean, layers_of, part_of
from tierkv.protocol import Observing
from tierkv.transformers_cache import TieredCache

NAN = float("nan")
PROMPT, TOKENS = torch.arange(2, 22)[None], [30, 31, 32, 33]


@pytest.mark.parametrize(
    ("observing", "looks", "tells"),
    [
        (Observing(every=4), [4, 8], [4, 8]),
        (Observing(every=4, window=2), [3, 4, 7, 8], [4, 8]),
        (Observing(every=3, window=9), [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 6, 9]),
        (Observing(every=1), [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_a_window_ends_with_the_step_that_tells(
    observing: Observing, looks: list[int], tells: list[int]
) -> None:
    parts = {step: part_of(step, observing) for step in range(1, 10)}
    assert [step for step, part in parts.items() if part.looks] == looks
    assert [step for step, part in parts.items() if part.tells] == tells


def test_layers_are_spread_evenly() -> None:
    assert layers_of(30, [Observing()]) is None
    assert layers_of(30, [Observing(layers=64)]) is None
    assert layers_of(8, [Observing(layers=1)]) == {4}
    assert layers_of(8, [Observing(layers=2)]) == {2, 6}
    assert layers_of(6, [Observing(layers=2), Observing(layers=3)]) == {1, 3, 5}
    assert layers_of(6, [Observing(layers=2), Observing()]) is None


def test_a_mean_is_over_the_steps_that_knew_a_token() -> None:
    mean = Mean()
    mean.add(np.array([0.5, NAN, 0.25], np.float32))
    mean.add(np.array([0.1, 0.2, NAN, 0.7], np.float32))
    mean.add(np.array([0.3, NAN, NAN, 0.1, NAN], np.float32))
    np.testing.assert_allclose(mean.take(), [0.3, 0.2, 0.25, 0.4, NAN], rtol=1e-6)
    mean.add(np.array([0.5], np.float32))
    np.testing.assert_array_equal(mean.take(), [0.5])


def told(observing: Observing, steps: int) -> list[NDArray[np.float32]]:
    """Masses that a session of a tiny model is told of a prompt and so many decode steps."""
    model = build("llama")
    attached = attach(model)
    session = LocalPool(attached.geometry("float32")).open()
    session.observing = observing
    cache: Any = {CACHE: TieredCache(session)}
    with torch.inference_mode():
        model(PROMPT, **cache)
        for token in TOKENS[:steps]:
            model(torch.tensor([[token]]), **cache)
    return [mass for _, mass in session.observations]


def attended(layer: int, query: int) -> NDArray[np.float32]:
    """By transformers' eager attention: token by token, averaged over heads."""
    model = build("llama")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model(torch.cat([PROMPT, torch.tensor([TOKENS])], 1), output_attentions=True).attentions
    mass: NDArray[np.float32] = found[layer][0, :, query, : query + 1].mean(0).numpy()
    return mass


def test_a_window_averages_its_steps() -> None:
    each, pairs = told(Observing(every=1), 4), told(Observing(every=2, window=2), 4)
    assert len(each) == 5 and len(pairs) == 3
    np.testing.assert_array_equal(pairs[0], each[0])  # the prompt is told as it is
    for pair, first, second in ((pairs[1], each[1], each[2]), (pairs[2], each[3], each[4])):
        np.testing.assert_allclose(pair[:-1], (first + second[:-1]) / 2, rtol=1e-6)
        assert pair[-1] == second[-1]


def test_only_sampled_layers_are_looked_at() -> None:
    masses = told(Observing(every=1, layers=1), 2)  # the middle one of three
    for mass, query in zip(masses[1:], (len(PROMPT[0]), len(PROMPT[0]) + 1), strict=True):
        np.testing.assert_allclose(mass, attended(1, query), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 3])
def test_the_last_queries_of_a_chunk_observe(queries: int) -> None:
    (mass,) = told(Observing(queries=queries, layers=1), 0)
    last = len(PROMPT[0])
    expected = np.zeros(last, np.float32)
    for query in range(last - queries, last):
        expected[: query + 1] += attended(1, query) / queries
    np.testing.assert_allclose(mass, expected, rtol=1e-4, atol=1e-6)
