"""What a model's attention passes is read from its source before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tests.tierkv.tiny_models import build
from tierkv.attention_calls import calls_of
from tierkv.errors import UnsupportedModel
from tierkv.model import attach


class Biased(LlamaAttention):
    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, position_bias: Any) -> Any:
        attention_interface: Any = None
        return attention_interface(
            self, query, key, value, attention_mask, scaling=1.0, position_bias=position_bias
        )


class Masking(LlamaAttention):
    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any) -> Any:
        attention_interface: Any = None
        return attention_interface(self, query, key, value, attention_mask=attention_mask + 1)


class Apart(LlamaAttention):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return torch.softmax(query @ key.mT, -1) @ value


class Helped(Biased):
    """Calls the interface somewhere else than in `forward`."""

    def forward(self, *arguments: Any) -> Any:
        return self.attend(*arguments)

    def attend(self, query: Any, key: Any, value: Any, attention_mask: Any) -> Any:
        attention_interface: Any = None
        return attention_interface(self, query, key, value, attention_mask, indices=[1])


@pytest.mark.parametrize("kind", [LlamaAttention, Gemma2Attention, GptOssAttention])
def test_what_pages_know_is_served(kind: type[nn.Module]) -> None:
    assert calls_of(kind) == (True, True, ())


@pytest.mark.parametrize(
    ("kind", "unserved"),
    [(Biased, "position_bias"), (Masking, "an attention mask of its own"), (Helped, "indices")],
)
def test_what_they_do_not_know_is_named(kind: type[nn.Module], unserved: str) -> None:
    assert calls_of(kind) == (True, True, (unserved,))


@pytest.mark.parametrize("kind", [LlamaMLP, nn.Linear, Apart])
def test_a_module_that_does_not_attend_calls_nothing(kind: type[nn.Module]) -> None:
    assert calls_of(kind) == (True, False, ())


def test_a_class_without_source_is_not_readable() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x\n", space)
    assert not calls_of(space["Made"]).readable


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Biased, "Biased: its attention takes position_bias"),
        (Masking, "Masking: its attention takes an attention mask of its own"),
        (Apart, "layer 1 does not take its attention from AttentionInterface"),
    ],
)
def test_one_layer_that_pages_cannot_serve_is_enough(kind: type[nn.Module], said: str) -> None:
    model = build("llama")
    model.model.layers[1].self_attn = kind(model.config, 1)
    with pytest.raises(UnsupportedModel, match=said):
        attach(model)


def test_keys_and_values_of_other_sizes_than_the_pages_are_refused() -> None:
    model = build("llama")
    model.model.layers[2].self_attn.v_proj = nn.Linear(64, 48)
    with pytest.raises(
        UnsupportedModel, match=r"have \[32, 48\] numbers a token at layer 2, pages 2 heads of 16"
    ):
        attach(model)
