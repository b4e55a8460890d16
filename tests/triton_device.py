"""Device kernels under test: on a GPU where there is one, else in triton's interpreter (`tests/conftest.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="device kernels need triton: pip install triton")

from tierkv.triton_setup import interpreting


def mend() -> None:
    """Interpreters before triton 3.8 make a loop bound of a one-element array in a way that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = mended


if interpreting():
    mend()
elif not torch.cuda.is_available():
    pytest.skip("device kernels need a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")
