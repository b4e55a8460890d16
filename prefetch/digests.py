"""Digests: what a page leaves in HBM when its replicas leave, so that a query can tell its share of attention without
its keys. One contract, two forms (tests: `tests/contract/test_digests.py`).

A digest is `[layers, kv_heads]` records of equal length, without gaps, then zeros up to a multiple of 64 bytes. What a
record holds is its form's: `deviation` (`tierkv.prefetch.deviation`), mean and deviation of the keys, for any model;
`transform-N` (`tierkv.prefetch.transform_digests`), the keys coded in N bytes, where the model was calibrated. From a
record and a query attention estimates the page's log-mass, the log of the sum of the exponentials of its logits. A
record that tells nothing, because a key was NaN or infinite, makes it minus infinity, which is what a page without a
digest has.

A form may have a per-model state of float32, which lies in HBM behind the codec's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.quant.floats import page_words

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Words = NDArray[np.uint16] | NDArray[np.uint32]

ALIGNMENT = 64
"""Digests start at multiples of it, as pages do."""


class DigestShape(NamedTuple):
    """Which layers of a page a digest tells about, and so how long it is."""

    geometry: Geometry
    layers: int
    """The last `layers` of the page's layers, 1..geometry.num_layers."""
    record_bytes: int
    """Of one layer and KV head."""

    @property
    def nbytes(self) -> int:
        """Of one digest."""
        size = self.layers * self.geometry.num_kv_heads * self.record_bytes
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def first_layer(self) -> int:
        """Of the page's layers the first that is told about."""
        return self.geometry.num_layers - self.layers

    def checked(self, exact: Bytes, count: int, out: Bytes) -> tuple[Words, Bytes]:
        """A page's exact bytes as words, and the `nbytes` of `out` that are to be written.

        Raises:
            ValueError: `exact` or `out` is too short, or a page holds no `count` tokens.
        """
        if not 0 <= count <= self.geometry.page_tokens:
            raise ValueError(f"a page of {self.geometry.page_tokens} tokens holds no {count}")
        if len(exact) < self.geometry.page_bytes or len(out) < self.nbytes:
            raise ValueError(
                f"a page of {len(exact)} bytes (needs {self.geometry.page_bytes}) or a digest of {len(out)} bytes "
                f"(needs {self.nbytes}) is too short"
            )
        return page_words(self.geometry, exact), out[: self.nbytes]


class Digests(Protocol):
    """Digests of one form, of pages of one model."""

    @property
    def shape(self) -> DigestShape: ...

    @property
    def weights(self) -> Floats:
        """`[layers, kv_heads]`, 1 on average: how much a KV head's opinion counts (`tierkv.prefetch.opinions`)."""
        ...

    def write(self, exact: Bytes, count: int, out: Bytes) -> None:
        """Fill `out` (`shape.nbytes` long; every byte is written) from a page's exact bytes, its first `count` tokens.

        Raises:
            ValueError: as `DigestShape.checked`.
        """
        ...

    def reference_write(self, exact: Bytes, count: int, out: Bytes) -> None:
        """The same in numpy."""
        ...

    def log_mass(
        self, digest: Bytes, layer: int, query: Doubles, count: int, scale: float, cap: float
    ) -> Doubles:
        """Estimates `[kv_heads, n]` for queries `[kv_heads, n, head_dim]` at one of the page's layers that are told
        about, of logits `scale * q.k` or, with a `cap`, `cap * tanh(scale * q.k / cap)`: what kernels compute.
        """
        ...


class DigestForm(Protocol):
    @property
    def name(self) -> str: ...

    def shape(self, geometry: Geometry, layers: int) -> DigestShape:
        """Of digests of the last `layers` layers; of all if `layers` is 0, negative or more than there are."""
        ...

    def state_floats(self, geometry: Geometry) -> int: ...

    def of(self, geometry: Geometry, layers: int, state: Floats) -> Digests:
        """Raises `ValueError`: the state has not `state_floats` values."""
        ...


def digest_shape(geometry: Geometry, layers: int, record_bytes: int) -> DigestShape:
    """As `DigestForm.shape`."""
    return DigestShape(
        geometry, layers if 0 < layers <= geometry.num_layers else geometry.num_layers, record_bytes
    )


__all__ = ["DigestForm", "DigestShape", "Digests", "digest_shape"]
