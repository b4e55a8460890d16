"""Attention over pages on a device, or, under `TRITON_INTERPRET=1`, with the same kernels in this process's memory.

What waits for the device: a `prefill` whose heads choose among cold pages (which they named must be known to read them
in blocks), and whoever reads sums before they have arrived. Nothing else does.

In a CUDA graph: `decode` and `write` may be captured once their tables are on the device, that is, after a call with
the same `pages`, `offsets` and `cold`. A captured step goes on with the pages it was captured with, and a page table
grows every few tokens, so it is good for as many replays as the caller leaves the table alone. `prefill`, the first
call of a step and steps that read chosen cold pages are not captured. transformers captures only steps over its static
caches, of which a `TieredCache` is none.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.attention.contract import (
    CHOOSING_QUERIES,
    READ_ALL,
    Attended,
    Cold,
    ColdSeen,
    Leaving,
    Pages,
    PoolView,
    Scale,
    Sums,
)
from tierkv.attention.prefill import BLOCK_TOKENS, Block, Blocks, attend
from tierkv.attention.triton_blocks import BlockPlan, plan_blocks, read_blocks
from tierkv.attention.triton_cold import (
    DeviceCold,
    add_chosen_mass,
    audit,
    look,
    named,
    plan_cold,
    read_chosen,
    sum_of,
    wants_audit,
)
from tierkv.attention.triton_decode import (
    LOGITS,
    NOTHING,
    PAGE_LOGS,
    DevicePages,
    Found,
    add_mass,
    plan_pages,
    to_device,
)
from tierkv.attention.triton_decode import attend as attend_pages
from tierkv.attention.triton_forms import Device, Forms, bytes_of, forms_of, refuse_codec
from tierkv.attention.triton_pages import write_tokens
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.triton_setup import next_power_of_two, require_device

KEPT_POOLS = 4
"""Pools whose layers' forms are kept at most: HBM and host memory, before and after the codec's state moved. A form
keeps its pool mapped.
"""

DEVICE_BLOCK_TOKENS = 2 * BLOCK_TOKENS
"""Tokens of earlier pages that are dense at a time on a GPU."""

Table = NDArray[Any]
Made = TypeVar("Made")


class Kept(Generic[Made]):
    """What was made of tables, as long as the first one lives: a step hands each layer the same ones, unchanged."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[object, tuple[Table, ...], Made]] = {}

    def of(self, *tables: Table, make: Callable[[], Made], key: object = None) -> Made:
        """key: what else it was made of."""
        name = (*map(id, tables), key)
        found = self._made.get(name)
        if found is None:
            made = self._made
            alive = weakref.ref(tables[0], lambda _: made.pop(name, None))
            found = made[name] = (
                alive,
                tables[1:],
                make(),
            )  # the others are held, so that their ids stay their own
        return found[2]


