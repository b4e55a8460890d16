"""How much low-bit forms of K/V lose, and how fast they are, on K/V of a real model: `tierkv bench quant`.

**Quality.** SmolLM2-135M (float32) reads each report input once. The first `SINKS` and the last `RECENT` tokens of that
context stay exact; all others are encoded to packed bytes and decoded again. Then `FORCED` further tokens of the text
run in one forward over the exact K/V, and over what each form gives back:

- `kl`: KL(exact || form) of the next-token distributions, in nats, mean over tokens
- `top1`: how often both hold the same token likeliest
- `dnll`: how much worse the text's own next token is predicted, nats
- `attn_error`: |out' - out|^2 / |out|^2 of a layer's attention for the exact queries, mean over layers

Each has a 95% interval (`_low`, `_high`) from inputs drawn anew. Inputs differ inside the span that is packed, and what
a form is fitted on (`calibrate.py`) is other texts (`inputs.py`).

**Speed.** GB/s of exact bytes on one thread, each sample beside a memcpy of the same bytes: Gaussian K/V in float32
pages of this model, and in bfloat16 pages of one layer of an 8B model.

`out/quant.json` is a list of records, one a form: `codec`, `bits_per_value` (all metadata counted), `kl`, `top1`,
`dnll`, `attn_error`, `encode_gbps`, `decode_gbps`, and

- `peer`: not of `tierkv.quant`; `note`: what is particular about it
- `kl_ratio`: its mean KL over that of KIVI-G32, the same inputs drawn for both; `kl_wins`: inputs on which it is lower
- `attn_error_by_layer`, `kl_by_input`
- `encode_memcpy`, `decode_memcpy`: median ratio to memcpy; `attention_ms` and `attention_exact_ms` a token at
  `attention_tokens` tokens in place, all layers, and `attention_ratio`: packed over exact (a form that attention cannot
  read in place has none of these, null)
- `facts`, `facts_asked`, `facts_missed`: with `--facts`, the demo's questions over caches whose old pages are all
  packed (`facts.py`): right answers, questions, how wrong answers begin; `run.facts_exact`: over the exact cache
- `eight_b`: bits, speeds and ratios for pages of the 8B geometry, null where they cannot be packed
- `run`: what all records share: command, date, model, machine, `inputs`, `calibration`, `skipped`
"""

SINKS = 16
RECENT = 80
FORCED = 128
