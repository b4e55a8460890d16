"""The figures of one form: what `out/quant.json` holds a list of. The package says what each means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tierkv.benchmarks.pairs import Figures
from tierkv.benchmarks.quant.quality import Loss
from tierkv.benchmarks.quant.speed import Speed
from tierkv.study.memdecay.statistics import bootstrap

if TYPE_CHECKING:
    from tierkv.benchmarks.quant.facts import Facts


class Timed(NamedTuple):
    """A form's bits and speed on pages of one geometry."""

    bits_per_value: float
    speed: Speed
    in_place: Figures | None  # of attention


class EightB(msgspec.Struct, frozen=True):
    bits_per_value: float
    encode_gbps: float
    decode_gbps: float
    encode_memcpy: float
    decode_memcpy: float
    attention_ms: float | None
    attention_exact_ms: float | None
    attention_ratio: float | None


class Run(msgspec.Struct, frozen=True):
    """What all records share."""

    command: str
    date: str
    model: str
    machine: dict[str, object]
    context: list[int]  # tokens of each input
    sinks: int
    recent: int
    forced: int
    attention_tokens: int
    inputs: list[str]
    calibration: list[str]
    skipped: dict[str, str]
    facts_exact: int | None = None  # over the exact cache


class Record(msgspec.Struct, frozen=True):
    codec: str
    bits_per_value: float
    kl: float
    top1: float
    dnll: float
    attn_error: float
    encode_gbps: float
    decode_gbps: float
    peer: bool
    note: str
    kl_low: float
    kl_high: float
    top1_low: float
    top1_high: float
    dnll_low: float
    dnll_high: float
    attn_error_low: float
    attn_error_high: float
    kl_ratio: float
    kl_ratio_low: float
    kl_ratio_high: float
    kl_wins: int
    encode_memcpy: float
    decode_memcpy: float
    attention_ms: float | None
    attention_exact_ms: float | None
    attention_ratio: float | None
    attn_error_by_layer: list[float]
    kl_by_input: dict[str, float]
    eight_b: EightB | None
    run: Run
    facts: int | None = None
    facts_asked: int | None = None
    facts_missed: dict[str, str] | None = None


class Estimate(NamedTuple):
    """Over inputs; `low` and `high` bound it at 95%."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Estimate:
    each = np.array(values)
    return Estimate(float(each.mean()), *bootstrap(values, lambda drawn: float(each[drawn].mean())))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Of the means; the same inputs are drawn for both."""
    top, bottom = np.array(ours), np.array(theirs)

    def of(drawn: Sequence[int] | slice) -> float:
        return float(top[drawn].sum() / bottom[drawn].sum())

    return Estimate(of(slice(None)), *bootstrap(ours, of))


def record(
    name: str, peer: bool, note: str, losses: Sequence[Loss], baseline: Sequence[Loss], here: Timed,
    eight_b: Timed | None, run: Run, known: Facts | None = None,
) -> Record:  # fmt: skip
    """`losses` and `baseline` are by input, in the order of `run.inputs`."""
    kl, theirs = [loss.kl for loss in losses], [loss.kl for loss in baseline]
    layers: NDArray[np.float64] = np.array([loss.attn_error for loss in losses])
    found = {
        "kl": mean(kl),
        "top1": mean([loss.top1 for loss in losses]),
        "dnll": mean([loss.dnll for loss in losses]),
        "attn_error": mean(layers.mean(1).tolist()),
        "kl_ratio": ratio(kl, theirs),
    }
    figures: dict[str, object] = {}
    for key, estimate in found.items():
        figures |= {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
    figures |= {
        "codec": name,
        "peer": peer,
        "note": note,
        "kl_wins": sum(a < b for a, b in zip(kl, theirs, strict=True)),
        "attn_error_by_layer": layers.mean(0).tolist(),
        "kl_by_input": dict(zip(run.inputs, kl, strict=True)),
        "eight_b": _timed(eight_b) if eight_b else None,
        "run": run,
    }
    if known is not None:
        for key in ("facts", "facts_asked", "facts_missed"):
            figures[key] = getattr(known, key)
    return msgspec.convert(figures | _timed(here), Record)


def _timed(one: Timed) -> dict[str, float | None]:
    encode, decode, attended = one.speed.encode, one.speed.decode, one.in_place
    return {
        "bits_per_value": one.bits_per_value,
        "encode_gbps": encode["ours"],
        "decode_gbps": decode["ours"],
        "encode_memcpy": encode["ratio"],
        "decode_memcpy": decode["ratio"],
        "attention_ms": attended["ours"] if attended else None,
        "attention_exact_ms": attended["peer"] if attended else None,
        "attention_ratio": attended["ratio"] if attended else None,
    }
