"""Attention over pages. `get` makes an implementation of `contract.PagedAttention`."""

from __future__ import annotations

from tierkv.attention.contract import (
    Attended,
    Cold,
    ColdPages,
    ColdSeen,
    PagedAttention,
    Pages,
    PoolView,
    Sums,
)
from tierkv.errors import ConfigError

NAMES = ("reference", "cpu", "triton")


def get(name: str = "cpu") -> PagedAttention:
    """A new instance of the implementation `name`.

    Raises:
        ConfigError: there is no such implementation, the kernels' threads cannot start, or triton is not installed.
    """
    if name == "cpu":
        from tierkv.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "reference":
        from tierkv.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "triton":
        from tierkv.attention.triton_attention import TritonAttention

        return TritonAttention()
    raise ConfigError(f"attention {name!r} is not one of {', '.join(NAMES)}")


__all__ = [
    "NAMES",
    "Attended",
    "Cold",
    "ColdPages",
    "ColdSeen",
    "PagedAttention",
    "Pages",
    "PoolView",
    "Sums",
    "get",
]
