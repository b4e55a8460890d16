"""A model over pages on a device: a TieredCache with attention "triton", in the interpreter where there is no GPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.contract.dense_cold import make_both
from tests.contract.test_attention import Case, make_case, random_query
from tests.tierkv.local_session import LocalPool, LocalSession, PageRows
from tests.tierkv.tiny_models import CACHE, SHAPE, prompt
from tests.triton_device import DEVICE  # skips the module where kernels cannot run
from tierkv import quant
from tierkv.attention.contract import Cold, ColdSeen, Leaving, PoolView, Sums
from tierkv.attention.triton_attention import Kept, TritonAttention
from tierkv.attention.triton_cold import Choice, named, plan_cold
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.model import attach
from tierkv.table import Kind
from tierkv.transformers_cache import TieredCache
from tierkv.triton_setup import interpreting

CLOSE = {"rtol": 1e-3, "atol": 1e-3} if interpreting() else {"rtol": 5e-2, "atol": 5e-2}
"""Of logits up to about 5; tensor cores take eleven bits."""


class DevicePool(LocalPool):
    """A local pool that lies on the device."""

    def __init__(self, geometry: Geometry, **options: Any) -> None:
        super().__init__(geometry, pages=32, **options)
        self.tensor = torch.from_numpy(self.data).to(DEVICE)

    def open(self, geometry: Geometry | None = None, model_id: str = "") -> LocalSession:
        session = super().open(geometry, model_id)
        session.pool = session.pool._replace(data=np.zeros(0, np.uint8), tensor=self.tensor)
        return session


class PackedSession(LocalSession):
    """Packs its first pages on the way: the ones that `pack` names."""

    packed = 0

    def pack(self, pages: int) -> None:
        data, state = self._pool.data, np.zeros(self.pool.codec.state_floats(self.geometry), np.float32)
        for page in self.pages[self.packed : pages]:
            frame = data[page.offset : page.offset + self.geometry.page_bytes]
            packed = np.zeros(self.pool.codec.page_bytes(self.geometry), np.uint8)
            self.pool.codec.encode(self.geometry, frame.copy(), page.count, state, packed)
            frame[: packed.size] = packed
        self.packed, self.pool = pages, self.pool._replace(codec_state=state)

    def rows(self, stop: int) -> PageRows:
        rows = super().rows(stop)
        rows.kinds[: self.packed] = Kind.QUANTIZED
        return rows


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = SHAPE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval().to(DEVICE)


def steps(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, count: int
) -> list[torch.Tensor]:
    """Logits of a prompt's last tokens, and of `count` decode steps that follow, whatever the model says."""
    mask = inputs["attention_mask"].to(DEVICE)
    found, rows = [], len(mask)
    for step in range(count + 1):
        ids = inputs["input_ids"].to(DEVICE) if step == 0 else torch.full((rows, 1), 5 + step, device=DEVICE)
        if step:
            mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache}
            ).logits
        found.append(logits[:, -1].cpu())
    return found


@pytest.mark.parametrize("lengths", [(37,), (5, 21)])
def test_exact_pages_give_the_logits_of_the_dynamic_cache(
    llama: PreTrainedModel, lengths: tuple[int, ...]
) -> None:
    inputs = prompt(*lengths)
    expected = steps(llama, inputs, DynamicCache(config=llama.config), 5)
    attached = attach(llama)
    pool = DevicePool(attached.geometry("float32"), observe_every=2)
    cache = TieredCache([pool.open() for _ in lengths])
    assert cache.attention.name == "triton"
    for got, wanted in zip(steps(llama, inputs, cache, 5), expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    attached.detach()
    for session, length in zip(pool.sessions, lengths, strict=True):
        assert session.length == length + 5
        for _, mass in session.observations:
            assert np.nansum(mass) == pytest.approx(1.0, abs=1e-2)
        assert len(session.observations) == 3  # the prompt and two of five steps


def test_packed_pages_give_the_logits_of_the_reference(llama: PreTrainedModel) -> None:
    inputs, found = prompt(70), {}
    attached = attach(llama)
    for name in ("reference", "triton"):
        pool = LocalPool(attached.geometry("float32"), pages=32)
        session = PackedSession(pool, 0)
        pool.sessions.append(session)
        if name == "triton" and not interpreting():
            pytest.skip("the pages are packed in this process's memory")
        cache = TieredCache(session, attention=name)
        steps(llama, inputs, cache, 0)
        session.pack(3)
        tail = {"input_ids": prompt(9)["input_ids"], "attention_mask": torch.ones(1, 79, dtype=torch.long)}
        found[name] = steps(llama, tail, cache, 3)
        masses = [mass for _, mass in session.observations]
        assert masses and all(abs(float(np.nansum(mass)) - 1) < 1e-3 for mass in masses)
    attached.detach()
    for got, wanted in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)


class _Late:
    """Sums that arrive when they are let."""

    def __init__(self, leaving: Leaving, gate: list[bool]) -> None:
        self._leaving, self._gate = leaving, gate

    @property
    def arrived(self) -> bool:
        return self._gate[0]

    def arrays(self) -> list[NDArray[np.float32]]:
        assert self._gate[0], "waited for the device"
        return self._leaving.arrays()


