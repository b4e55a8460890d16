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
from tierkv.attention import triton_kernels as attention, triton_pages as tokens
from tierkv.attention.triton_estimates import estimate_deviations, estimate_transforms
from tierkv.attention.triton_klt import attend_klt
from tierkv.attention.triton_masses import add_masses
from tierkv.quant import klt_triton_kernels as klt, rotated_triton_kernels as pages
from tierkv.triton_setup import least_columns

BYTES, LONGS, INTS, FLOATS = "*u8", "*i64", "*i32", "*fp32"
TYPES = dict(
    exact="*bf16", query="*bf16", pool="*bf16", packed=BYTES, sources=LONGS, targets=LONGS, offsets=LONGS,
    counts=INTS, flags=INTS, items=INTS, spans=INTS, blocks=INTS, channels=INTS, limit="fp32", scale="fp32",
    layer="i32", pages="i32", rows=LONGS, order=LONGS, token_starts=LONGS, digests=LONGS, slots=INTS, start="i32",
)

def check(kernel, warps, types=None, **constants):
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else (types or {}).get(n, TYPES.get(n, FLOATS)) for n in names}
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
    for span in (1, 32):
        check(pages.decode_side, 4, **tile, WIDTH=DIM, SPAN=span)
tile = dict(HEADS=8, SHARE=4, TOKENS=16, DIM=DIM, PAGES=4)
tile["CAP"] = 0.0
for mass, by_head in ((0, False), (1, False), (2, True)):
    exact = dict(tile, ROWS=16, ITEM=2, WIDTH=DIM, LAYERS=32, MASS=mass, BY_HEAD=by_head)
    check(attention.attend_exact, 4, **exact, OPERAND=tl.bfloat16, BITS=0)
    for bits in (4, 8):
        check(attention.attend_exact, 4, {"pool": BYTES}, **exact, OPERAND=tl.float32, BITS=bits)
for key_bits, mass, by_head in ((2, 0, False), (3, 0, False), (3, 2, True)):
    form = dict(tile, ROWS=least_columns(), LAYERS=32, QUARTER=DIM // 4, KEY_BITS=key_bits)
    check(attention.attend_packed, 2, **form, MASS=mass, BY_HEAD=by_head)
for side in (0, 1):
    tile = dict(HEADS=8, TOKENS=16, DIM=DIM, SIDE=side, ITEM=2, PAGES=4, WIDTH=DIM, CHUNK=32)
    check(klt.encode_side, 8, **tile)
    check(klt.decode_side, 8, **tile)
tile = dict(HEADS=8, SHARE=4, TOKENS=16, DIM=DIM, PAGES=4, CAP=30.0)
for mass, by_head in ((1, False), (2, True)):
    check(attend_klt, 2, **tile, ROWS=least_columns(), MASS=mass, BY_HEAD=by_head, QUARTER=DIM // 4)
for matrix in (0, DIM * DIM):
    tile = dict(HEADS=8, SHARE=4, DIM=DIM, MATRIX=matrix, WIDTH=DIM, SLICE=32)
    check(attention.prepare_queries, 4, **tile)
    check(attention.merge_items, 4, **tile, BLOCK=16, SINKS=matrix > 0, CODED=matrix == 0)
head = dict(HEADS=8, TOKENS=16, DIM=DIM, WIDTH=DIM, ITEM=2)
for pool in ("*bf16", "*fp16", "*fp32"):
    given = dict(pool=pool, keys="*fp32", values="*bf16") | {n: "i32" for n in tokens.write_tokens.arg_names[6:12]}
    assert set(given) >= {"key_token", "value_channel"}
    check(tokens.write_tokens, 1, given, **head)
for bits, pool in ((0, "*bf16"), (4, BYTES), (8, BYTES)):
    check(tokens.read_pages, 4, dict(pool=pool, out="*bf16"), **head, LAYERS=32, BITS=bits)
for of_pages, of_tokens in ((True, True), (False, True)):
    check(add_masses, 4, QUERY_HEADS=32, TOKENS=16, BLOCK=16, OF_PAGES=of_pages, OF_TOKENS=of_tokens)
for cap in (0.0, 30.0):
    given = dict(query=FLOATS, pool=BYTES)
    check(estimate_deviations, 4, given, HEADS=8, COLUMNS=16, DIM=DIM, WIDTH=DIM, BLOCK=16, CAP=cap)
    given = dict(rows=LONGS, places=INTS, masks=INTS, pool=BYTES)
    tile = dict(HEADS=8, COLUMNS=16, DIM=DIM, WIDTH=DIM, STEP=16, SLOTS=16, SIZE=32, BLOCK=4)
    check(estimate_transforms, 4, given, **tile, CAP=cap)
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
