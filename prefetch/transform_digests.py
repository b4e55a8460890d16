"""Digests of keys in a few bits each (`tierkv.prefetch.transform` says how): their bytes, and the numbers that kernels
read them by. They need a state of the model, which `tierkv calibrate` fits.

The state is `KeyTransform`'s arrays one after the other, as they are. Bits follow from its variances alone, so every
process that has it reads the same records.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tierkv.geometry import PAGE_TOKENS, Geometry
from tierkv.numba_setup import kernel
from tierkv.prefetch.deviation import as_float64
from tierkv.prefetch.digests import Bytes, DigestShape, Doubles, Floats, Words, digest_shape
from tierkv.prefetch.opinions import of_mean_one
from tierkv.prefetch.transform import GAIN, GAINS, MIDDLE, NOTHING, TINY, State, Transform, cosines
from tierkv.quant.floats import BFLOAT16, KIND, widen
from tierkv.quant.klt_levels import BOUNDARIES, LEVELS, STEPS

Ints = NDArray[np.int32]

PREFIX = "transform-"

SLOTS = PAGE_TOKENS
"""Tokens of a page. Kernels are made for so many."""

EQUAL = 8
"""Magnitudes of a code from which on they are equally spaced."""

KEPT = 8
"""Models and forms whose tables are kept: each session of a worker asks for them."""


class Tables(NamedTuple):
    """What kernels read records by, at one layer of H heads or at all (then with a leading axis).

    A head has at most C coefficients, slot by slot, each slot's a multiple of `TOGETHER`: those that have bits, and
    behind them some of mask and size 0, which stand for nothing.
    """

    counts: Ints  # [H] coefficients
    slots: Ints  # [H] all of them are among so many first slots
    low: Ints  # [H, C] byte of the record where a code begins
    high: Ints  # [H, C] byte where it ends
    shift: Ints  # [H, C] bit where it begins
    mask: Ints  # [H, C] 2**bits - 1
    slot: Ints  # [H, C]
    axis: Ints  # [H, C]
    size: Floats  # [H, C] standard deviation
    mean: Floats  # [H, D]
    analysis: Floats  # [H, D, D]
    axes: Floats  # [H, D, D]
    lost: Floats  # [H, D]
    spread: Floats  # [H] usual sum of squares beyond the page's mean


TOGETHER = 4
"""Coefficients of one slot that a step of a product takes."""


def _levels() -> Floats:
    """What codes stand for, of unit variance: those of so many bits begin at 2**bits - 1."""
    levels = [np.zeros(1, np.float32)]
    for half in LEVELS[1:]:
        levels += [half, -half]
    return np.concatenate(levels)


def _boundary_table() -> Floats:
    """`[EQUAL, EQUAL]`: of codes of so many magnitudes."""
    table = np.zeros((EQUAL, EQUAL), np.float32)
    for width in range(1, len(BOUNDARIES)):
        table[1 << (width - 1), : len(BOUNDARIES[width])] = BOUNDARIES[width]
    return table


CODE_LEVELS, BOUNDARY_TABLE = _levels(), _boundary_table()
COSINES: Floats = cosines(SLOTS).astype(np.float32)
STEP_4, STEP_5 = STEPS[4], STEPS[5]


class TransformForm:
    """Records of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.size}"

    def shape(self, geometry: Geometry, layers: int) -> DigestShape:
        return digest_shape(geometry, layers, self.size)

    def state_floats(self, geometry: Geometry) -> int:
        return sum(math.prod(shape) for shape in _shapes(geometry))

    def of(self, geometry: Geometry, layers: int, state: Floats) -> TransformDigests:
        floats = self.state_floats(geometry)
        if state.size != floats:
            raise ValueError(f"a state of digests has {state.size} values; {floats} are needed")
        state = np.ascontiguousarray(state).reshape(-1)
        key = (self.size, geometry, layers, xxhash.xxh3_128_digest(state.data))
        with _making:
            found = _made.get(key)
            if found is None:
                while len(_made) >= KEPT:
                    del _made[next(iter(_made))]
                found = _made[key] = self._of(geometry, layers, state)
        return found

    def _of(self, geometry: Geometry, layers: int, state: Floats) -> TransformDigests:
        ends = np.cumsum([math.prod(shape) for shape in _shapes(geometry)])[:-1]
        parts = zip(np.split(state, ends), _shapes(geometry), strict=True)
        whole = State(*(np.array(part, np.float32).reshape(shape) for part, shape in parts))
        return TransformDigests(self.shape(geometry, layers), whole)