class LateAttention(TritonAttention):
    """As on a GPU that is busy."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = [False]

    def leave(self, sums: Any) -> Leaving:
        return _Late(super().leave(sums), self.gate)


def test_an_observation_that_has_not_arrived_is_sent_a_step_later_and_not_waited_for(
    llama: PreTrainedModel,
) -> None:
    attached, late = attach(llama), LateAttention()
    pool = DevicePool(attached.geometry("float32"), observe_every=1)
    cache = TieredCache(pool.open(), attention=late)
    (session,) = pool.sessions
    llama(input_ids=prompt(9)["input_ids"].to(DEVICE), **{CACHE: cache})
    assert session.observations == []
    late.gate[0] = True
    llama(input_ids=torch.tensor([[5]], device=DEVICE), **{CACHE: cache})
    attached.detach()
    (first_step, first), (second_step, second) = session.observations
    assert (first_step, second_step) == (1, 1)
    assert np.isnan(first).tolist() == [False] * 9 + [
        True
    ]  # the prompt's: of the step's token it knows nothing
    assert np.nansum(first) == pytest.approx(1.0, abs=1e-2) and not np.isnan(second).any()


def test_a_pool_on_a_device_is_refused_by_attention_in_this_process(llama: PreTrainedModel) -> None:
    pool = DevicePool(Geometry(2, 2, 16, "float32"))
    with pytest.raises(ConfigError, match="attention='triton'"):
        TieredCache(pool.open(), attention="cpu")


@pytest.mark.parametrize("form", ["codec", "middle"])
def test_a_form_that_no_kernel_reads_is_refused_before_the_first_step(form: str) -> None:
    session = DevicePool(Geometry(2, 2, 16, "float32")).open()
    session.pool = session.pool._replace(**{form: quant.get("kivi2")})
    with pytest.raises(ConfigError, match="kivi2"):
        TieredCache(session)


def test_pages_of_a_token_count_that_is_no_power_of_two_are_refused() -> None:
    session = DevicePool(Geometry(2, 2, 16, "float32", 12)).open()
    with pytest.raises(ConfigError, match="not 12"):
        TieredCache(session)


# Nothing waits -------------------------------------------------------------------------------------------------------


class _NoScalars(TorchDispatchMode):
    """Operators whose result the host has to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(at is not None and at.dtype == torch.bool for at in args[1])
        if (name in self.WAITING or by_mask) and _called_by_us():
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


def _called_by_us() -> bool:
    """Not by triton's interpreter, which reads what it runs on."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("triton."):
            return False
        if module.startswith("tierkv."):
            return True
        frame = frame.f_back
    return False


def _guarded(name: str, original: Any) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _called_by_us():
            raise AssertionError(f"Tensor.{name} waits for the device")
        return original(*args, **kwargs)

    return guarded


@contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbids our code what would wait for a device: operators that give the host a number, and copies to it."""
    with monkeypatch.context() as patch, _NoScalars():
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, _guarded(name, getattr(torch.Tensor, name)))
        yield


def test_the_guard_finds_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's choice among cold pages does: which they are must be known to read them in blocks."""
    cold = plan_cold(make_both(1, (1,), (3,), kv_heads=1).cold.pages, 1, 2, DEVICE)
    choice = Choice(torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, 2, dtype=torch.bool))
    with pytest.raises(AssertionError, match="waits"), nothing_waits(monkeypatch):
        named(choice, cold, 2)


def _first(case: Case) -> tuple[Any, ...]:
    heads = case.view.geometry.num_kv_heads * 2
    return random_query(1, len(case.dense), heads, 64).to(DEVICE), _there(case.view), case.pages, 1, 0.125


def _there(view: PoolView) -> PoolView:
    return view._replace(data=np.zeros(0, np.uint8), tensor=torch.from_numpy(view.data).to(DEVICE))


def _sums(triton: TritonAttention, view: PoolView, *counts: int) -> list[Sums]:
    return [triton.zeros(view, count) for count in counts]


def test_a_step_whose_tables_are_on_the_device_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, case = TritonAttention(), make_case(1, kv_heads=2, row_pages=(3, 2), middle_name="int8")
    query, view, pages, layer, scale = _first(case)
    masses = _sums(triton, view, len(pages.offsets), pages.total_tokens)
    offsets, slots = pages.offsets[pages.kinds == Kind.EXACT][:1].copy(), np.zeros(1, np.int32)
    keys = random_query(2, 1, 2, 64).to(DEVICE)

    def step() -> None:
        triton.write(view, layer, offsets, slots, keys, keys)
        triton.decode(query, view, pages, layer, scale, masses[0], masses[1])

    step()
    with nothing_waits(monkeypatch):
        step()
        leaving = triton.leave(masses)
    assert leaving.arrays()[1].sum() == pytest.approx(2 * 2, abs=1e-2)  # two rows, two calls


@pytest.mark.skipif(not interpreting(), reason="the host pool of this test is not mapped for a GPU")
def test_a_step_that_reads_and_audits_cold_pages_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, both = TritonAttention(), make_both(3, (3, 2), (4, 3), kv_heads=2, read=2)
    view, pages = _there(both.case.view), both.pages
    query = random_query(3, 2, 4, 64)
    (mass,) = _sums(triton, view, pages.total_tokens)
    seen = ColdSeen(*_sums(triton, view, 7, 7, 2))

    def step(cold: Cold) -> None:
        triton.decode(query, view, pages, 1, 0.125, None, mass, cold, seen)

    step(both.cold)
    with nothing_waits(monkeypatch):
        step(both.cold)
    assert triton.leave([mass]).arrays()[0].sum() == pytest.approx(2 * 2, abs=1e-2)


# What is kept ---------------------------------------------------------------------------------------------------------


class _Thing:
    """Something that was made."""


def test_what_was_made_of_tables_goes_with_the_first_of_them() -> None:
    kept: Kept[_Thing] = Kept()
    table, other = np.zeros(3), np.ones(3)
    made = kept.of(table, other, make=_Thing)
    assert kept.of(table, other, make=_Thing) is made
    assert kept.of(table, np.ones(3), make=_Thing) is not made
    gone = weakref.ref(made)
    del made
    assert gone() is not None
    del table
    assert gone() is None
