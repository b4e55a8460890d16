"""What digests promise of cold pages, on a device: estimated log-masses (`tierkv.prefetch.deviation` and
`tierkv.prefetch.transform` have the formulas).
"""

from __future__ import annotations

from tierkv.prefetch.deviation import SCALES_BYTES
from tierkv.prefetch.transform import NOTHING
from tierkv.triton_setup import kernel, tl

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SCALES_BYTES = tl.constexpr(SCALES_BYTES)
_NOTHING = tl.constexpr(NOTHING)


@kernel
def estimate_deviations(
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


@kernel
def estimate_transforms(
    turned: tl.tensor, common: tl.tensor, noise: tl.tensor, pool: tl.tensor, digests: tl.tensor, counts: tl.tensor,
    rows: tl.tensor, places: tl.tensor, masks: tl.tensor, sizes: tl.tensor, levels: tl.tensor, gains: tl.tensor,
    cosines: tl.tensor, estimates: tl.tensor, pages: tl.tensor, start: tl.tensor,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
) -> None:  # fmt: skip
    """As `estimate_deviations`, for one page and KV head, of records of SIZE bytes.

    turned: `[rows, HEADS * COLUMNS, DIM]`, queries along the axes; common, noise: `[rows, HEADS * COLUMNS]`, their
    product with the mean key and the variance of what codes lack, all scaled. places, masks, sizes:
    `[HEADS, SLOTS, DIM]`, of each coefficient the bit where its code begins, `2**bits - 1`, and its standard deviation.
    levels: by mask plus code. gains: by a record's first byte. cosines: `[SLOTS, SLOTS]`.
    """
    page, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row, digest = tl.load(rows + page), tl.load(digests + page)
    there = digest >= 0
    record = pool + tl.maximum(digest, 0) + start + head * SIZE
    first = tl.load(record).to(tl.int32)
    gain = tl.load(gains + first)
    count = tl.load(counts + page)
    log_count = tl.log2(count.to(tl.float32)) * _LN_2
    bound = tl.sqrt(2.0 * log_count)
    slot = tl.arange(0, SLOTS)
    wide = tl.where(slot == 0, 1.0, gain)
    along = tl.load(cosines + slot[:, None] * SLOTS + slot[None, :])
    for c0 in range(0, COLUMNS, BLOCK):
        column = c0 + tl.arange(0, BLOCK)
        wanted = column < COLUMNS
        at = (row * HEADS + head) * COLUMNS + column
        cosine = tl.zeros((BLOCK, SLOTS), tl.float32)
        for d0 in range(0, WIDTH, STEP):
            axis = d0 + tl.arange(0, STEP)
            inside = (axis < DIM)[:, None] & (slot < SLOTS)[None, :]
            which = (head * SLOTS + slot[None, :]) * DIM + axis[:, None]
            mask = tl.load(masks + which, mask=inside, other=0)
            place = tl.load(places + which, mask=inside, other=0)
            coded = mask > 0
            low = tl.load(record + place // 8, mask=coded, other=0).to(tl.int32)
            high = tl.load(record + tl.minimum((place + 7) // 8, SIZE - 1), mask=coded, other=0).to(tl.int32)
            code = ((low | (high << 8)) >> (place % 8)) & mask
            value = tl.load(levels + mask + code) * tl.load(sizes + which, mask=inside, other=0.0)
            q = tl.load(
                turned + at[:, None] * DIM + axis[None, :], mask=wanted[:, None] & (axis < DIM)[None, :], other=0.0
            )  # fmt: skip
            cosine += tl.sum(q[:, :, None] * value[None, :, :], 1)
        cosine *= wide[None, :]
        logits = tl.sum(cosine[:, :, None] * along[None, :, :], 1)
        logits += tl.load(common + at, mask=wanted, other=0.0)[:, None]
        if CAP > 0:
            logits = CAP - 2 * CAP / (tl.exp2(tl.minimum(logits * (2 * _LOG2_E / CAP), 64.0)) + 1)
        logits = tl.where((slot < count)[None, :], logits, float("-inf"))
        top = tl.max(logits, 1)
        level = top + tl.log2(tl.sum(tl.exp2((logits - top[:, None]) * _LOG2_E), 1)) * _LN_2 - log_count
        sigma = gain * tl.sqrt(tl.load(noise + at, mask=wanted, other=0.0))
        room = tl.full((BLOCK,), float("inf"), tl.float32)
        if CAP > 0:
            bent = level / CAP
            sigma *= 1.0 - bent * bent
            room = CAP - level
        above = tl.where(sigma <= bound, 0.5 * sigma * sigma, bound * sigma - 0.5 * bound * bound)
        known = log_count + level + tl.minimum(above, room)
        finite = there & (first != _NOTHING) & (tl.abs(known) < float("inf"))  # false for NaN
        known = tl.where(finite, known, float("-inf"))
        tl.store(estimates + (head * COLUMNS + column).to(tl.int64) * pages + page, known, mask=wanted)