class LayerForms:
    """How each layer of the pools at hand is read. Sessions have views of their own of one pool, and share this."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: PoolView | None = None
        self._layers: dict[int, Forms] = {}
        self._made: OrderedDict[tuple[object, ...], dict[int, Forms]] = OrderedDict()

    def of(self, pool: PoolView, layer: int, device: torch.device) -> Forms:
        """`layer` of the pool, for kernels that run on `device`."""
        if pool is not self._last:
            state = pool.codec_state
            key = (
                pool.address,
                pool.nbytes,
                pool.geometry,
                pool.codec,
                pool.middle,
                state.ctypes.data,
                state.size,
            )
            if key not in self._made and len(self._made) >= KEPT_POOLS:
                self._made.popitem(last=False)
            self._last, self._layers = pool, self._made.setdefault(key, {})
        forms = self._layers.get(layer)
        if forms is None:
            forms = self._layers[layer] = forms_of(pool, layer, self._device, device)
        return forms


class Memory(threading.local):
    """What each thread keeps."""

    def __init__(self, device: Device) -> None:
        self.pages: Kept[DevicePages] = Kept()
        self.blocks: Kept[list[BlockPlan]] = Kept()
        self.cold: Kept[DeviceCold] = Kept()
        self.slots: Kept[list[torch.Tensor]] = Kept()
        self.forms = LayerForms(device)


class OnItsWay:
    """Sums that go to host memory behind the kernels that make them."""

    def __init__(self, sums: Sequence[torch.Tensor]) -> None:
        self._sizes = [len(one) for one in sums]
        self._event: torch.cuda.Event | None = None
        flat = (
            torch.cat([torch.zeros(0), *sums])
            if not any(one.is_cuda for one in sums)
            else torch.cat(list(sums))
        )
        if flat.is_cuda:
            self._flat = torch.empty(len(flat), dtype=torch.float32, pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._flat = flat

    @property
    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[NDArray[np.float32]]:
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy() for part in torch.split(self._flat, self._sizes)]


class TritonAttention:
    """`PagedAttention` on the device of each pool. One instance may be used by several threads."""

    name = "triton"

    def __init__(self) -> None:
        self._memory = Memory(Device())

    def check(self, pool: PoolView) -> None:
        geometry = pool.geometry
        require_device(bytes_of(pool).device)
        if geometry.page_tokens & (geometry.page_tokens - 1):
            raise ConfigError(
                f"device kernels take page_tokens that is a power of two, not {geometry.page_tokens}; set it in the "
                "daemon's configuration"
            )
        refuse_codec(pool.codec, geometry, "low-bit")
        if pool.middle is not None:
            refuse_codec(pool.middle, geometry, "middle")

    def zeros(self, pool: PoolView, count: int) -> Sums:
        return torch.zeros(count, dtype=torch.float32, device=bytes_of(pool).device)

    def leave(self, sums: Sequence[Sums]) -> Leaving:
        return OnItsWay([sum_of(one) for one in sums])

    def write(
        self, pool: PoolView, layer: int, offsets: NDArray[np.int64], slots: NDArray[np.int32],
        keys: torch.Tensor, values: torch.Tensor,
    ) -> None:  # fmt: skip
        geometry = pool.geometry
        exact = self._forms(pool, layer, bytes_of(pool).device).exact
        there, slots_there = self._memory.slots.of(
            offsets, slots, make=lambda: to_device((offsets, slots), exact.pool.device)
        )
        keys, values = keys.detach(), values.detach()
        if len(offsets):
            write_tokens[(len(offsets) * geometry.num_kv_heads,)](
                exact.pool, there, slots_there, keys, values, layer, *keys.stride(), *values.stride(),
                HEADS=geometry.num_kv_heads, TOKENS=geometry.page_tokens, DIM=geometry.head_dim,
                WIDTH=next_power_of_two(geometry.head_dim), ITEM=geometry.item_bytes, num_warps=1,
            )  # fmt: skip

    def decode(
        self, query: torch.Tensor, pool: PoolView, pages: Pages, layer: int, scale: float,
        page_mass: Sums | None = None, token_mass: Sums | None = None,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        query = query.detach()
        plan = self._plan(pages, pool.geometry.num_kv_heads, query.device)
        forms = self._forms(pool, layer, query.device)
        keep = LOGITS if token_mass is not None else NOTHING if page_mass is None else PAGE_LOGS
        found = attend_pages(query, forms, plan, scale, softcap, sinks, keep)
        if cold is not None:
            mass = None if token_mass is None else sum_of(token_mass)
            found = self._attend_cold(query, pool, layer, Scale(scale, softcap), cold, seen, found, mass)
        if keep != NOTHING:
            add_mass(
                plan, found, *(None if sums is None else sum_of(sums) for sums in (page_mass, token_mass))
            )
        return Attended(found.out, found.log_sum_exp)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: PoolView, pages: Pages,
        layer: int, scale: float, token_mass: Sums | None = None, window: int = 0,
        cold: Cold | None = None, seen: ColdSeen | None = None,
        softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        device, to_logits = query.device, Scale(scale, softcap)
        mass = None if token_mass is None else sum_of(token_mass)
        half = device.type == "cuda" and query.dtype == getattr(torch, pool.geometry.dtype)
        dtype = query.dtype if half else torch.float32
        plans, forms = self._blocks(pages, pool.geometry, device), self._forms(pool, layer, device)

        def earlier() -> Iterator[Block]:
            return read_blocks(forms, plans, dtype)

        if cold is None:
            return attend(
                query, keys, values, to_logits, sinks, earlier, pages.total_tokens, mass, window, dtype=dtype
            )
        q_heads, chunk, head_dim = query.shape
        there = self._cold(cold, device)
        host = self._forms(cold.host, layer, device)
        hbm: list[torch.Tensor] = []

        def further(grouped: torch.Tensor, log_sum_exp: torch.Tensor) -> Blocks:
            """The cold pages that any KV head names, asked with the chunk's last queries."""
            asking = min(CHOOSING_QUERIES, chunk)
            asked = grouped[:, :, -asking:].float().reshape(1, q_heads * asking, head_dim)
            logs = log_sum_exp[:, :, -asking:].reshape(1, q_heads * asking)
            hbm.append(log_sum_exp[:, :, -1].reshape(1, q_heads))
            choice = look(asked, pool, there, layer, to_logits, logs, asking, cold.read, seen)
            union = named(choice, there, cold.read)
            blocks = self._blocks(union, pool.geometry, device)
            return lambda: read_blocks(host, blocks, dtype)

        got = attend(
            query, keys, values, to_logits, sinks, earlier, pages.total_tokens, mass, window, further, dtype
        )
        if seen is not None and wants_audit(seen):
            last = query[:, -1].detach().reshape(1, q_heads, head_dim)
            everything = attend_pages(last, host, there.everything, scale, softcap, keep=PAGE_LOGS)
            attended = got.log_sum_exp[:, -1].reshape(1, q_heads)
            audit(there, everything, hbm[0] * LOG2_E, attended * LOG2_E, seen)
        return got

    def _attend_cold(
        self, query: torch.Tensor, pool: PoolView, layer: int, scale: Scale, cold: Cold, seen: ColdSeen | None,
        here: Found, token_mass: torch.Tensor | None,
    ) -> Found:  # fmt: skip
        """What was attended `here`, in HBM, joined with the rows' cold pages, whose masses are added."""
        there, host = self._cold(cold, query.device), self._forms(cold.host, layer, query.device)
        if not len(there.offsets):
            if seen is not None and seen.attended is not None:
                sum_of(seen.attended).add_(1.0)
            return here
        masses = token_mass is not None
        choice = look(query.float(), pool, there, layer, scale, here.log_sum_exp, 1, cold.read, seen)
        joined = here
        if cold.read == READ_ALL:
            far = attend_pages(
                query, host, there.everything, scale.factor, scale.cap, keep=LOGITS if masses else NOTHING
            )
            joined = _join(here, far)
            if token_mass is not None:
                add_mass(there.everything, far._replace(totals=joined.totals), None, token_mass)
        elif choice is not None:
            far = read_chosen(query, host, there, choice, scale, masses)
            joined = _join(here, far)
            if token_mass is not None:
                add_chosen_mass(there, choice, far.kept, joined.totals, token_mass)
        if seen is not None and wants_audit(seen):
            everything = attend_pages(query, host, there.everything, scale.factor, scale.cap, keep=PAGE_LOGS)
            audit(there, everything, here.totals, joined.totals, seen)
        return joined

    def _plan(self, pages: Pages, kv_heads: int, device: torch.device) -> DevicePages:
        return self._memory.pages.of(*pages[:5], make=lambda: plan_pages(pages, kv_heads, device), key=device)

    def _blocks(self, pages: Pages, geometry: Geometry, device: torch.device) -> list[BlockPlan]:
        size = DEVICE_BLOCK_TOKENS if device.type == "cuda" else BLOCK_TOKENS
        return self._memory.blocks.of(
            *pages[:5], make=lambda: plan_blocks(pages, geometry.page_tokens, size, device), key=device
        )

    def _cold(self, cold: Cold, device: torch.device) -> DeviceCold:
        heads = cold.host.geometry.num_kv_heads
        make = partial(plan_cold, cold.pages, heads, cold.read, device)
        return self._memory.cold.of(*cold.pages, make=make, key=(device, cold.read))

    def _forms(self, pool: PoolView, layer: int, device: torch.device) -> Forms:
        return self._memory.forms.of(pool, layer, device)


LOG2_E = 1.4426950408889634


def _join(here: Found, far: Found) -> Found:
    """Attention over both; `kept` are those of `here`."""
    totals = torch.logaddexp2(here.totals, far.totals)
    floor = totals.clamp(min=-1e30)
    mine, theirs = (torch.exp2(part.totals - floor).unsqueeze(-1) for part in (here, far))
    return Found(here.out * mine + far.out * theirs, totals / LOG2_E, totals, here.kept)


__all__ = ["TritonAttention"]
