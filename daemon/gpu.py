"""One GPU of this machine as a daemon uses it: its pools, pinning for it, and what carries moves there.

Importing this module brings no kernels; `open_gpu` imports torch, seconds that an owner without a GPU need not pay.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tierkv.daemon.cuda_driver import CudaDriver, Driver
from tierkv.daemon.cuda_pool import CudaPools, RegisteredHost
from tierkv.daemon.pools import BytePool, Bytes
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.daemon.carriers import Carrier
    from tierkv.daemon.forms import Forms
    from tierkv.device import Device

CPU = "cpu"
"""The setting `device` without a GPU."""

_NAME = re.compile(r"cuda(?::([0-9]{1,3}))?")


def device_index(name: str) -> int | None:
    """The ordinal of `cuda:1` (of `cuda`: 0), None of `cpu`. Raises `ValueError` that says what is understood."""
    if name == CPU:
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError("is no device; write cpu, cuda or for instance cuda:1")
    return int(match[1] or 0)


class Gpu:
    """`index` is the ordinal in this process; `device` is the same one as torch has it."""

    def __init__(self, driver: Driver, index: int, device: Device) -> None:
        self.uuid = driver.uuid(index)
        self.pools = CudaPools(driver, index)
        self._driver, self._index, self._device = driver, index, device

    def pin(self, data: Bytes) -> RegisteredHost:
        """Raises `ConfigError`."""
        return RegisteredHost(self._driver, self._index, data)

    def carrier(self, pools: Mapping[str, BytePool], forms: Forms) -> Carrier:
        """Moves between `hbm`, a pool of this GPU, and pinned `host`."""
        from tierkv.daemon.device_carrier import DeviceCarrier

        return DeviceCarrier(pools, forms, self._device)


def find_gpu(name: str) -> tuple[Driver, int] | None:
    """The driver and the ordinal of the setting `device`, None for `cpu`; quick. Raises `ConfigError`."""
    index = device_index(name)
    if index is None:
        return None
    driver = CudaDriver()
    if (count := driver.device_count()) <= index:
        seen = f"{count} GPU{'' if count == 1 else 's'}, numbered from 0" if count else "no GPU"
        raise ConfigError(f"device = {name!r}, and this process sees {seen}; check CUDA_VISIBLE_DEVICES")
    return driver, index


def open_gpu(name: str) -> Gpu | None:
    """The GPU that the setting `device` names, None for `cpu`.

    Raises:
        ConfigError: this machine has none of that number, or what serves it is not installed.
    """
    found = find_gpu(name)
    if found is None:
        return None
    driver, index = found
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"device = {name!r} needs triton, which is not installed: "
            'pip install ".[cuda]" in a checkout of tierkv'
        )
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {name!r}, and torch {torch.__version__} finds no CUDA device; install a build with CUDA"
        )
    from tierkv.device import CudaDevice

    return Gpu(driver, index, CudaDevice(index))
