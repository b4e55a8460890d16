"""How kernels are compiled and which threads run them: import `kernel` from here, never `numba.njit`.

numba's fallback threading layer (`workqueue`) aborts the process when two threads call parallel kernels, which a
worker (model thread, client thread) and the daemon (mover, loop) both do. So the `omp` layer is pinned here, before
the first kernel can launch it, and `ensure_threading_layer` checks it at start.

OpenMP threads do not survive `fork`: start child processes that run kernels with `spawn`.

Compiled code is cached on disk under a hash of the kernel's own file. Since a kernel's helpers from other files are
compiled into it, the hash here covers them and the constants too: editing a helper recompiles every kernel that
uses it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Protocol, TypeVar, cast

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from tierkv.errors import ConfigError

THREADING_LAYER = "omp"

numba.config.THREADING_LAYER = THREADING_LAYER

FASTMATH = frozenset({"nsz", "arcp", "contract", "afn", "reassoc"})
"""Fast math that may reorder sums, so that reductions vectorize, but still honours infinities and NaN."""

SHARED_WORK = 24_576
"""Pages times query heads times channels below which a kernel stays on one core: about 40 us (measured), in which a
sleeping thread has hardly woken.
"""

F = TypeVar("F", bound=Callable[..., object])


def kernel(*, parallel: bool = False, fastmath: bool = False, inline: bool = False) -> Callable[[F], F]:
    """Compile a function to machine code: cached on disk, and run without the GIL.

    Args:
        parallel: spread `numba.prange` loops over all cores.
        fastmath: let sums be reordered (`FASTMATH`); leave off where results must agree bit for bit.
        inline: put the body into calling kernels (for small helpers in inner loops).
    """
    compiler = numba.njit(
        cache=True,
        nogil=True,
        parallel=parallel,
        error_model="numpy",
        fastmath=set(FASTMATH) if fastmath else False,
        inline="always" if inline else "never",
    )

    def decorate(function: F) -> F:
        compiled = compiler(function)
        cache = _cache_file(compiled)
        if cache is not None and isinstance(function, FunctionType):
            digest = hashlib.sha256(cache._source_stamp)
            for part in _helper_stamps(function):
                digest.update(part)
            cache._source_stamp = digest.digest()
        return cast(F, compiled)

    return decorate


class _CacheFile(Protocol):
    _source_stamp: bytes


def _cache_file(kernel: object) -> _CacheFile | None:
    """Where numba keeps the freshness stamp of a kernel's cache (it has no public way to extend one)."""
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)


def _helper_stamps(function: FunctionType) -> Iterator[bytes]:
    """What identifies the kernels, intrinsics and constants that `function` takes from its module, in name order."""
    for name in sorted(function.__code__.co_names):
        helper = function.__globals__.get(name)
        if isinstance(helper, Dispatcher):
            cache = _cache_file(helper)
            yield cache._source_stamp if cache is not None else b""
        elif isinstance(helper, np.ndarray):
            yield helper.tobytes()
        elif isinstance(helper, int | float | tuple | np.generic):
            yield repr(helper).encode()
        elif hasattr(helper, "_defn"):  # an intrinsic: its module's file
            source = getattr(sys.modules.get(helper.__module__), "__file__", None)
            yield Path(source).read_bytes() if source else b""


def thread_count() -> int:
    """Threads of a parallel kernel: the cores this process may run on, or `NUMBA_NUM_THREADS`."""
    return int(numba.config.NUMBA_NUM_THREADS)


def ensure_threading_layer() -> None:
    """Start the kernel threads and check that they are OpenMP's. Call it once at start; later calls are cheap.

    Raises:
        ConfigError: OpenMP cannot be loaded, or kernels ran on another layer before this module was imported.
    """
    torch = sys.modules.get("torch")
    torch_threads = torch.get_num_threads() if torch is not None else 0
    try:
        numba.set_num_threads(thread_count())  # launches the layer
        layer = numba.threading_layer()
    except (ImportError, ValueError) as problem:
        raise ConfigError(
            f"numba's OpenMP threads cannot start ({problem}). Install libgomp "
            "(Debian and Ubuntu: `apt-get install libgomp1`; Fedora: `dnf install libgomp`)."
        ) from problem
    if torch is not None and torch.get_num_threads() != torch_threads:
        torch.set_num_threads(torch_threads)  # both may share one OpenMP, and a launch resets its count
    if layer != THREADING_LAYER:
        raise ConfigError(
            f"numba's parallel kernels already run on the {layer!r} layer, which is not safe with several threads. "
            "Import tierkv before the first parallel kernel runs, or set NUMBA_THREADING_LAYER=omp."
        )


__all__ = ["FASTMATH", "SHARED_WORK", "THREADING_LAYER", "ensure_threading_layer", "kernel", "thread_count"]
