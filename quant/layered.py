"""A low-bit form that differs by layer: most layers in one codec, some in others. Named `k3v2,0=exact,-1=exact`.

A packed page is one block a layer, one after the other. A layer's block is what its codec makes of a page of that layer
alone, padded with zeros to 64 bytes, so that every block is as aligned as the page. The state of all is the layers'
states, one after the other. Kernels never see it: they are told the layer's own codec and where its block lies
(`layer_block`), and read it as a page of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.quant.contract import Bytes, Codec, Floats, LayerBlock
from tierkv.quant.moments import Moments

BLOCK_ALIGNMENT = 64
"""Bytes; also that of pages in pools."""


class _Layer(NamedTuple):
    """One layer: its codec, and its bytes in the packed page, in the exact one, and its floats in the state."""

    codec: Codec
    geometry: Geometry
    packed: slice
    exact: slice
    state: slice


class Layered(Codec):
    """`default` for every layer but those of `exceptions`; negative layers count from the last one.

    Which layers a model has is known only with a geometry: until then an exception may name any.
    """

    code: ClassVar[int] = 0  # no kernel dispatches on it

    def __init__(self, default: Codec, exceptions: Mapping[int, Codec]) -> None:
        self.name = spell(default.name, {layer: codec.name for layer, codec in exceptions.items()})  # type: ignore[misc]  # its own, unlike a plain codec's
        self.takes_moments = any(codec.takes_moments for codec in (default, *exceptions.values()))  # type: ignore[misc]
        self._default = default
        self._exceptions = dict(exceptions)

    def page_bytes(self, geometry: Geometry) -> int:
        return int(self._layers(geometry)[-1].packed.stop)

    def state_floats(self, geometry: Geometry) -> int:
        return int(self._layers(geometry)[-1].state.stop)

    def layer_block(self, geometry: Geometry, layer: int) -> LayerBlock:
        part = self._layers(geometry)[layer]
        return LayerBlock(part.codec.kernel_code(part.geometry), part.packed.start, part.state, 0, 1)

    def members(self) -> tuple[Codec, ...]:
        return tuple(dict.fromkeys((self._default, *self._exceptions.values())))

    def fit_state(self, geometry: Geometry, pages: Sequence[Bytes], counts: Sequence[int]) -> Floats:
        parts = [
            part.codec.fit_state(part.geometry, [page[part.exact] for page in pages], counts)
            for part in self._layers(geometry)
        ]
        return np.concatenate(parts)

    def fit_moments(self, geometry: Geometry, moments: Moments) -> Floats:
        parts = []
        for layer, part in enumerate(self._layers(geometry)):
            own = Moments(*(field[layer : layer + 1] for field in moments))
            parts.append(part.codec.fit_moments(part.geometry, own))
        return np.concatenate(parts)

    def encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats, out: Bytes) -> None:
        for part, block in self._blocks(geometry, out):
            part.codec.encode(part.geometry, exact[part.exact], count, state[part.state], block)
            block[part.codec.page_bytes(part.geometry) :] = 0

    def decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats, out: Bytes) -> None:
        for part, block in self._blocks(geometry, packed):
            part.codec.decode(part.geometry, block, count, state[part.state], out[part.exact])

    def reference_encode(self, geometry: Geometry, exact: Bytes, count: int, state: Floats) -> Bytes:
        packed = np.zeros(self.page_bytes(geometry), np.uint8)
        for part, block in self._blocks(geometry, packed):
            told = part.codec.reference_encode(part.geometry, exact[part.exact], count, state[part.state])
            block[: told.size] = told
        return packed

    def reference_decode(self, geometry: Geometry, packed: Bytes, count: int, state: Floats) -> Floats:
        parts = [
            part.codec.reference_decode(part.geometry, block, count, state[part.state])
            for part, block in self._blocks(geometry, packed)
        ]
        return np.concatenate(parts)

    def _blocks(self, geometry: Geometry, packed: Bytes) -> Iterator[tuple[_Layer, Bytes]]:
        layers = self._layers(geometry)
        size = layers[-1].packed.stop
        if packed.size < size:
            raise ConfigError(
                f"a page of {self.name} takes {size} bytes here, and the buffer has {packed.size}"
            )
        for part in layers:
            yield part, packed[part.packed]

    def _layers(self, geometry: Geometry) -> tuple[_Layer, ...]:
        return _plan(self, geometry)

    def _plan(self, geometry: Geometry) -> tuple[_Layer, ...]:
        """Raises `ConfigError`: an exception names no layer of this model, or two name the same."""
        count = geometry.num_layers
        codecs = [self._default] * count
        named = dict[int, int]()
        for layer, codec in self._exceptions.items():
            if not -count <= layer < count:
                raise ConfigError(
                    f"{self.name} names layer {layer}, and this model has {count} (0 to {count - 1}, or -1 to -{count})"
                )
            place = layer % count
            if place in named:
                raise ConfigError(
                    f"{self.name} names layer {place} twice, as {named[place]} and as {layer}: this model has {count}"
                )
            named[place], codecs[place] = layer, codec
        single = replace(geometry, num_layers=1)
        packed = _spans(-(-codec.page_bytes(single) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT for codec in codecs)
        states = _spans(codec.state_floats(single) for codec in codecs)
        exact = _spans(single.page_bytes for _ in codecs)
        return tuple(
            _Layer(codec, single, *spans) for codec, *spans in zip(codecs, packed, exact, states, strict=True)
        )


@lru_cache(maxsize=64)
def _plan(codec: Layered, geometry: Geometry) -> tuple[_Layer, ...]:
    return codec._plan(geometry)


def _spans(sizes: Iterator[int]) -> list[slice]:
    """The places of things of these sizes that lie one after the other."""
    stops = list(accumulate(sizes))
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def spell(default: str, exceptions: Mapping[int, str]) -> str:
    """The name of a codec with exceptions: first layers, then those that are counted from the end."""
    order = sorted(exceptions, key=lambda layer: (layer < 0, layer))
    return ",".join([default, *(f"{layer}={exceptions[layer]}" for layer in order)])


def read(name: str, find: Callable[[str], Codec]) -> Layered:
    """The codec that `spell` named so; `find` gives plain codecs by name.

    Raises:
        ConfigError: it is not written so, or names a codec that `find` does not know.
    """
    default, *rest = name.split(",")
    exceptions = dict[int, Codec]()
    for pair in rest:
        layer, sign, codec = pair.partition("=")
        try:
            number = int(layer)
        except ValueError:
            sign = ""
        if not sign or number in exceptions:
            raise ConfigError(
                f"{pair!r} in {name!r} is not a layer's codec, or the second one of a layer; write LAYER=CODEC, for "
                "instance 0=exact"
            )
        exceptions[number] = find(codec)
    return Layered(find(default), exceptions)
