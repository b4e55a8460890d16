"""triton is optional: nothing imports it but the device kernels, and they say what to install."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_tierkv_its_codecs_and_its_attention_import_without_triton() -> None:
    done = run(WITHOUT_TRITON + "import tierkv, tierkv.quant, tierkv.attention; tierkv.quant.get('k3v2')")
    assert done.returncode == 0, done.stderr


def test_device_kernels_say_that_triton_is_missing_and_what_to_install() -> None:
    for module in ("tierkv.quant.rotated_triton", "tierkv.attention.triton_decode"):
        done = run(WITHOUT_TRITON + f"import {module}")
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(
            "tierkv.errors.ConfigError: device kernels need triton, which is not installed"
        )
        assert 'pip install ".[cuda]"' in last
