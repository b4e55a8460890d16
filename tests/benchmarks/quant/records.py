"""Records with figures of no meaning but those that are named."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierkv.benchmarks.quant import records, table


def record_of(
    name: str, bits: float, kl: float, skipped: dict[str, str] | None = None, facts: int | None = None
) -> records.Record:
    fast = {"encode_gbps": 1.0, "decode_gbps": 1.0, "encode_memcpy": 0.1, "decode_memcpy": 0.1}
    unread = {"attention_ms": None, "attention_exact_ms": None, "attention_ratio": None}
    pairs = ("kl", "top1", "dnll", "attn_error", "kl_ratio")
    bounds = {f"{key}_{end}": kl for key in pairs for end in ("low", "high")}
    run = {
        "command": "", "date": "", "model": "a model", "machine": {}, "context": [928], "sinks": 16, "recent": 80,
        "forced": 128, "attention_tokens": 4096, "inputs": ["prose: types"], "calibration": [],
        "skipped": skipped or {}, "facts_exact": None if facts is None else 24,
    }  # fmt: skip
    return msgspec.convert(
        {
            "codec": name, "bits_per_value": bits, "kl": kl, "top1": 1.0, "dnll": 0.0, "attn_error": 0.0,
            "peer": True, "note": "", "kl_ratio": 1.0, "kl_wins": 0, "attn_error_by_layer": [0.0],
            "kl_by_input": {"prose: types": kl},
            "eight_b": {"bits_per_value": bits, **fast, **unread}, "run": run,
            "facts": facts, "facts_asked": None if facts is None else 24, **fast, **unread, **bounds,
        },
        records.Record,
    )  # fmt: skip


def show(found: Sequence[records.Record], width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(table.render(found))
    return captured.get()
