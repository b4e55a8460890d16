"""Speed, each figure beside its peer in the same run.

`make bench`, or `python -m tierkv.benchmarks [request] [moves] [decode] [policy] [--quick]`, prints a table and writes
`out/bench.json`:

- `machine`: `cpu`, `cores`, `memory_bytes`, `python`, `torch`, `transformers`, `pyzmq`, `omp_wait_policy`, and
  `load_before` and `load_after` (one-minute load averages: what else the machine did).
- `request`, in microseconds: `ping` and `reserve`, each *figures* and `payload_bytes` (of the request).
- `moves`, in GB/s of exact bytes: `smollm2-135m` and `8b`, each with `hbm_to_host` (copied and given a checksum),
  `host_to_hbm` (verified and copied), `checksum` (alone), `k3v2` (packed within HBM); each *figures* and `page_bytes`.
- `decode`, a list by context, in milliseconds a token: `context` (tokens), `threads`, `omp_wait_policy`,
  `prefill_seconds` by arm, `exact` and `budget` (*figures*), `budget_pages` (`exact`, `low_bit`, `cold`)
  and `budget_hbm_bytes`; the whole of it is `tierkv bench decode` (`tierkv.benchmarks.decode`).
- `policy`, in milliseconds of CPU time, beside all scores anew in numpy: `one_session` of 1,000,000 tokens, scored and
  its coldest 1,000 pages chosen; of 10,000 sessions of 1,000 tokens `all_changed` and `one_in_100_changed`, scored, and
  `choice`, the coldest 1,000 pages chosen. Each *figures* and `sessions`, `tokens` (of each) and `pages` (in all).

*Figures* are `ours` and `peer` (medians), `ratio` (median of ours / peer, pair by pair), `ratio_low` and `ratio_high`
(its quartiles) and `pairs`. A ratio below 1 is good for times (request, decode, policy), above 1 for rates (moves).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

NAMES = ("request", "moves", "decode", "policy")


def measure(names: Sequence[str] = NAMES, quick: bool = False) -> dict[str, Any]:
    """Run benchmarks one after the other; the object of `out/bench.json`."""
    from tierkv.benchmarks.report import load, machine

    results: dict[str, Any] = {"machine": machine()}
    for name in names:
        results[name] = importlib.import_module(f"tierkv.benchmarks.{name}").run(quick)
    results["machine"]["load_after"] = load()
    return results


__all__ = ["NAMES", "measure"]
