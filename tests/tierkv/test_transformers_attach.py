"""Attaching changes nothing but what a TieredCache runs on, can be undone, and refuses what pages cannot serve."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from tests.tierkv.tiny_models import CACHE, build, expected, greedy, prompt, tiered
from tierkv.errors import UnsupportedModel
from tierkv.geometry import Geometry
from tierkv.model import attach
from tierkv.tiered_layer import TieredLayer
from tierkv.transformers_cache import TieredCache


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


# Without a TieredCache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_an_attached_model_runs_other_caches_bit_for_bit_as_sdpa_did(name: str) -> None:
    model, inputs = build(name), prompt(33, 20)
    with torch.no_grad():
        want = model(**inputs, **{CACHE: DynamicCache(config=model.config)}).logits
        bare = model(**inputs, use_cache=False).logits
    tokens = expected(model, inputs)
    attach(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs, **{CACHE: DynamicCache(config=model.config)}).logits, want)
        assert torch.equal(model(**inputs, use_cache=False).logits, bare)
    assert torch.equal(expected(model, inputs), tokens)


def test_a_sliding_window_mask_is_still_sdpas(llama: PreTrainedModel) -> None:
    model, inputs = build("mistral", sliding_window=8, layer_types=None), prompt(33, 20)
    want = expected(model, inputs)
    model.set_attn_implementation("tierkv")
    assert torch.equal(expected(model, inputs), want)


def test_gradients_still_flow_without_a_tiered_cache(llama: PreTrainedModel) -> None:
    inputs = prompt(12)
    attach(llama)
    llama(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert float(llama.model.layers[0].self_attn.k_proj.weight.grad.abs().sum()) > 0


# Attach and detach ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_detached_model_is_as_before(llama: PreTrainedModel, implementation: str) -> None:
    llama.set_attn_implementation(implementation)
    inputs, signature, attributes = prompt(20), inspect.signature(llama.forward), set(vars(llama))
    want = expected(llama, inputs)
    attached = attach(llama)
    # generate decides by the signature what it may pass.
    assert inspect.signature(llama.forward) == signature
    attached.detach()
    attached.detach()
    assert llama.config._attn_implementation == implementation
    assert "forward" not in vars(llama)
    assert set(vars(llama)) == attributes
    assert torch.equal(expected(llama, inputs), want)


def test_attaching_twice_wraps_once(llama: PreTrainedModel) -> None:
    first = attach(llama)
    assert attach(llama) is first
    first.detach()
    assert llama.config._attn_implementation == "sdpa"
    assert attach(llama) is not first


def test_a_forward_that_someone_else_wrapped_is_given_back(llama: PreTrainedModel) -> None:
    inner = llama.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    llama.forward = wrapped
    attach(llama).detach()
    assert llama.forward is wrapped


# What names and shapes the pages -------------------------------------------------------------------------------------


def test_the_geometry_is_the_models(llama: PreTrainedModel) -> None:
    """64 hidden values over 4 query heads are 16 a head; 2 KV heads, 3 layers."""
    assert attach(llama).geometry() == Geometry(3, 2, 16, "float32")
    assert attach(llama).geometry("bfloat16") == Geometry(3, 2, 16, "bfloat16")
    llama.to(torch.bfloat16)
    assert attach(llama).geometry().dtype == "bfloat16"


def test_a_model_id_names_the_weights_and_nothing_that_passes(llama: PreTrainedModel) -> None:
    before = attach(llama).model_id
    attach(llama).detach()
    llama.config.use_cache = False
    assert attach(llama).model_id == before == attach(build("llama")).model_id
    other = build("llama")
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1e-3)
    ids = {before, attach(other).model_id, attach(build("qwen2")).model_id}
    ids.add(attach(build("llama", rms_norm_eps=1e-4)).model_id)
    assert len(ids) == 4


def test_open_asks_the_client_for_the_models_pages(llama: PreTrainedModel) -> None:
    asked: list[Any] = []

    class Client:
        page_tokens = 8

        def open(self, *args: Any, **options: Any) -> str:
            asked.append((args, options))
            return "session"

    attached = attach(llama)
    assert attached.open(Client(), "float16", ladder="exact", hbm_budget=7) == "session"  # type: ignore[arg-type]
    assert asked == [
        ((Geometry(3, 2, 16, "float16", 8), attached.model_id), {"ladder": "exact", "hbm_budget": 7}),
    ]


# Sliding windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [256, 16])
def test_sliding_window_layers_keep_their_own_cache(chunk: int) -> None:
    model, inputs = build("qwen2-windows"), prompt(37, 20)
    want = expected(model, inputs)
    attached = attach(model)
    assert attached.geometry().num_layers == 1
    cache = tiered(attached, rows=2, chunk_tokens=chunk)
    assert torch.equal(greedy(model, inputs, cache), want)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [DynamicSlidingWindowLayer, TieredLayer, DynamicSlidingWindowLayer]


def test_sliding_window_layers_follow_beams_and_failures() -> None:
    model, inputs = build("qwen2-windows"), prompt(20)
    want = expected(model, inputs, num_beams=3)
    attached = attach(model)
    assert torch.equal(greedy(model, inputs, tiered(attached), num_beams=3), want)

    cache = tiered(attached)
    model(**{name: tensor[:, :15] for name, tensor in inputs.items()}, **{CACHE: cache})

    def explode(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_hook(explode)
    with pytest.raises(KeyboardInterrupt):
        model(inputs["input_ids"][:, 15:], **{CACHE: cache})
    hook.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [15, 15, 15]
    assert torch.equal(greedy(model, inputs, cache), expected(model, inputs))


def test_prompt_lookup_works_with_sliding_windows() -> None:
    model = build("qwen2-windows")
    inputs = {name: tensor.repeat(1, 4) for name, tensor in prompt(12).items()}
    want = expected(model, inputs, prompt_lookup_num_tokens=4)
    assert torch.equal(greedy(model, inputs, tiered(attach(model)), prompt_lookup_num_tokens=4), want)


def test_a_session_with_tokens_cannot_continue_where_windows_are_lost() -> None:
    model = build("qwen2-windows")
    cache = tiered(attach(model))
    model(**prompt(10), **{CACHE: cache})
    with pytest.raises(ValueError, match="sliding windows"):
        model(**prompt(12), **{CACHE: TieredCache(cache.sessions[0])})


# Refusals (more of them: `test_model_families.py`) -------------------------------------------------------------------


def test_keys_that_change_after_the_cache_are_refused(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not, such a layer would attend the new tokens only, silently."""
    monkeypatch.setattr(
        TieredLayer, "update", lambda self, keys, values, *_, **__: (keys.clone(), values.clone())
    )
    cache = tiered(attach(llama))
    with pytest.raises(UnsupportedModel, match="changes its keys"):
        llama(**prompt(4), **{CACHE: cache})
    assert cache.sessions[0].length == 0


def test_the_package_offers_attach_without_importing_transformers() -> None:
    """Commands and the daemon import tierkv too, and must start quickly."""
    program = (
        "import sys, tierkv\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from tierkv.model import attach\n"
        "assert tierkv.attach is attach and set(tierkv.__all__) <= {*dir(tierkv), 'AttachedModel', 'TieredCache'}\n"
        "assert tierkv.TieredCache.__name__ == 'TieredCache'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