_made: dict[tuple[int, Geometry, int, bytes], TransformDigests] = {}
_making = threading.Lock()
"""Sessions of several threads ask."""


class TransformDigests:
    """The kernel's sums are added up in another order than the reference's: a code at a boundary may differ by one."""

    def __init__(self, shape: DigestShape, state: State) -> None:
        if shape.geometry.page_tokens != SLOTS:
            raise ValueError(f"transform digests are of pages of {SLOTS} tokens")
        self.shape = shape
        self.transform = Transform(state, shape.record_bytes)
        self.tables = _tables(self.transform)
        self.weights = of_mean_one(state.weights[shape.first_layer :])

    def write(self, exact: Bytes, count: int, out: Bytes) -> None:
        words, out = self.shape.checked(exact, count, out)
        is_bfloat16 = KIND[self.shape.geometry.dtype] == BFLOAT16
        shape = self.shape
        write_kernel(words, is_bfloat16, shape.first_layer, count, self.tables, shape.record_bytes, out)

    def reference_write(self, exact: Bytes, count: int, out: Bytes) -> None:
        shape = self.shape
        words, out = shape.checked(exact, count, out)
        out[:] = 0
        records = out[: shape.layers * shape.geometry.num_kv_heads * shape.record_bytes]
        records = records.reshape(shape.layers, shape.geometry.num_kv_heads, shape.record_bytes)
        if count == 0:
            records[..., 0] = NOTHING
            return
        keys = as_float64(words[:, 0], shape.geometry.dtype).astype(np.float32)[:, :, None]
        records[:] = self.transform.summarize(keys, np.array([count]))[shape.first_layer :, :, 0]

    def log_mass(
        self, digest: Bytes, layer: int, query: Doubles, count: int, scale: float, cap: float
    ) -> Doubles:
        shape, heads = self.shape, self.shape.geometry.num_kv_heads
        records = digest[: shape.layers * heads * shape.record_bytes].reshape(shape.layers, heads, 1, -1)
        mine, counts = records[layer - shape.first_layer], np.array([count])
        found = np.stack(
            [
                self.transform.log_mass_of((layer, head), query[head], mine[head], counts, scale, cap)[:, 0]
                for head in range(heads)
            ]
        ).astype(np.float64)
        return np.where(np.isfinite(found), found, -np.inf)

    def layer(self, layer: int) -> Tables:
        """Of one of the page's layers."""
        return Tables(*(table[layer] for table in self.tables))


def flat_state(keys: State) -> Floats:
    """As it lies in HBM."""
    return np.concatenate([part.reshape(-1) for part in keys])


