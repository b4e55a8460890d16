"""Arrays by address: how one kernel call reads the columns of thousands of sessions.

A kernel that is called for each session costs microseconds a call, and one array of all sessions' columns would have
to be moved whenever it grows. So each session keeps arrays of its own, and a kernel gets their addresses in a table.
An address is good while its array lives and is not resized: gather them for one call, and keep them for none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from tierkv.numba_setup import kernel


def address_of(array: NDArray[Any]) -> int:
    """Of the first element of a C-contiguous array."""
    address: int = array.__array_interface__["data"][0]
    return address


def _pointer(element: Any, name: str) -> Any:
    """An intrinsic int64 -> pointer to `element`."""

    def typer(typingctx: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return (types.CPointer(element)(types.int64), emit) if address == types.int64 else None

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


_int8_pointer = _pointer(types.int8, "_int8_pointer")
_int64_pointer = _pointer(types.int64, "_int64_pointer")
_float32_pointer = _pointer(types.float32, "_float32_pointer")


@kernel()
def int8_at(address: int, length: int) -> NDArray[np.int8]:
    """In kernels: the `length` int8 that begin at `address`."""
    array: NDArray[np.int8] = carray(_int8_pointer(address), (length,))
    return array


@kernel()
def int64_at(address: int, length: int) -> NDArray[np.int64]:
    """In kernels: the `length` int64 that begin at `address`."""
    array: NDArray[np.int64] = carray(_int64_pointer(address), (length,))
    return array


@kernel()
def float32_at(address: int, length: int) -> NDArray[np.float32]:
    """In kernels: the `length` float32 that begin at `address`."""
    array: NDArray[np.float32] = carray(_float32_pointer(address), (length,))
    return array
