"""Before any test imports triton, which decides then: where there is no GPU, its kernels run in its interpreter."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