def _shapes(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """Of the state's arrays."""
    head, dim = (geometry.num_layers, geometry.num_kv_heads), geometry.head_dim
    return (*head, dim), (*head, dim, dim), (*head, dim, dim), (*head, geometry.page_tokens, dim), head


def _tables(transform: Transform) -> Tables:
    state, heads = transform.state, transform.bits.shape[:2]
    columns = {head: _columns(transform.bits[head], state.variance[head]) for head in np.ndindex(*heads)}
    counts = np.zeros(heads, np.int32)
    slots = np.zeros(heads, np.int32)
    most = max(len(column["slot"]) for column in columns.values())
    held = {name: np.zeros((*heads, most), np.int32) for name in Tables._fields[2:8]}
    size = np.zeros((*heads, most), np.float32)
    for head, own in columns.items():
        counts[head] = len(own["slot"])
        slots[head] = own["slot"].max(initial=-1) + 1
        for name, table in held.items():
            table[head][: counts[head]] = own[name]
        size[head][: counts[head]] = own["size"]
    spread = state.variance[:, :, 1:].sum((2, 3), dtype=np.float64).astype(np.float32)
    return Tables(
        counts=counts, slots=slots, **held, size=size, mean=state.mean, analysis=state.analysis, axes=state.axes,
        lost=transform.lost, spread=spread,
    )  # fmt: skip


def _columns(bits: NDArray[np.int64], variance: Floats) -> dict[str, NDArray[np.generic]]:
    """Of one head, from `[SLOTS, D]`: rows of `Tables` by name."""
    slot, axis = np.nonzero(bits)
    width = bits[slot, axis]
    first = 8 + np.cumsum(width) - width  # behind the gain
    per_slot = np.bincount(slot, minlength=SLOTS)
    room = -(-per_slot // TOGETHER) * TOGETHER
    ends, starts = np.cumsum(room), np.cumsum(per_slot) - per_slot
    place = (ends - room)[slot] + np.arange(len(slot)) - starts[slot]
    given = {
        "low": first // 8, "high": (first + width - 1) // 8, "shift": first % 8, "mask": (1 << width) - 1,
        "axis": axis, "size": np.sqrt(variance[slot, axis]),
    }  # fmt: skip
    found: dict[str, NDArray[np.generic]] = {"slot": np.repeat(np.arange(SLOTS), room)}
    for name, values in given.items():
        found[name] = np.zeros(ends[-1], values.dtype)
        found[name][place] = values
    return found


@kernel()
def code_of(unit: np.float32, mask: int) -> int:
    """The code of a coefficient of unit variance, one of `mask + 1`. It may be infinite: keys far above the model's."""
    half, size, index = (mask + 1) >> 1, abs(unit), 0
    if half >= EQUAL:
        step = STEP_4 if half == EQUAL else STEP_5
        index = int(min(size / step, np.float32(half - 1)))
    else:
        while index < half - 1 and size >= BOUNDARY_TABLE[half, index]:
            index += 1
    return index + half if unit < 0 else index


@kernel()
def write_record(
    words: Words, is_bfloat16: bool, count: int, layer: int, head: int, tables: Tables,
    keys: Floats, turned: Floats, found: Floats, out: Bytes,
) -> None:  # fmt: skip
    """One record from the keys `words` `[SLOTS, head_dim]`, count above 0; `keys`, `turned`, `found` of that shape are
    scratch.
    """
    dim = words.shape[1]
    mean, analysis = tables.mean[layer, head], tables.analysis[layer, head]
    for d in range(dim):
        total = 0.0
        for t in range(count):
            keys[t, d] = widen(words[t, d], is_bfloat16)
            total += keys[t, d]
        total /= count
        for t in range(count, SLOTS):
            keys[t, d] = np.float32(total)
    turned[:] = 0
    found[:] = 0
    for t in range(SLOTS):
        row = turned[t]
        for d in range(dim):
            off, axes = keys[t, d] - mean[d], analysis[d]
            for i in range(dim):
                row[i] += off * axes[i]
    for k in range(SLOTS):
        row = found[k]
        for t in range(SLOTS):
            part, source = COSINES[k, t], turned[t]
            for i in range(dim):
                row[i] += part * source[i]
    square, finite = 0.0, True
    for k in range(SLOTS):
        for i in range(dim):
            finite = finite and math.isfinite(found[k, i])
            square += np.float64(found[k, i]) * found[k, i] if k > 0 else 0.0
    out[:] = 0
    if not finite:
        out[0] = NOTHING
        return
    gain = math.sqrt(max(square, TINY * TINY) / max(np.float64(tables.spread[layer, head]), TINY))
    byte = int(min(max(np.rint(GAINS * math.log(gain)) + MIDDLE, 0), NOTHING - 1))
    out[0] = byte
    for j in range(tables.counts[layer, head]):
        if tables.mask[layer, head, j] == 0:
            continue
        k = tables.slot[layer, head, j]
        unit = found[k, tables.axis[layer, head, j]] / tables.size[layer, head, j]
        if k > 0:
            unit /= GAIN[byte]
        code = code_of(unit, tables.mask[layer, head, j]) << tables.shift[layer, head, j]
        out[tables.low[layer, head, j]] |= np.uint8(code & 0xFF)
        if tables.high[layer, head, j] > tables.low[layer, head, j]:
            out[tables.high[layer, head, j]] |= np.uint8(code >> 8)


@kernel()
def write_kernel(
    words: Words, is_bfloat16: bool, first: int, count: int, tables: Tables, size: int, out: Bytes
) -> None:
    """The digest of the layers from `first` on of `words` `[num_layers, 2, kv_heads, SLOTS, head_dim]`."""
    num_layers, _, heads, _, dim = words.shape
    keys, turned, found = (
        np.empty((SLOTS, dim), np.float32),
        np.empty((SLOTS, dim), np.float32),
        np.empty((SLOTS, dim), np.float32),
    )
    at = 0
    for layer in range(first, num_layers):
        for head in range(heads):
            if count > 0:
                write_record(
                    words[layer, 0, head], is_bfloat16, count, layer, head, tables, keys, turned, found,
                    out[at : at + size],
                )  # fmt: skip
            else:
                out[at : at + size] = 0
                out[at] = NOTHING
            at += size
    out[at:] = 0


__all__ = ["TransformDigests", "TransformForm", "flat_state"]
