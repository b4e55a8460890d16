"""Rows with cold pages, and what attention over them must give: dense float64 arithmetic over the K/V that were put
into the pages (or, for packed pages, over what the codec's torch reference reads back) and over the digests' numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.contract.test_attention import (
    DTYPES,
    MASS_ROUNDED,
    ROUNDED,
    Case,
    make_case,
    random_query,
    random_sinks,
)
from tierkv.attention.contract import (
    CHOOSING_QUERIES,
    Attended,
    Cold,
    ColdPages,
    ColdSeen,
    PagedAttention,
    Pages,
)
from tierkv.geometry import DTypeName
from tierkv.prefetch.deviation import DEVIATION, DeviationDigests
from tierkv.prefetch.digests import Digests
from tierkv.prefetch.transform import GAIN, NOTHING, KeySums, cosines, solve
from tierkv.prefetch.transform_digests import TransformDigests, TransformForm, flat_state
from tierkv.quant.klt_levels import LEVELS
from tierkv.table import NOWHERE

DIGEST = "deviation"
"""Form of the digests that are made."""


@dataclass
class Part:
    """Some tokens of a row in float64: keys, values `[kv_heads, tokens, head_dim]`; which page each token is of."""

    keys: torch.Tensor
    values: torch.Tensor
    page_of: torch.Tensor  # [tokens] index among the row's pages of this part
    places: NDArray[np.int64]  # [tokens] in a mass array


@dataclass
class Both:
    """Rows with pages in HBM (`case`) and cold ones, whose digests lie behind the former in the HBM pool."""

    case: Case
    host: Case
    cold: Cold
    pages: Pages

    @property
    def layers(self) -> int:
        return self.case.view.digest_layers

    def part(self, cold: bool, row: int, layer: int) -> Part:
        case = self.host if cold else self.case
        pages = self.cold.pages if cold else self.pages
        here = slice(*case.pages.row_starts[row : row + 2])
        counts = torch.from_numpy(pages.counts[here].astype(np.int64))
        starts = pages.token_starts[here]
        spans = [np.arange(start, start + n) for start, n in zip(starts, counts.tolist(), strict=True)]
        return Part(
            *case.dense[row][:, layer],
            torch.arange(len(counts)).repeat_interleave(counts),
            np.concatenate([np.arange(0), *spans]).astype(np.int64),
        )

    def opinion(self, share: torch.Tensor, layer: int) -> torch.Tensor:
        """What a layer's heads think of cold pages, `[cold pages]`, from shares `[q_heads, cold pages]`."""
        digests = self.case.view.digests
        assert digests is not None
        weights = digests.weights[layer - digests.shape.first_layer]
        of_head = torch.from_numpy(np.repeat(weights, len(share) // len(weights))).double()
        return (share * of_head[:, None]).sum(0) / len(share)

    @staticmethod
    def logits(query: torch.Tensor, part: Part, scale: float, softcap: float = 0.0) -> torch.Tensor:
        """`[q_heads, tokens]` of a query `[q_heads, head_dim]`."""
        ratio = query.shape[0] // part.keys.shape[0]
        logits = torch.stack([q.double() @ part.keys[h // ratio].T * scale for h, q in enumerate(query)])
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    def estimates(
        self, query: torch.Tensor, row: int, layer: int, scale: float, softcap: float = 0.0
    ) -> torch.Tensor:
        """Log-mass `[q_heads, cold pages]` of a query `[q_heads, head_dim]`, from the digests' numbers."""
        geometry, digests = self.case.view.geometry, self.case.view.digests
        group = query.shape[0] // geometry.num_kv_heads
        first, last = self.host.pages.row_starts[row : row + 2]
        found = torch.full((query.shape[0], int(last - first)), -math.inf, dtype=torch.float64)
        if digests is None or layer < digests.shape.first_layer:
            return found
        estimate = by_transform if isinstance(digests, TransformDigests) else by_deviation
        for page in range(first, last):
            offset, n = int(self.cold.pages.digests[page]), int(self.cold.pages.counts[page])
            if offset == NOWHERE:
                continue
            digest = self.case.view.data[offset : offset + digests.shape.nbytes]
            for head in range(query.shape[0]):
                q = query[head].double().numpy()
                known = estimate(digests, digest, layer, head // group, q, n, scale, softcap)
                found[head, page - first] = known
        return found


def by_deviation(
    digests: Digests, digest: NDArray[np.uint8], layer: int, head: int, q: NDArray[np.float64], n: int,
    scale: float, softcap: float,
) -> float:  # fmt: skip
    assert isinstance(digests, DeviationDigests)
    numbers, at = digests.read(digest), layer - digests.shape.first_layer
    mean = float(scale * q @ numbers.mean[at, head].astype(np.float64))
    sigma = float(abs(scale) * np.linalg.norm(q * numbers.deviation[at, head]))
    return second_cumulant(mean, sigma, n, softcap)


def by_transform(
    digests: Digests, digest: NDArray[np.uint8], layer: int, head: int, q: NDArray[np.float64], n: int,
    scale: float, softcap: float,
) -> float:  # fmt: skip
    """The logits of the keys that the record stands for, token by token, and normal noise on them."""
    assert isinstance(digests, TransformDigests)
    state, size = digests.transform.state, digests.shape.record_bytes
    at = ((layer - digests.shape.first_layer) * digests.shape.geometry.num_kv_heads + head) * size
    record = digest[at : at + size]
    if record[0] == NOTHING:
        return -math.inf
    coefficients = coefficients_of(digests, record, layer, head)
    turned = q @ state.axes[layer, head].astype(np.float64)
    keys = cosines(len(coefficients)).T @ coefficients
    logits = scale * (keys[:n] @ turned + q @ state.mean[layer, head].astype(np.float64))
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    level = float(np.logaddexp.reduce(logits)) - math.log(n)
    lost = digests.transform.lost[layer, head].astype(np.float64)
    sigma = abs(scale) * math.sqrt(turned**2 @ lost) * float(GAIN[record[0]])
    if softcap:
        sigma *= 1 - (level / softcap) ** 2
    a = math.sqrt(2 * math.log(n))
    known = math.log(n) + level + (sigma**2 / 2 if sigma <= a else a * sigma - a**2 / 2)
    return min(known, math.log(n) + softcap) if softcap else known


def coefficients_of(
    digests: TransformDigests, record: NDArray[np.uint8], layer: int, head: int
) -> NDArray[np.float64]:
    """`[tokens, head_dim]`, bit by bit."""
    bits, variance = digests.transform.bits[layer, head], digests.transform.state.variance[layer, head]
    number, at = int.from_bytes(record[1:].tobytes(), "little"), 0
    found = np.zeros(bits.shape)
    for place in np.ndindex(*bits.shape):
        width = int(bits[place])
        if not width:
            continue
        code = number >> at & (1 << width) - 1
        at += width
        half = 1 << (width - 1)
        unit = float(LEVELS[width][code % half]) * (-1 if code >= half else 1)
        found[place] = unit * math.sqrt(variance[place]) * (float(GAIN[record[0]]) if place[0] else 1.0)
    return found


def second_cumulant(mean: float, sigma: float, n: int, softcap: float = 0.0) -> float:
    """The formula that `tierkv.prefetch.digests` documents; its slope `1 / cosh(x)**2` is that of tanh."""
    a = math.sqrt(2 * math.log(n))
    if softcap:
        sigma /= math.cosh(min(mean / softcap, 300.0)) ** 2
        mean = softcap * math.tanh(mean / softcap)
    known = math.log(n) + mean + (sigma**2 / 2 if sigma <= a else a * sigma - a**2 / 2)
    return min(known, math.log(n) + softcap) if softcap else known


def make_both(
    seed: int, row_pages: tuple[int, ...] = (5,), cold_pages: tuple[int, ...] = (9,), *, read: int = 3,
    digest_layers: int = 1, without: tuple[int, ...] = (),
    dtype: DTypeName = "bfloat16", head_dim: int = 64, kv_heads: int = 3, low: float = 0.5, codec_name: str = "k3v2",
    middle_name: str = "",
) -> Both:  # fmt: skip
    """`without`: cold pages that have no digest."""
    shape = {
        "dtype": dtype,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "codec_name": codec_name,
        "middle_name": middle_name,
    }
    case = make_case(seed, row_pages=row_pages, **shape)
    host = make_case(seed + 1, row_pages=cold_pages, **shape)
    geometry = case.view.geometry
    digests = digests_of(DIGEST, host, digest_layers)
    form = digests.shape
    start = -(-len(case.view.data) // 64) * 64
    hbm = np.zeros(start + sum(cold_pages) * form.nbytes, np.uint8)
    hbm[: len(case.view.data)] = case.view.data
    offsets = np.full(sum(cold_pages), NOWHERE, np.int64)
    token_starts = host.pages.token_starts + case.pages.total_tokens
    for page in range(sum(cold_pages)):
        if page not in without:
            offsets[page] = start + page * form.nbytes
            exact = np.zeros(geometry.page_bytes, np.uint8)
            keys = exact_keys(host, page).to(DTYPES[dtype])
            view = torch.from_numpy(exact).view(DTYPES[dtype]).view(geometry.shape)
            view[:, 0, :, : keys.shape[2]] = keys
            digests.write(exact, keys.shape[2], hbm[offsets[page] :][: form.nbytes])
    case.view = case.view._replace(data=hbm, digests=digests if digest_layers else None)
    host.view.data.flags.writeable = False  # a worker maps the host pool read-only
    pages = case.pages._replace(total_tokens=case.pages.total_tokens + host.pages.total_tokens)
    cold = ColdPages(
        offsets, host.pages.offsets, host.pages.kinds, host.pages.counts, token_starts, host.pages.row_starts
    )
    return Both(case, host, Cold(cold, host.view, read), pages)


def digests_of(digest: str, host: Case, layers: int) -> Digests:
    """Of a form; a transform is fitted to the cold pages, or to noise where there are none."""
    geometry = host.view.geometry
    if digest == DEVIATION.name:
        return DEVIATION.of(geometry, layers)
    random = np.random.default_rng(5)
    counts = np.append(host.pages.counts, [geometry.page_tokens] * 8).astype(np.int64)
    shape = (geometry.num_layers, geometry.num_kv_heads, len(counts), geometry.page_tokens, geometry.head_dim)
    keys = random.standard_normal(shape).astype(np.float32)
    for page, count in enumerate(host.pages.counts):
        keys[:, :, page, :count] = exact_keys(host, page).numpy()
    sums = []
    for mine in keys:
        sums.append(KeySums(shape[1], shape[3], shape[4]))
        sums[-1].add(mine, counts)
    state = solve(sums, np.broadcast_to(np.eye(shape[4]), (*shape[:2], shape[4], shape[4])))
    state = state._replace(weights=np.random.default_rng(5).random(shape[:2], np.float32))
    form = TransformForm(int(digest.partition("-")[2]))
    return form.of(geometry, layers, flat_state(state))


def exact_keys(host: Case, page: int) -> torch.Tensor:
    """Keys `[layers, kv_heads, tokens, head_dim]` of a page, as its replica holds them."""
    row = int(np.searchsorted(host.pages.row_starts, page, "right")) - 1
    first = int(host.pages.counts[host.pages.row_starts[row] : page].sum())
    return host.dense[row][0, :, :, first : first + int(host.pages.counts[page])]


def tops(wanted: torch.Tensor, told: torch.Tensor, read: int) -> list[int]:
    """The `read` largest of `wanted` `[pages]` among those that are `told`."""
    order = sorted((page for page in range(len(wanted)) if told[page]), key=lambda page: -float(wanted[page]))
    return order[:read]


def softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-sum-exp along the last axis."""
    if torch.isneginf(logits).all():
        return torch.zeros_like(logits), torch.full(logits.shape[:-1], -math.inf, dtype=torch.float64)
    top = logits.max(-1, keepdim=True).values
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    return torch.exp(logits - top) / total, (top + torch.log(total)).squeeze(-1)


def shares(
    both: Both, query: torch.Tensor, hbm_log: torch.Tensor, row: int, layer: int, scale: float, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Estimates and joint shares `[q_heads, cold pages]`; `hbm_log` `[q_heads]`."""
    estimates = both.estimates(query, row, layer, scale, softcap)
    probabilities, _ = softmax(torch.cat([hbm_log.unsqueeze(-1), estimates], -1))
    return estimates, probabilities[:, 1:]


def with_sinks(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`logits` `[q_heads, tokens]` behind those of the sinks, or of a token that is not attended."""
    first = torch.full((len(logits),), -math.inf) if sinks is None else sinks
    return torch.cat([first.double().unsqueeze(-1), logits], -1)


def check_decode(
    implementation: PagedAttention,
    both: Both,
    ratio: int,
    seed: int,
    softcap: float = 0.0,
    sunk: bool = False,
) -> None:
    """Everything that a decode call returns and adds, in both layers, against dense arithmetic."""
    geometry, pages, cold = both.case.view.geometry, both.pages, both.cold.pages
    rows, scale, heads = len(both.case.dense), geometry.head_dim**-0.5, geometry.num_kv_heads
    query = 3 * random_query(seed, rows, heads * ratio, geometry.head_dim)
    sinks = random_sinks(heads * ratio) if sunk else None
    for layer in range(geometry.num_layers):
        page_mass, token_mass = (
            np.zeros(len(pages.offsets), np.float32),
            np.zeros(pages.total_tokens, np.float32),
        )
        seen = audit_of(both)
        got = implementation.decode(
            query, both.case.view, pages, layer, scale, page_mass, token_mass, both.cold, seen, softcap, sinks
        )
        for row in range(rows):
            here, there = both.part(False, row, layer), both.part(True, row, layer)
            mine, far = (slice(*starts[row : row + 2]) for starts in (pages.row_starts, cold.row_starts))
            count = int(far.stop - far.start)
            hbm_logits, cold_logits = (
                both.logits(query[row], part, scale, softcap) for part in (here, there)
            )
            everything = torch.cat([hbm_logits, cold_logits], -1)
            if everything.shape[1] == 0:
                assert not got.out[row].any()
                assert sunk or torch.isneginf(got.log_sum_exp[row]).all()
                assert seen.attended is not None and seen.attended[row] == 1.0
                continue
            hbm_log = softmax(with_sinks(hbm_logits, sinks))[1]
            estimates, share = shares(both, query[row], hbm_log, row, layer, scale, softcap)
            digested = layer >= geometry.num_layers - both.layers
            expected = both.opinion(share, layer) if digested else torch.zeros(count)
            np.testing.assert_allclose(seen.estimates[far], expected, **MASS_ROUNDED)
            wanted = share.reshape(heads, ratio, count).sum(1)
            told = (estimates > -math.inf).reshape(heads, ratio, count).any(1)
            taken = torch.zeros(heads, count, dtype=torch.bool)
            for head in range(heads if digested else 0):
                taken[head, tops(wanted[head], told[head], both.cold.read)] = True
            hidden = ~taken.repeat_interleave(ratio, 0)[:, there.page_of]
            check_row(got, row, torch.cat([hbm_logits, cold_logits.masked_fill(hidden, -math.inf)], -1), here, there,
                      ratio, token_mass, sinks)  # fmt: skip
            firsts = np.searchsorted(here.page_of.numpy(), np.arange(mine.stop - mine.start))
            if len(firsts):
                by_page = np.add.reduceat(token_mass[here.places], firsts)
                np.testing.assert_allclose(page_mass[mine], by_page, **MASS_ROUNDED)
            truth, _ = softmax(with_sinks(everything, sinks))
            cold_truth = truth[:, 1 + hbm_logits.shape[1] :]
            assert seen.true is not None and seen.attended is not None
            true = torch.zeros(count, dtype=torch.float64).index_add_(0, there.page_of, cold_truth.mean(0))
            np.testing.assert_allclose(seen.true[far], true, **MASS_ROUNDED)
            missed = float((cold_truth * hidden).sum(-1).mean())
            assert seen.attended[row] == pytest.approx(1 - missed, abs=MASS_ROUNDED["rtol"] / 10)


def check_row(
    got: Attended,
    row: int,
    logits: torch.Tensor,
    here: Part,
    there: Part,
    ratio: int,
    mass: NDArray[np.float32],
    sinks: torch.Tensor | None = None,
) -> None:
    """Output, log-sum-exp and token masses of one row, given all its logits (minus infinity: not attended)."""
    probabilities, log_sum_exp = softmax(with_sinks(logits, sinks))
    probabilities = probabilities[:, 1:]
    values = torch.cat([here.values, there.values], 1)
    out = torch.stack([p @ values[h // ratio] for h, p in enumerate(probabilities)])
    torch.testing.assert_close(got.out[row], out.float(), **ROUNDED)
    torch.testing.assert_close(got.log_sum_exp[row], log_sum_exp.float(), **ROUNDED)
    places = np.concatenate([here.places, there.places])
    np.testing.assert_allclose(mass[places], probabilities.mean(0), **MASS_ROUNDED)


def check_prefill(
    implementation: PagedAttention,
    both: Both,
    chunk: int,
    window: int,
    softcap: float = 0.0,
    sunk: bool = False,
) -> None:
    """A chunk of one row, in both layers: what is named, output, masses, and what the last query saw."""
    geometry, pages, cold = both.case.view.geometry, both.pages, both.cold.pages
    heads, ratio, dim, scale = geometry.num_kv_heads, 3, geometry.head_dim, geometry.head_dim**-0.5
    query = 3 * random_query(chunk, chunk, heads * ratio, dim).transpose(0, 1)
    keys, values = (random_query(chunk + i, chunk, heads, dim).transpose(0, 1) for i in (1, 2))
    count, sinks = len(cold.offsets), random_sinks(heads * ratio) if sunk else None
    for layer in range(2):
        token_mass, seen = np.zeros(pages.total_tokens + chunk, np.float32), audit_of(both)
        got = implementation.prefill(
            query, keys, values, both.case.view, pages, layer, scale, token_mass, window, both.cold, seen,
            softcap, sinks,
        )  # fmt: skip
        here, there = both.part(False, 0, layer), both.part(True, 0, layer)
        here = Part(
            torch.cat([here.keys, keys.double()], 1), torch.cat([here.values, values.double()], 1), here.page_of,
            np.concatenate([here.places, pages.total_tokens + np.arange(chunk)]),
        )  # fmt: skip
        masses = []
        digested = layer >= geometry.num_layers - both.layers
        wanted, told = (
            torch.zeros(heads, count, dtype=torch.float64),
            torch.zeros(heads, count, dtype=torch.bool),
        )
        near: list[torch.Tensor] = []
        for t in range(chunk):
            logits = both.logits(query[:, t], here, scale, softcap)
            logits[:, logits.shape[1] - (chunk - 1 - t) :] = -math.inf
            near.append(logits)
            if digested and t >= chunk - CHOOSING_QUERIES:
                hbm_log = softmax(with_sinks(logits, sinks))[1]
                estimates, share = shares(both, query[:, t], hbm_log, 0, layer, scale, softcap)
                wanted += share.reshape(heads, ratio, count).sum(1)
                told |= (estimates > -math.inf).reshape(heads, ratio, count).any(1)
        np.testing.assert_allclose(
            seen.estimates, both.opinion(share, layer) if digested else np.zeros(count), **MASS_ROUNDED
        )
        named = sorted(
            {page for head in range(heads) for page in tops(wanted[head], told[head], both.cold.read)}
        )
        hidden = ~torch.isin(there.page_of, torch.tensor(named, dtype=torch.int64))
        joined = torch.cat([here.values, there.values], 1)
        for t in range(chunk):
            far = both.logits(query[:, t], there, scale, softcap)
            seen_logits = torch.cat([near[t], far.masked_fill(hidden, -math.inf)], -1)
            probabilities, log_sum_exp = softmax(with_sinks(seen_logits, sinks))
            probabilities = probabilities[:, 1:]
            out = torch.stack([p @ joined[h // ratio] for h, p in enumerate(probabilities)])
            torch.testing.assert_close(got.out[:, t], out.float(), **ROUNDED)
            torch.testing.assert_close(got.log_sum_exp[:, t], log_sum_exp.float(), **ROUNDED)
            masses.append(probabilities.mean(0))
        places = np.concatenate([here.places, there.places])
        expected = torch.stack(masses[-window:]).mean(0)
        np.testing.assert_allclose(token_mass[places], expected, **MASS_ROUNDED)
        truth = softmax(with_sinks(torch.cat([near[-1], far], -1), sinks))[0][:, 1 + near[-1].shape[1] :]
        assert seen.true is not None and seen.attended is not None
        true = torch.zeros(count, dtype=torch.float64).index_add_(0, there.page_of, truth.mean(0))
        np.testing.assert_allclose(seen.true, true, **MASS_ROUNDED)
        assert seen.attended[0] == pytest.approx(
            1 - float((truth * hidden).sum(-1).mean()), abs=MASS_ROUNDED["rtol"] / 10
        )


def audit_of(both: Both) -> ColdSeen:
    """Empty arrays for everything that a call may see."""
    pages = len(both.cold.pages.offsets)
    return ColdSeen(*(np.zeros(n, np.float32) for n in (pages, pages, len(both.case.dense))))
