"""Device kernels compile to machine code of a Hopper GPU, without one: what the interpreter does not check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="device kernels need triton: pip install triton")

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import triton.language as tl
from tierkv.attention import triton_kernels as attention
from tierkv.attention.triton_klt import attend_klt
from tierkv.quant import klt_triton_kernels as klt, rotated_triton_kernels as pages
from tierkv.triton_setup import least_columns

BYTES, LONGS, INTS, FLOATS = "*u8", "*i64", "*i32", "*fp32"
TYPES = dict(
    exact="*bf16", query="*bf16", pool="*bf16", packed=BYTES, sources=LONGS, targets=LONGS, offsets=LONGS,
    counts=INTS, flags=INTS, items=INTS, spans=INTS, blocks=INTS, channels=INTS, limit="fp32", scale="fp32",
    layer="i32", pages="i32",
)

def check(kernel, warps, **constants):
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else TYPES.get(n, FLOATS) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    source = ASTSource(kernel, types, {(names.index(n),): value for n, value in constants.items()}, aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"], kernel
    assert compiled.metadata.shared <= 227 * 1024, (kernel, compiled.metadata.shared)

DIM = 128
page = dict(LAYERS=32, HEADS=8, TOKENS=16, DIM=DIM)
for side in (0, 1):
    tile = dict(page, SIDE=side, KEY_BITS=3, ITEM=2, GROUP=4, CHUNK=32)
    check(pages.encode_side, 4, **tile, QUARTER=DIM // 4)
    check(pages.decode_side, 4, **tile, WIDTH=DIM)
tile = dict(HEADS=8, SHARE=4, TOKENS=16, DIM=DIM, PAGES=4)
check(attention.attend_exact, 4, **tile, ROWS=16, MASS=True, OPERAND=tl.bfloat16, ITEM=2, WIDTH=DIM)
for key_bits in (2, 3):
    form = dict(tile, ROWS=least_columns(), MASS=False, LAYERS=32, QUARTER=DIM // 4, KEY_BITS=key_bits)
    check(attention.attend_packed, 2, **form)
for side in (0, 1):
    tile = dict(HEADS=8, TOKENS=16, DIM=DIM, SIDE=side, ITEM=2, PAGES=4, WIDTH=DIM, CHUNK=32)
    check(klt.encode_side, 8, **tile)
    check(klt.decode_side, 8, **tile)
tile = dict(HEADS=8, SHARE=4, TOKENS=16, DIM=DIM, PAGES=4)
check(attend_klt, 2, **tile, ROWS=least_columns(), MASS=True, QUARTER=DIM // 4)
for matrix in (0, DIM * DIM):
    tile = dict(HEADS=8, SHARE=4, DIM=DIM, MATRIX=matrix, WIDTH=DIM, SLICE=32)
    check(attention.prepare_queries, 4, **tile)
    check(attention.merge_items, 4, **tile, BLOCK=16)
print("compiled")
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    program = tmp_path / "compile_kernels.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "compiled\n", done.stderr[-4000:]
