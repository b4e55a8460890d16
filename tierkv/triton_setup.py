"""How device kernels are compiled: import `kernel` and `tl`, triton's language, from here and never triton itself.

Only modules that hold device kernels import this one, so that tierkv works where triton is not installed.
Under `TRITON_INTERPRET=1`, set before the first import of triton, kernels run on CPU tensors in triton's interpreter.

Raises:
    ConfigError: (on import) triton is not installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tierkv.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        'device kernels need triton, which is not installed: pip install ".[cuda]" in a checkout of tierkv'
    ) from error


def kernel(function: Callable[..., object]) -> Any:
    """Compile a function for the device when it is first launched with its types and constants.

    Every `layer` and number of `pages` get the same code, where triton would compile anew for 0, 1 and multiples of 16.
    """
    varying = [name for name in ("layer", "pages") if name in inspect.signature(function).parameters]
    return triton.jit(function, do_not_specialize=varying)


def interpreting() -> bool:
    """Whether kernels run in the interpreter."""
    return bool(triton.knobs.runtime.interpret)


def require_device(device: torch.device) -> None:
    """Refuse a device that kernels cannot run on.

    Raises:
        ConfigError: it is not a CUDA device, and kernels are not interpreted.
    """
    if device.type != "cuda" and not interpreting():
        raise ConfigError(
            f"device kernels run on CUDA tensors, and these are on {device.type!r}; "
            "move them, or set TRITON_INTERPRET=1 before the start to try kernels on the CPU"
        )


def least_columns() -> int:
    """Columns that a product must have: a tensor core's 8, but 16 for compilers before triton 3.6."""
    major, minor, *_ = triton.__version__.split(".")
    return 8 if (int(major), int(minor)) >= (3, 6) else 16


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`: kernels' tiles have such sides."""
    return 1 << (value - 1).bit_length()


__all__ = ["interpreting", "kernel", "least_columns", "next_power_of_two", "require_device", "tl"]
