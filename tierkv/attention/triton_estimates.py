"""What digests promise of cold pages, on a device: estimated log-masses (`tierkv.prefetch.digests` has the formula)."""

from __future__ import annotations

from tierkv.prefetch.digests import SCALES_BYTES
from tierkv.triton_setup import kernel, tl

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SCALES_BYTES = tl.constexpr(SCALES_BYTES)


@kernel
def estimate_pages(
    query: tl.tensor, pool: tl.tensor, numbers: tl.tensor, digests: tl.tensor, counts: tl.tensor, rows: tl.tensor,
    estimates: tl.tensor, pages: tl.tensor, start: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
) -> None:  # fmt: skip
    """One page and KV head: `estimates` `[HEADS * COLUMNS, pages]`, minus infinity where nothing is known.

    query: `[rows, HEADS * COLUMNS, DIM]`, the COLUMNS of a KV head together. pool, numbers: the pool in bytes and in
    float32. start: where the layer's records begin in a digest. digests: byte offsets, negative where there is none.
    """
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row, digest = tl.load(rows + page), tl.load(digests + page)
    there = digest >= 0
    record = (
        tl.maximum(digest, 0) + start + head * (_SCALES_BYTES + 2 * DIM)
    )  # in the pool, if of something else
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    mean_scale = tl.load(numbers + record // 4) * scale
    deviation_scale = tl.load(numbers + record // 4 + 1) * tl.abs(scale)
    place = pool + record + _SCALES_BYTES + channel
    mean = (tl.load(place, mask=inside, other=0).to(tl.int32) ^ 128) - 128  # two's complement
    deviation = tl.load(place + DIM, mask=inside, other=0).to(tl.float32)
    log_count = tl.log2(tl.load(counts + page).to(tl.float32)) * _LN_2
    bound = tl.sqrt(2.0 * log_count)
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        wanted = column < COLUMNS
        at = (row * HEADS + head) * COLUMNS + column
        q = tl.load(
            query + at[:, None] * DIM + channel[None, :], mask=wanted[:, None] & inside[None, :], other=0.0
        )  # fmt: skip
        spread = q * deviation[None, :]
        center = tl.sum(q * mean.to(tl.float32)[None, :], 1) * mean_scale
        sigma = tl.sqrt(tl.sum(spread * spread, 1)) * deviation_scale
        room = tl.full((BLOCK,), float("inf"), tl.float32)
        if CAP > 0:
            center = CAP - 2 * CAP / (tl.exp2(tl.minimum(center * (2 * _LOG2_E / CAP), 64.0)) + 1)
            bent = center / CAP
            sigma *= 1.0 - bent * bent
            room = CAP - center
        above = tl.where(sigma <= bound, 0.5 * sigma * sigma, bound * sigma - 0.5 * bound * bound)
        known = log_count + center + tl.minimum(above, room)
        finite = there & (tl.abs(known) < float("inf"))  # false for NaN
        known = tl.where(finite, known, float("-inf"))
        tl.store(estimates + (head * COLUMNS + column).to(tl.int64) * pages + page, known, mask=wanted)
