"""Decode attention over exact and rotated pages on a device, in place. Host side: `triton_decode.py`.

klt2's pages have a kernel in `triton_klt.py`, which takes the place of `attend_packed`; the others are theirs too.

Attention does not care for the order of pages, so a row's pages are cut in items of one form each, and one program
(of `attend_exact` or `attend_packed`) takes an item and a KV head with all query heads that share it. It leaves what
the item alone would give and its log-sum-exp, from which `merge_items` joins a row's items. Packed pages get queries
from `prepare_queries`, and sums over them stay in the space of codes until they are merged.

Logits are kept in units of log 2. Of a packed page, the four keys' channels of a byte go to four products with every
fourth channel of the rotated query, and the four values of a byte to four sums of a quarter of the channels each.
"""

from __future__ import annotations

from tierkv.attention.triton_pages import blockwise_values
from tierkv.quant.rotated_triton_kernels import (
    ALIGNMENT,
    block_start,
    gain_of,
    level_4,
    level_8,
)
from tierkv.triton_setup import kernel, tl

_NO_GAIN = tl.constexpr(255)
_LOG_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_LOG = tl.constexpr(-1e30)  # above minus infinity, from which nothing can be taken


@kernel
def prepare_queries(
    query: tl.tensor, synthesis: tl.tensor, means: tl.tensor, prepared: tl.tensor, biases: tl.tensor,
    layer: tl.tensor, HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, MATRIX: tl.constexpr,
    WIDTH: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    """SLICE channels of a query head in the space of codes, and its product with the mean key.

    synthesis: matrices out of the space of codes, `[layers, 2, HEADS]` of them MATRIX floats apart (0: one for all).
    prepared: like `query`, in float32.
    """
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % (HEADS * SHARE) // SHARE
    column = tl.arange(0, WIDTH)
    valid = column < DIM
    x = tl.load(query + place * DIM + column, mask=valid, other=0.0).to(tl.float32)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = channel < DIM
    matrix = synthesis + (layer * 2 * HEADS + head) * MATRIX + column[:, None] * DIM + channel[None, :]
    rows = tl.load(matrix, mask=valid[:, None] & inside[None, :], other=0.0)
    tl.store(prepared + place * DIM + channel, tl.sum(rows * x[:, None], 0), mask=inside)
    if tl.program_id(1) == 0:
        mean = tl.load(means + (layer * HEADS + head) * DIM + column, mask=valid, other=0.0)
        tl.store(biases + place, tl.sum(x * mean, 0))


@kernel
def read_item(
    items: tl.tensor, program: tl.tensor, HEADS: tl.constexpr, BY_HEAD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number and row (int64), first and last page of a program's item: each KV head's own if BY_HEAD."""
    place = items + (program if BY_HEAD else program // HEADS) * 4
    number, row = tl.load(place).to(tl.int64), tl.load(place + 1).to(tl.int64)
    return number, row, tl.load(place + 2), tl.load(place + 3)


@kernel
def tile_tokens(
    offsets: tl.tensor, counts: tl.tensor, first: tl.tensor, last: tl.tensor, PAGES: tl.constexpr, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Tokens of PAGES pages from `first`: byte offset of the page, slot in it, and whether it is attended."""
    lane = tl.arange(0, PAGES * TOKENS)
    page, slot = first + lane // TOKENS, lane % TOKENS
    inside = page < last
    offset = tl.multiple_of(tl.load(offsets + page, mask=inside, other=0), ALIGNMENT)
    return offset, slot, slot < tl.load(counts + page, mask=inside, other=0)


@kernel
def logits_of(products: tl.tensor, live: tl.tensor, scale: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Logits of products of queries and keys, capped unless CAP (in units of log 2) is 0; -inf where none is `live`."""
    logits = products * scale
    if CAP > 0:
        logits = CAP - 2 * CAP / (
            tl.exp2(tl.minimum(logits * (2 * _LOG2_E / CAP), 64.0)) + 1
        )  # tanh from exp2
    return tl.where(live, logits, float("-inf"))


@kernel
def softmax_step(
    logits: tl.tensor, largest: tl.tensor, total: tl.tensor, AXIS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Weights of a tile with tokens along AXIS, the factor on earlier sums, and the new largest logit and total."""
    now = tl.maximum(largest, tl.max(logits, AXIS))
    floor = tl.maximum(now, _LEAST_LOG)  # where no token was live yet
    weights, factor = tl.exp2(logits - tl.expand_dims(floor, AXIS)), tl.exp2(largest - floor)
    return weights, factor, now, total * factor + tl.sum(weights, AXIS)


@kernel
def store_page_logs(
    logits: tl.tensor, page_logs: tl.tensor, heads: tl.tensor, wanted: tl.tensor, first: tl.tensor, last: tl.tensor,
    ROWS: tl.constexpr, QUERY_HEADS: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """log2 of the sum of 2**logits over each page's tokens: `page_logs` `[pages, query heads]`."""
    by_page = tl.reshape(logits, (ROWS, PAGES, TOKENS))
    largest = tl.max(by_page, 2)
    floor = tl.maximum(largest, -1e30)  # pages beyond `last` have no token
    logs = floor + tl.log2(tl.maximum(tl.sum(tl.exp2(by_page - floor[:, :, None]), 2), 1e-30))
    page = first + tl.arange(0, PAGES)
    place = page_logs + page[None, :].to(tl.int64) * QUERY_HEADS + heads[:, None]
    tl.store(place, logs, mask=wanted[:, None] & (page < last)[None, :])


@kernel
def store_logits(
    logits: tl.tensor, kept: tl.tensor, heads: tl.tensor, wanted: tl.tensor, first: tl.tensor, last: tl.tensor,
    ROWS: tl.constexpr, QUERY_HEADS: tl.constexpr, PAGES: tl.constexpr, TOKENS: tl.constexpr, MASS: tl.constexpr,
) -> None:  # fmt: skip
    """What masses are made of: each page's log-sum-exp (MASS 1), or every logit: `[pages, query heads, TOKENS]` (2)."""
    if MASS == 1:
        store_page_logs(logits, kept, heads, wanted, first, last, ROWS, QUERY_HEADS, PAGES, TOKENS)
    else:
        lane = tl.arange(0, PAGES * TOKENS)
        page = first + lane // TOKENS
        place = (page[None, :].to(tl.int64) * QUERY_HEADS + heads[:, None]) * TOKENS + (lane % TOKENS)[
            None, :
        ]
        tl.store(kept + place, logits, mask=wanted[:, None] & (page < last)[None, :])


@kernel
def attend_exact(
    query: tl.tensor, pool: tl.tensor, numbers: tl.tensor, levels: tl.tensor, offsets: tl.tensor, counts: tl.tensor,
    items: tl.tensor, sums: tl.tensor, logs: tl.tensor, kept: tl.tensor, layer: tl.tensor, scale: tl.tensor,
    OPERAND: tl.constexpr, ITEM: tl.constexpr, BITS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr,
    SHARE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PAGES: tl.constexpr, MASS: tl.constexpr, CAP: tl.constexpr, BY_HEAD: tl.constexpr,
) -> None:  # fmt: skip
    """One item of exact pages and KV head: `sums` `[items, query heads, DIM]` and `logs` `[items, query heads]`.

    Or, with BITS, of int8 or nf4 pages: `numbers` and `levels` are as of `blockwise_values`, else not read.
    query: `[rows, query heads, DIM]`. pool: in the page dtype (with BITS in bytes). items: `[items, 4]` int32 of
    number, row, first and last page. scale: factor on logits, over log 2. CAP: as of `logits_of`. SHARE query heads
    read a KV head; ROWS fills that up to a tile's side. kept: as of `store_logits`, if MASS. BY_HEAD: items are
    `[rows * HEADS]`, and pages may have no token.
    """
    QUERY_HEADS: tl.constexpr = HEADS * SHARE
    head = tl.program_id(0) % HEADS
    number, row, first, last = read_item(items, tl.program_id(0), HEADS, BY_HEAD)
    heads, wanted = head * SHARE + tl.arange(0, ROWS), tl.arange(0, ROWS) < SHARE
    query += row * (QUERY_HEADS * DIM)
    channel = tl.arange(0, WIDTH)
    valid = channel < DIM
    q = tl.load(
        query + heads[:, None] * DIM + channel[None, :], mask=wanted[:, None] & valid[None, :], other=0.0
    )
    q = q.to(tl.float32).to(OPERAND)
    largest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    plane = layer * 2 * HEADS + head
    for page in range(first, last, PAGES):
        offset, slot, live = tile_tokens(offsets, counts, page, last, PAGES, TOKENS)
        inside = live[None, :] & valid[:, None]
        if BITS == 0:
            rows = tl.multiple_of(offset // ITEM, ALIGNMENT // ITEM) + plane * (TOKENS * DIM) + slot * DIM
            k = tl.load(pool + rows[None, :] + channel[:, None], mask=inside, other=0.0)
        else:
            k = blockwise_values(
                pool, numbers, levels, offset[None, :], slot[None, :], channel[:, None], inside, plane,
                LAYERS * 2 * HEADS, BITS, TOKENS, DIM,
            )  # fmt: skip
        logits = logits_of(tl.dot(q, k.to(OPERAND), input_precision="tf32"), live[None, :], scale, CAP)
        if MASS:
            store_logits(logits, kept, heads, wanted, page, last, ROWS, QUERY_HEADS, PAGES, TOKENS, MASS)
        weights, factor, largest, total = softmax_step(logits, largest, total, 1)
        inside = live[:, None] & valid[None, :]
        if BITS == 0:
            rows += HEADS * TOKENS * DIM
            v = tl.load(pool + rows[:, None] + channel[None, :], mask=inside, other=0.0)
        else:
            v = blockwise_values(
                pool, numbers, levels, offset[:, None], slot[:, None], channel[None, :], inside, plane + HEADS,
                LAYERS * 2 * HEADS, BITS, TOKENS, DIM,
            )  # fmt: skip
        acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc * factor[:, None], input_precision="tf32")
    place = number * QUERY_HEADS + heads
    inside = wanted[:, None] & valid[None, :]
    total = tl.maximum(total, 1.0)  # less only where no token was live
    tl.store(sums + place[:, None] * DIM + channel[None, :], acc / total[:, None], mask=inside)
    tl.store(logs + place, largest + tl.log2(total), mask=wanted)


@kernel
def _key_level(code: tl.tensor, octet: tl.tensor, PART: tl.constexpr, KEY_BITS: tl.constexpr) -> tl.tensor:
    """Levels of the PART-th channel of each byte; `octet` has their signs in its low bits."""
    if KEY_BITS == 3:
        return level_8(code, octet, 2 * PART, PART)
    return level_4(code, 2 * PART)


@kernel
def attend_packed(
    rotated: tl.tensor, biases: tl.tensor, packed: tl.tensor, packed_floats: tl.tensor, offsets: tl.tensor,
    counts: tl.tensor, items: tl.tensor, sums: tl.tensor, logs: tl.tensor, kept: tl.tensor,
    layer: tl.tensor, scale: tl.tensor, LAYERS: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, QUARTER: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    KEY_BITS: tl.constexpr, MASS: tl.constexpr, CAP: tl.constexpr, BY_HEAD: tl.constexpr,
) -> None:  # fmt: skip
    """One item of packed pages and KV head, as `attend_exact` does; `sums` stay in the space of codes.

    Products are transposed: codes are the tall factor, so that few query heads make a narrow tile, not an empty one.
    rotated, biases: of `prepare_queries`. packed, packed_floats: the pool in bytes and in float32.
    """
    QUERY_HEADS: tl.constexpr = HEADS * SHARE
    head = tl.program_id(0) % HEADS
    number, row, first, last = read_item(items, tl.program_id(0), HEADS, BY_HEAD)
    heads, wanted = head * SHARE + tl.arange(0, ROWS), tl.arange(0, ROWS) < SHARE
    rotated += row * (QUERY_HEADS * DIM)
    biases += row * QUERY_HEADS
    quad = tl.arange(0, QUARTER)
    valid = quad < DIM // 4
    bias = tl.load(biases + heads, mask=wanted, other=0.0)
    quarter = rotated + heads[None, :] * DIM + 4 * quad[:, None]
    inside = wanted[None, :] & valid[:, None]
    q0, q1 = tl.load(quarter, mask=inside, other=0.0), tl.load(quarter + 1, mask=inside, other=0.0)
    q2, q3 = tl.load(quarter + 2, mask=inside, other=0.0), tl.load(quarter + 3, mask=inside, other=0.0)
    largest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc0 = tl.zeros((QUARTER, ROWS), tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    key_start = block_start(layer, head, 0, LAYERS, HEADS, TOKENS, DIM, KEY_BITS)
    value_start = block_start(layer, head, 1, LAYERS, HEADS, TOKENS, DIM, KEY_BITS)
    for page in tl.range(first, last, PAGES, num_stages=1):  # bytes are too small for asynchronous copies
        offset, slot, live = tile_tokens(offsets, counts, page, last, PAGES, TOKENS)
        tops = packed_floats + offset // 4 + (layer * 2 * HEADS + head)
        block = packed + offset + key_start
        gain = tl.load(tops, mask=live, other=0.0) * gain_of(tl.load(block + slot, mask=live, other=_NO_GAIN))
        plane = (block + TOKENS + slot)[:, None]
        within = live[:, None] & valid[None, :]
        code = tl.load(plane + (quad * TOKENS)[None, :], mask=within, other=0).to(tl.int32)
        octet = code
        if KEY_BITS == 3:
            plane += TOKENS * (DIM // 4)
            octet = tl.load(plane + (quad // 2 * TOKENS)[None, :], mask=within, other=0).to(tl.int32)
            octet = octet >> (quad % 2 * 4)[None, :]
        block = packed + offset + value_start
        value_gain = tl.load(tops + HEADS, mask=live, other=0.0)
        value_gain *= gain_of(tl.load(block + slot, mask=live, other=_NO_GAIN))
        place = (block + TOKENS + slot * (DIM // 4))[None, :] + quad[:, None]
        values = tl.load(place, mask=live[None, :] & valid[:, None], other=0).to(tl.int32)

        logits = tl.dot(_key_level(code, octet, 0, KEY_BITS), q0, input_precision="tf32")
        logits = tl.dot(_key_level(code, octet, 1, KEY_BITS), q1, logits, input_precision="tf32")
        logits = tl.dot(_key_level(code, octet, 2, KEY_BITS), q2, logits, input_precision="tf32")
        logits = tl.dot(_key_level(code, octet, 3, KEY_BITS), q3, logits, input_precision="tf32")
        logits = logits_of(bias[None, :] + logits * gain[:, None], live[:, None], scale, CAP)
        if MASS:
            store_logits(
                tl.trans(logits), kept, heads, wanted, page, last, ROWS, QUERY_HEADS, PAGES, TOKENS, MASS
            )
        weights, factor, largest, total = softmax_step(logits, largest, total, 0)
        weights *= value_gain[:, None]
        acc0 = tl.dot(level_4(values, 0), weights, acc0 * factor[None, :], input_precision="tf32")
        acc1 = tl.dot(level_4(values, 2), weights, acc1 * factor[None, :], input_precision="tf32")
        acc2 = tl.dot(level_4(values, 4), weights, acc2 * factor[None, :], input_precision="tf32")
        acc3 = tl.dot(level_4(values, 6), weights, acc3 * factor[None, :], input_precision="tf32")
    place = number * QUERY_HEADS + heads
    total = tl.maximum(total, 1.0)
    tl.store(logs + place, largest + tl.log2(total), mask=wanted)
    quarter = sums + place[None, :] * DIM + quad[:, None]
    tl.store(quarter, acc0 / total[None, :], mask=inside)
    tl.store(quarter + DIM // 4, acc1 / total[None, :], mask=inside)
    tl.store(quarter + DIM // 2, acc2 / total[None, :], mask=inside)
    tl.store(quarter + 3 * (DIM // 4), acc3 / total[None, :], mask=inside)


@kernel
def _weighted_sum(
    sums: tl.tensor, logs: tl.tensor, first: tl.tensor, last: tl.tensor, head: tl.tensor, total: tl.tensor,
    channel: tl.tensor, valid: tl.tensor, QUERY_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of items `[first, last)`, each weighted by its share 2**(log - total)."""
    acc = tl.zeros((WIDTH,), tl.float32)
    for start in range(first, last, BLOCK):
        item = start + tl.arange(0, BLOCK)
        place = item.to(tl.int64) * QUERY_HEADS + head
        weight = tl.exp2(tl.load(logs + place, mask=item < last, other=float("-inf")) - total)
        inside = (item < last)[:, None] & valid[None, :]
        acc += tl.sum(
            tl.load(sums + place[:, None] * DIM + channel[None, :], mask=inside, other=0.0) * weight[:, None],
            0,
        )
    return acc


@kernel
def merge_items(
    sums: tl.tensor, logs: tl.tensor, spans: tl.tensor, synthesis: tl.tensor, sinks: tl.tensor,
    out: tl.tensor, log_sum_exp: tl.tensor, totals: tl.tensor, layer: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, MATRIX: tl.constexpr,
    WIDTH: tl.constexpr, SLICE: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, CODED: tl.constexpr,
) -> None:  # fmt: skip
    """Join a row's items for one query head and SLICE channels; the packed ones' sum leaves the space of codes.

    synthesis: as of `prepare_queries`.
    spans: `[rows, 3]` int32: items `[s[0], s[1])` of a row are in the model's space, `[s[1], s[2])` in that of codes
    if CODED. A row without any gets zeros and -inf.
    sinks: `[query heads]` logits without values, if SINKS. totals: the log-sum-exps, over log 2.
    """
    QUERY_HEADS: tl.constexpr = HEADS * SHARE
    row, head = tl.program_id(0) // QUERY_HEADS, tl.program_id(0) % QUERY_HEADS
    first, middle = tl.load(spans + row * 3), tl.load(spans + row * 3 + 1)
    last = tl.load(spans + row * 3 + 2)
    largest, total = float("-inf"), 0.0
    if SINKS:
        largest, total = tl.load(sinks + head) * _LOG2_E, 1.0
    for start in range(first, last, BLOCK):
        item = start + tl.arange(0, BLOCK)
        log = tl.load(logs + item.to(tl.int64) * QUERY_HEADS + head, mask=item < last, other=float("-inf"))
        now = tl.maximum(largest, tl.max(log, 0))
        floor = tl.maximum(now, _LEAST_LOG)
        total = total * tl.exp2(largest - floor) + tl.sum(tl.exp2(log - floor), 0)
        largest = now
    log_total = largest + tl.log2(tl.maximum(total, 1e-30))  # only 0 where there is no token: -inf
    total = tl.maximum(log_total, _LEAST_LOG)

    column = tl.arange(0, WIDTH)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    valid = channel < DIM
    in_space = _weighted_sum(
        sums,
        logs,
        first,
        middle if CODED else last,
        head,
        total,
        channel,
        valid,
        QUERY_HEADS,
        DIM,
        BLOCK,
        SLICE,
    )
    if CODED:
        coded = _weighted_sum(
            sums, logs, middle, last, head, total, column, column < DIM, QUERY_HEADS, DIM, BLOCK, WIDTH
        )
        matrix = synthesis + ((layer * 2 + 1) * HEADS + head // SHARE) * MATRIX
        matrix += channel[:, None] * DIM + column[None, :]
        rows = tl.load(matrix, mask=valid[:, None] & (column < DIM)[None, :], other=0.0)
        in_space += tl.sum(rows * coded[None, :], 1)
    place = row.to(tl.int64) * QUERY_HEADS + head
    tl.store(out + place * DIM + channel, in_space, mask=valid)
    tl.store(log_sum_exp + place, log_total * _LOG_2)
    tl.store(totals + place, log_total)
