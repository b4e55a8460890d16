"""Attention alone, one layer's call for one new token a row: `tierkv bench attention`.

Arms, over Gaussian K/V of SmolLM2-135M's and an 8B model's layers, by context and batch:

- `sdpa`: transformers' sdpa attention over dense float32 K/V; `sdpa-bfloat16`: over bfloat16
- `sdpa-repeated`: the KV heads repeated for all query heads first, as transformers does where it has a mask
- `eager`: transformers' eager attention (repeated heads, two matmuls, a softmax)
- `float32`, `bfloat16`: exact pages in place; each codec by its name: low-bit pages in place

Each call reads other memory than the one before: as many layers as make 64 MiB of dense K/V, one after the other. Wall
times on all cores, all arms in turn. Every paged arm is first compared with attention over what its page decodes to.

`out/attention.json` is a list of records: `model`, `context`, `batch`, `arm`, `ms_per_layer`, `ratio_to_sdpa` with its
quartiles `ratio_low` and `ratio_high` and `pairs`, `attended_bytes` (of a call, in the form they lie in), `gbps` (of
those bytes), `layers` (that took turns). Arms that cannot run here have none.
"""

SDPA = "sdpa"
PEERS = (SDPA, "sdpa-bfloat16", "sdpa-repeated", "eager")
EXACT_PAGES = ("float32", "bfloat16")
