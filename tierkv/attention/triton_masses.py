"""What each token and page got of attention, from the logits that were kept and the log-sum-exps of everything."""

from __future__ import annotations

from tierkv.triton_setup import kernel, tl

_LEAST_LOG = tl.constexpr(-1e30)


@kernel
def add_masses(
    kept: tl.tensor, totals: tl.tensor, rows: tl.tensor, order: tl.tensor, token_starts: tl.tensor, counts: tl.tensor,
    page_mass: tl.tensor, token_mass: tl.tensor, QUERY_HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    OF_PAGES: tl.constexpr, OF_TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """One page: add the shares of its tokens, averaged over query heads, to what is wanted.

    kept: `[pages, QUERY_HEADS, TOKENS]` logits; totals: `[rows, QUERY_HEADS]`; both over log 2. Rows may share tokens,
    hence the atomic additions.
    """
    page = tl.program_id(0)
    row, slot = tl.load(rows + page), tl.arange(0, TOKENS)
    sums = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, QUERY_HEADS, BLOCK):
        head = start + tl.arange(0, BLOCK)
        there = head < QUERY_HEADS
        place = (page.to(tl.int64) * QUERY_HEADS + head)[:, None] * TOKENS + slot[None, :]
        logit = tl.load(kept + place, mask=there[:, None], other=float("-inf"))
        total = tl.load(totals + row * QUERY_HEADS + head, mask=there, other=0.0)
        sums += tl.sum(tl.exp2(logit - tl.maximum(total, _LEAST_LOG)[:, None]), 0)
    shares = sums / QUERY_HEADS
    if OF_TOKENS:
        tl.atomic_add(
            token_mass + tl.load(token_starts + page) + slot, shares, mask=slot < tl.load(counts + page)
        )
    if OF_PAGES:
        tl.atomic_add(page_mass + tl.load(order + page), tl.sum(shares, 0))
