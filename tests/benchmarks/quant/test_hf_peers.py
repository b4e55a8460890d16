"""transformers' caches: the bits that they store, and that they are taken as they are."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.benchmarks.quant.records import record_of, show
from tests.benchmarks.quant.through import kept
from tierkv.benchmarks.quant import FORCED, RECENT, forms
from tierkv.benchmarks.quant.calibrate import Calibration
from tierkv.benchmarks.quant.forms import Form
from tierkv.geometry import Geometry
from tierkv.quant.moments import standard

GEOMETRY = Geometry(1, 1, 32, "float32")


@pytest.fixture(params=["hqq", "hqq-channel", "quanto", "quanto-channel"])
def hf_form(request: pytest.FixtureRequest) -> Form:
    if importlib.util.find_spec(request.param.partition("-")[0].replace("quanto", "optimum")) is None:
        pytest.skip("needs the extra `bench`")
    (form,), _ = forms.build([request.param], Calibration(GEOMETRY, [], standard(GEOMETRY)))
    return form


@pytest.mark.slow  # quanto compiles its kernels at first use
def test_bits_of_transformers_caches_count_a_scale_and_a_zero_for_64_values(hf_form: Form) -> None:
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        held = hf_form.hold(torch.randn(2, 2, 1, 64, 64).to(dtype))
        held.encode()
        assert held.bits_per_value == 2 + 2 * bits / 64


@pytest.mark.slow
def test_transformers_quantized_cache_gives_attention_the_same(hf_form: Form) -> None:
    from transformers import LlamaConfig, QuantizedCache

    from tierkv.benchmarks.quant.hf_peers import SETTINGS

    kv = torch.randn(2, 2, 1, 64 + RECENT, 64, generator=torch.Generator().manual_seed(3))
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=1, num_attention_heads=1, hidden_size=64)
    setting = SETTINGS[hf_form.name]
    cache = QuantizedCache(setting.backend, config, residual_length=RECENT + FORCED + 1, **setting.options())
    for layer, (keys, values) in enumerate(kv[..., None, :, :, :].unbind()):
        cache.update(keys[..., :64, :], values[..., :64, :], layer)
        seen = torch.cat(cache.update(keys[..., 64:, :], values[..., 64:, :], layer))
        assert torch.equal(seen[:, :, 64:], kv[layer, :, :, 64:])
        assert torch.equal(seen[:, :, :64], kept(hf_form.hold(kv[:, :, :, :64]))[layer])


def test_a_peer_that_is_not_installed_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.importlib.util, "find_spec", lambda name: None)
    found, skipped = forms.build(["kivi-g32", "hqq", "quanto"], Calibration(GEOMETRY, [], standard(GEOMETRY)))
    assert [form.name for form in found] == ["kivi-g32"]
    assert [one.name for one in skipped] == ["hqq", "quanto"]
    assert all("pip install" in one.why and "[bench]" in one.why for one in skipped)
    shown = show([record_of("kivi-g32", 3.0, 0.1, skipped={one.name: one.why for one in skipped})])
    assert "hqq is left out" in shown and '".[bench]"' in shown
