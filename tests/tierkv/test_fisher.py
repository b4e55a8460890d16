"""What errors of cached keys and values cost a tiny model's answer, against KL that is measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.tierkv.tiny_models import CACHE, build
from tierkv.errors import ConfigError
from tierkv.fisher import Fisher, frozen, information
from tierkv.study.probe import dynamic_cache

HEADS, DIM = 2, 16
READ, GIVEN = (
    np.random.default_rng(seed).integers(2, 97, tokens).tolist() for seed, tokens in ((1, 24), (2, 6))
)
SIDES = ("keys", "values")


def read(model: PreTrainedModel) -> Any:
    """A cache of what was read."""
    cache = dynamic_cache(model)
    with torch.no_grad():
        model(torch.tensor([READ]), **{CACHE: cache})
    return cache


def answers(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """log p `[given, vocabulary]`."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([GIVEN]), **{CACHE: cache}).logits[0].log_softmax(-1)
    return found


def measured(
    model: PreTrainedModel, layer: int, side: str, place: tuple[int, int], error: torch.Tensor
) -> float:
    """KL, nats a generated token, with `error` added to the key or value of a `(head, token)`."""
    cache = read(model)
    getattr(cache.layers[layer], side)[0, *place] += error
    right, wrong = answers(model, read(model)), answers(model, cache)
    return float((right.exp() * (right - wrong)).sum(-1).mean())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    exact: PreTrainedModel = build("llama").double()
    return exact


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("layer", "head", "token"), [(0, 1, 5), (2, 0, 20)])
def test_half_the_information_along_an_error_is_its_kl(
    model: PreTrainedModel, side: str, layer: int, head: int, token: int
) -> None:
    found = information(model, read(model), [layer], GIVEN, slice(token, token + 1), samples=1500)
    fisher = getattr(found, side)[0, head].double()
    draws = torch.Generator().manual_seed(3)
    error = 1e-3 * torch.randn(DIM, generator=draws, dtype=torch.float64)
    expected = measured(model, layer, side, (head, token), error)
    assert expected > 1e-12
    # The mean of 1,500 squares of a normal value is off by 1 / sqrt(750) = 4%; three times that.
    assert (error @ fisher @ error).item() / 2 == pytest.approx(expected, rel=0.12)


def test_information_of_tokens_adds_up_and_that_of_layers_stands_side_by_side(model: PreTrainedModel) -> None:
    def found(layers: list[int], tokens: slice) -> Fisher:
        return information(model, read(model), layers, GIVEN, tokens)

    both = found([0, 2], slice(3, 20))
    parts = [found([layer], slice(*span)) for layer in (0, 2) for span in ((3, 7), (7, 20))]
    for side in SIDES:
        assert getattr(both, side).shape == (2, HEADS, DIM, DIM)
        first, second, third, fourth = (getattr(part, side)[0] for part in parts)
        expected = torch.stack([first + second, third + fourth])
        torch.testing.assert_close(
            getattr(both, side), expected, rtol=1e-4, atol=1e-6 * expected.max().item()
        )


def test_a_head_that_is_not_read_costs_nothing() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, : 2 * DIM] = 0  # query heads 0 and 1: KV head 0
    for matrices in information(model, read(model), [1], GIVEN, slice(0, 24)):
        assert (matrices[0, 0] == 0).all() and matrices[0, 1].trace() > 0


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_a_model_of_half_precision_has_nearly_the_same_information(dtype: torch.dtype, off: float) -> None:
    def found(dtype: torch.dtype) -> Fisher:
        model = build("llama").to(dtype)
        return information(model, read(model), [0, 1, 2], GIVEN, slice(2, 24), samples=100)

    for full, half in zip(found(torch.float32), found(dtype), strict=True):
        assert half.dtype == torch.float32
        assert torch.linalg.norm(full - half) < off * torch.linalg.norm(full)


def test_parameters_take_gradients_as_before_also_after_a_failure() -> None:
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    assert True in before and False in before
    information(model, read(model), [0], GIVEN, slice(0, 24))
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="today"), frozen(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())
        raise RuntimeError("not today")
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_what_is_not_finite_is_refused() -> None:
    model = build("llama")
    cache = read(model)
    cache.layers[1].keys[0, 0, 3, 0] = torch.inf
    with pytest.raises(ConfigError, match="its answers are not finite"):
        information(model, cache, [0, 1], GIVEN, slice(0, 24))

    def overflow(module: nn.Module, given: Any, hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda gradient: gradient * torch.inf)

    cache = read(model)
    model.model.norm.register_forward_hook(overflow)
    with pytest.raises(ConfigError, match=r"torch.float32: its gradients are not finite"):
        information(model, cache, [0, 1], GIVEN, slice(0, 24))
