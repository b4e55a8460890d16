"""What a decode step costs, by context and batch: `tierkv bench decode`.

Every arm holds the same prompt and then takes the same tokens, one step each in turn, in one process with one set of
weights (SmolLM2-135M, float32):

- `tierkv-exact`: bfloat16 pages (or `--pages float32`), all of them exact in HBM
- `tierkv-25`: at most a quarter of those bytes in HBM, the rest low-bit or in host memory (12 pages at least)
- `dynamic`: transformers' `DynamicCache` with sdpa; `eager`: the same with eager attention
- `hqq2`, `quanto2`: transformers' `QuantizedCache`, 2 bits; `offloaded`: its offloaded `DynamicCache`

and at batch 1 also

- `tierkv-k1`, `tierkv-k8`, `tierkv-unobserved`: as `tierkv-exact`, observing every step, every eighth, none
- `tierkv-20`: as `tierkv-25` with a fifth, which is less than `hqq2` holds
- `tierkv-fixed`: a budget of 512 exact tokens, whatever the context

K/V come from one reading of the longest context, whose first tokens are the shorter contexts. The daemon is a process
of its own. Times are wall times of whole forwards, on all cores.

`out/decode.json` is a list of records:

- `context` (tokens before the first step), `batch`, `arm`
- `ms_per_token`: a step's time, which brings each row one token: median over blocks of 8 steps, so that what only some
  steps do (an observation) is in it
- `ratio_to_dynamic`, its quartiles `ratio_low` and `ratio_high`, and `pairs`: medians of ratios, block by block where
  tierkv is one of the two, else step by step; `ratio_to`: the same to each other arm of the same run
- `ms_at_64`: its step at 64 tokens, taken in turn with the others; `kv_ms`: what a step takes beyond that, block by
  block; `kv_ratio_to_dynamic`: of `kv_ms`
- `kv_bytes`: K/V bytes held, all tensors of a cache counted, exact residual, scales and zeros included; of tierkv the
  bytes of HBM that its sessions hold; `host_bytes`: in host memory besides
- `attended_bytes`: K/V bytes that a step reads in the form in which they lie
- `peak_bytes`: most resident memory that one step adds beyond what it leaves (null where Linux does not tell)
- `fill_seconds`: to take over the K/V (for a quantized cache: to pack them)
- `packing_ms`: of a cache that packs all its tokens anew every so many, that time spread over them, which
  `ms_per_token` leaves out
- of `tierkv`: `pages` by kind, `daemon_ms` and `blocked_ms` a step: in the session's calls, and of that without CPU
- `note`

`out/decode-run.json` has what all share (`command`, `date`, `model`, `machine`, `pages`, `codec`, `steps`, `skipped`),
`more` (records of the other arms), `prefill` (seconds through pages beside `dynamic`, as *figures* of `make bench`),
`scaling` (a line through `tierkv-exact`: ms by attended bytes) and `trace`: the file of the k=8 steps and their calls.
"""

from __future__ import annotations

from typing import Any

DYNAMIC = "dynamic"
EXACT, QUARTER = "tierkv-exact", "tierkv-25"
ARMS = (EXACT, QUARTER, DYNAMIC, "eager", "hqq2", "quanto2", "offloaded")
"""Arms of `out/decode.json`."""

OBSERVED, UNOBSERVED = {"tierkv-k1": 1, "tierkv-k8": 8}, "tierkv-unobserved"
FIXED, FIFTH = "tierkv-fixed", "tierkv-20"
MORE = (*OBSERVED, UNOBSERVED, FIFTH, FIXED)
"""Arms of `out/decode-run.json`."""

BASE = 64
"""Tokens of the step that costs nearly no attention."""

AT_BASE = f" at {BASE}"
"""Behind an arm's name: the same at `BASE` tokens."""


def run(quick: bool = False) -> list[dict[str, Any]]:
    """The short form, for `make bench`: two contexts, batch 1."""
    from tierkv.benchmarks.decode import short  # torch and transformers: seconds

    return short.run(quick)
