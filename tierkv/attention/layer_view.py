"""A pool as kernels see it at one layer, whose low-bit blocks may be of a codec of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.attention.contract import PoolView
from tierkv.attention.online_softmax import Floats, Words

WORD = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


class Middle(NamedTuple):
    """Pages of the middle form: the pool, and what the fused kernels are told of them."""

    data: NDArray[np.uint8]
    code: int
    layer: int
    num_layers: int


class LayerView(NamedTuple):
    """What every kernel that reads pages is given, in this order.

    `words` are uint32 for float32 pages and uint16 for the half types. They and `packed` are the pool, from where the
    layer of a page at offset 0 would begin if it were the kernel's `layer`.
    """

    words: Words
    packed: NDArray[np.uint8]
    is_bfloat16: bool
    code: int
    state: Floats
    middle: Middle
    layer: int
    num_layers: int


def layer_view(pool: PoolView, layer: int) -> LayerView:
    """One layer of the pool's pages, of every form."""
    geometry, data = pool.geometry, np.asarray(pool.data)
    block = pool.codec.layer_block(geometry, layer)
    middle = (pool.middle or pool.codec).layer_block(geometry, layer)
    layer_words = geometry.values // geometry.num_layers
    return LayerView(
        data.view(WORD[geometry.dtype])[(layer - block.layer) * layer_words :],
        data[block.start :],
        geometry.dtype == "bfloat16",
        block.code,
        pool.codec_state[block.state],
        Middle(data[middle.start :], middle.code, middle.layer, middle.num_layers),
        block.layer,
        block.num_layers,
    )


class LayerViews:
    """The layers of one pool, made when first asked for: a pool stays the same object for many steps.

    Not to be shared by threads.
    """

    def __init__(self) -> None:
        self._pool: PoolView | None = None
        self._views: dict[int, LayerView] = {}

    def of(self, pool: PoolView, layer: int) -> LayerView:
        if pool is not self._pool:
            self._pool, self._views = pool, {}
        view = self._views.get(layer)
        if view is None:
            view = self._views[layer] = layer_view(pool, layer)
        return view


def unmarked(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same bytes, not marked read-only.

    A worker maps the host pool read-only. For such arrays numba would compile everything once more, and torch warns.
    The kernels that get this do not write to it, and the mapping itself stays protected.
    """
    data = np.asarray(data)
    return data if data.flags.writeable else np.asarray(_Unmarked(data))


class _Unmarked:
    """A uint8 array's memory, without its read-only mark."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        interface = data.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}
        self._keep = data
