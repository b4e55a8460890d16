"""The Fisher information of cached keys and values: what their errors cost the model's answer.

Let p be what a model predicts next, and g the gradient of log p(y) by a cached key, with y drawn from p. To second
order an error e of that key costs `KL(p || p with the error) = e^T F e / 2` nats, where `F = E[g g^T]` is the Fisher
information (Amari, "Natural gradient works efficiently in learning", 1998; Martens, "New insights and perspectives on
the natural gradient method", arXiv 1412.1193). Optimal Brain Surgeon (Hassibi and Stork, 1993) removes the weights of
least cost in this measure; here coded channels take their place. What lies between the cache and the answer, the
projection behind the attention and all later layers, is in the gradient.

Errors that a codec makes on two tokens are unrelated, so their costs add up: a head's F is the sum over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel

from tierkv.errors import ConfigError
from tierkv.study.probe import cache_argument

SAMPLES = 4
"""Answers drawn for each token. Many tokens and texts are averaged over, too."""

SEED = 0


class Fisher(NamedTuple):
    """For one generated token, summed over cached tokens. L layers, H KV heads, float32."""

    keys: torch.Tensor  # [L, H, D, D]
    values: torch.Tensor  # [L, H, D, D]


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No gradient is taken by the model's parameters; afterwards by those that it was taken by before."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def information(
    model: PreTrainedModel,
    cache: Cache,
    layers: Sequence[int],
    given: Sequence[int],
    tokens: slice,
    samples: int = SAMPLES,
) -> Fisher:
    """The information of `tokens` of the cache, for the mean of the tokens that are generated after `given` ones.

    One forward pass, and `samples` backward ones. Each draws an answer after every given token and takes the gradient
    of all: an answer's is 0 on average whatever came before, and so are products of two answers' gradients.

    Args:
        cache: transformers' own, of one sequence. `given` is appended to it.
        layers: the cache layers that are asked about. They are made leaves of the graph.

    Raises:
        ConfigError: an answer or a gradient is NaN or infinite.
    """
    with frozen(model), torch.enable_grad():
        leaves = _leaves(cache, layers)
        ids = torch.tensor([list(given)], device=model.device)
        log_p = model(input_ids=ids, **{cache_argument(model): cache}).logits[0].float().log_softmax(-1)
        _check_finite(log_p, "answers", model)
        p, draws = log_p.detach().exp().cpu(), torch.Generator().manual_seed(SEED)
        total = torch.zeros((), device=model.device)
        for sample in range(samples):
            answers = torch.multinomial(p, 1, generator=draws).to(log_p.device)
            loss = log_p.gather(1, answers).sum()
            gradients = torch.autograd.grad(loss, leaves, retain_graph=sample < samples - 1)
            far = (gradient[0, :, tokens].float() for gradient in gradients)
            total = total + torch.stack([gradient.mT @ gradient for gradient in far])
    _check_finite(total, "gradients", model)
    return Fisher(*(total / (samples * len(given))).chunk(2))


def _leaves(cache: Cache, layers: Sequence[int]) -> list[torch.Tensor]:
    """The cached keys `[1, H, tokens, D]` of the layers, then the values."""
    held = [cache.layers[layer] for layer in layers]
    for layer in held:
        layer.keys, layer.values = (kv.detach().requires_grad_() for kv in (layer.keys, layer.values))
    return [layer.keys for layer in held] + [layer.values for layer in held]


def _check_finite(values: torch.Tensor, what: str, model: PreTrainedModel) -> None:
    if not values.isfinite().all():
        raise ConfigError(
            f"{type(model).__name__} in {model.dtype}: its {what} are not finite; calibrate it in float32 or bfloat16"
        )
