"""An attention of the study's own in the place of a model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor | None]
"""`(layer, query, key, value, scale)`, `[rows, heads, tokens, head_dim]` each: `[rows, queries, q_heads, head_dim]`, or
`None` where plain SDPA should answer.
"""


def take_over(model: PreTrainedModel, name: str, attend: Attend) -> None:
    """The model asks `attend` from now on. transformers keeps it under `name`: the last one of a name is asked."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float, **options: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        layer = module.layer_idx
        assert isinstance(layer, int)
        own = attend(layer, query, key, value, scaling)
        if own is not None:
            return own, None
        plain = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return plain[0], None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
