"""A run: attention is recorded, estimators are fitted on texts of their own, and every input is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file

from tierkv.benchmarks.parts import Parts
from tierkv.benchmarks.recall import arms, inputs, measure, placement, probes, served
from tierkv.benchmarks.recall.arms import (
    BUDGETS,
    DEFAULT,
    DIGESTS,
    LEARNED,
    LONG,
    OFF,
    ORACLE,
    READ,
    SHORT,
    SMALL,
    Arm,
)
from tierkv.benchmarks.recall.inputs import Input
from tierkv.benchmarks.recall.measure import Records
from tierkv.benchmarks.recall.placement import Room
from tierkv.benchmarks.recall.recorded import VERSION, Recorded, recorded
from tierkv.benchmarks.recall.records import Record
from tierkv.daemon.recall import USED_LIFT
from tierkv.geometry import Geometry
from tierkv.prefetch.transform import State, fit
from tierkv.quant import get

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Told = Callable[[int, int, str], None]

CODEC = "k3v2"
"""The daemon's default form of low-bit pages."""

PROBED_ARMS = (
    OFF, DEFAULT, SHORT, LONG, f"{SHORT}, a step late", f"{LONG}, a step late", f"{SHORT}, top heads",
    f"{LONG}, top heads", f"{SHORT}, learned", f"{LONG}, learned", ORACLE,
)  # fmt: skip
PROBED_FAMILY = "demo"

Expected = Callable[[str, int], torch.Tensor]
"""Shares `[L, Q, N, P]` that pages are expected to get, 0 of exact ones, by an estimator's name and how many last
layers it describes."""


class Fitted(NamedTuple):
    state: State
    weights: dict[str, torch.Tensor]  # by estimator, [L, H]

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        fresh = file.with_suffix(".part")
        state = {
            name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in self.state._asdict().items()
        }
        save_file(state | {f"weights {name}": weights for name, weights in self.weights.items()}, fresh)
        fresh.rename(file)

    @classmethod
    def load(cls, file: Path) -> Fitted:
        held = load_file(file)
        state = State(*(held.pop(name).numpy() for name in State._fields))
        return cls(state, {name.removeprefix("weights "): weights for name, weights in held.items()})


class Bench:
    """Inputs that `kept` knows are not measured again.

    Args:
        folder: of recorded attention.
        count: of inputs; None: all.
        serve: how many of them are served by a daemon, too (`served.py`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: Path | None,
        folder: Path,
        quick: bool,
        count: int | None = None,
        serve: int = 0,
    ) -> None:
        self._own_attention, self._serve_first = model.config._attn_implementation, serve
        self._model, self._tokenizer, self._folder = model, tokenizer, folder
        self._report, self._fitting = inputs.report(tokenizer, data), inputs.fitting(tokenizer, data)
        self._report = self._report[:count]
        if quick:
            self._report, self._fitting = self._report[:1], self._fitting[:2]
        config = model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self._paged, self._asked = Geometry(*shape, "bfloat16"), Geometry(*shape, "float32")
        self._codec = get(CODEC)

    def run(self, kept: Parts[list[Record]], told: Told) -> list[Record]:
        found: list[Record] = []
        for number, given in enumerate(self._report):
            told(number, len(self._report), given.title)
            known = kept.under(given.title)
            if "records" not in known:
                known["records"] = self._measure(given)
                kept.keep()
            found += known["records"]
            if number < self._serve_first:
                if "served" not in known:
                    told(number, len(self._report), f"{given.title}, served")
                    known["served"] = self._serve(given)
                    kept.keep()
                found += known["served"]
        return found

    def _serve(self, given: Input) -> list[Record]:
        self._model.set_attn_implementation(self._own_attention)
        return list(served.measure(self._model, self._tokenizer, given, BUDGETS))

    def fitted(self) -> Fitted:
        """On texts that are not reported on."""
        texts = msgspec.json.encode(
            [VERSION, "by KV head", LEARNED, [given.tokens for given in self._fitting]]
        )
        file = self._folder / f"fitted-{xxhash.xxh3_64_hexdigest(texts)}.safetensors"
        if not file.is_file():
            self._fit().save(file)
        return Fitted.load(file)

    def _fit(self) -> Fitted:
        held = [recorded(self._folder, self._model, given) for given in self._fitting]
        state = fit([measure.sample(one) for one in held])
        made = arms.estimators(state)
        return Fitted(state, {name: self._weights(made[name], held) for name in LEARNED})

    def _weights(self, estimator: Records, held: list[Recorded]) -> torch.Tensor:
        seen = []
        for one in held:
            cold = measure.cold_pages(one)
            log_masses = measure.estimates(estimator, one)
            estimated = measure.of_groups(measure.shares(log_masses, one, cold), self._paged.num_kv_heads)
            seen.append((estimated, one.shares[..., cold]))
        return measure.learned(seen)

    def _measure(self, given: Input) -> list[Record]:
        fitted = self.fitted()
        one = recorded(self._folder, self._model, given)
        made = arms.estimators(fitted.state)
        log_masses = {name: measure.estimates(estimator, one) for name, estimator in made.items()}
        records = [
            self._compare(given, one, made[name], log_masses[name], fitted.weights.get(name)) for name in made
        ]
        asker = None
        if given.family == PROBED_FAMILY:
            asker = probes.Asker(self._model, self._tokenizer, given, self._asked, self._codec)
            right = [asker.ask(number, {"full": None})["full"] for number in range(len(given.asks))]
            asked = len(given.asks)
            records.append(Record(given.title, 1.0, "full", 1.0, 1.0, sum(right) / asked, questions=asked))

        @cache
        def expected(estimator: str, layers: int) -> torch.Tensor:
            told = measure.of_last_layers(log_masses[estimator], layers)
            found, cold = torch.zeros(one.masses.shape), ~placement.exact_pages(one.layout)
            return found.masked_scatter_(cold.expand_as(found), measure.shares(told, one, cold))

        for budget in BUDGETS:
            records += self._place(given, one, made, expected, fitted.weights, budget, asker)
        return records

    def _compare(
        self, given: Input, one: Recorded, estimator: Records, log_masses: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> Record:  # fmt: skip
        """Estimators of all layers, where all but the ends is cold."""
        cold, heads = measure.cold_pages(one), self._paged.num_kv_heads
        estimated, true = measure.shares(log_masses, one, cold), one.shares[..., cold]
        page = measure.mean(true)
        by_head = measure.by_kv_head(estimated, heads), measure.by_kv_head(true, heads)
        choices = {name: how(estimated, heads) for name, how in measure.DIRECT_AGGREGATES.items()}
        moved = measure.shares(measure.with_offsets(log_masses, one, cold), one, cold)
        aggregates = measure.AGGREGATES | ({} if weights is None else {"learned": measure.weighted(weights)})
        return Record(
            given.title, None, estimator.name,
            captured_mass=measure.captured(measure.mean(estimated), page),
            captured_direct=measure.captured(*by_head),
            mass_ratio=float(estimated.sum() / true.sum()),
            digest_bytes_ratio=self._ratio(self._paged.num_layers, estimator),
            by_aggregate={name: measure.captured(made(estimated), page) for name, made in aggregates.items()},
            with_offsets=measure.captured(measure.mean(moved), page),
            direct_by_aggregate={
                name: measure.captured(wanted, by_head[1]) for name, wanted in choices.items()
            },
            direct_late=measure.a_step_late(*by_head, one)._asdict(),
        )  # fmt: skip

    def _ratio(self, layers: int, estimator: Records) -> float:
        records = layers * self._paged.num_kv_heads
        return records * estimator.nbytes(self._paged.head_dim) / self._paged.page_bytes

    def _place(
        self, given: Input, one: Recorded, made: dict[str, Records], expected: Expected,
        weights: dict[str, torch.Tensor], budget: float, asker: probes.Asker | None,
    ) -> list[Record]:  # fmt: skip
        """Every arm within one budget."""
        room = Room.of(given, one.layout, budget, self._paged, self._codec)
        true, known = measure.mean(one.shares), measure.mean(one.seen.unsqueeze(2))[0]
        off = room.attendable(known.expand_as(true), 0)
        placed, digests, captures = {OFF: off, ORACLE: room.attendable(true, 0)}, {OFF: 0.0, ORACLE: 0.0}, {}
        read: dict[str, float] = {}
        heads, page_bytes, cold = self._paged.num_kv_heads, self._paged.page_bytes, ~room.exact
        for arm in arms.arms(list(made)):
            estimator = made[arm.estimator]
            size = estimator.nbytes(self._paged.head_dim)
            layers = self._paged.num_layers
            if budget <= SMALL and not arm.whole:
                layers = arms.layers_within(DIGESTS, size, layers, heads, page_bytes)
            wanted = expected(arm.estimator, layers)
            scores = _put_together(arm, wanted, weights)
            captures[arm.name] = measure.captured(scores[:, cold], true[:, cold])
            if arm.late:
                scores = placement.a_step_late(scores, one.asks, known)
            digests[arm.name] = self._ratio(layers, estimator)
            placed[arm.name] = room.attendable(scores, ceil(layers * heads * size))
            if arm.direct:
                wanted = measure.by_kv_head(wanted, heads)
                read[arm.name] = placement.recall_in_place(placed[arm.name], wanted, one.shares, READ)
        oracle = float(placement.recall(placed[ORACLE], true).mean())
        answered = self._answers(given, one, placed, asker) if asker is not None and budget <= SMALL else {}
        return [
            Record(
                given.title, budget, name, read.get(name, float(placement.recall(attendable, true).mean())), oracle,
                probe_recall=answered.get(name),
                captured_mass=captures.get(name),
                digest_bytes_ratio=digests[name],
                wasted_ratio=placement.wasted(attendable, off[0], true, one, USED_LIFT),
                questions=len(given.asks) if name in answered else 0,
            )
            for name, attendable in placed.items()
        ]  # fmt: skip

    @staticmethod
    def _answers(
        given: Input, one: Recorded, placed: dict[str, torch.Tensor], asker: probes.Asker
    ) -> dict[str, float]:
        """Over the placement of each question's last token."""
        right = dict.fromkeys(PROBED_ARMS, 0)
        for number in range(len(given.asks)):
            at = int((one.asks == number).nonzero()[0]) + inputs.WATCHED - 1
            for name, correct in asker.ask(number, {name: placed[name][at] for name in PROBED_ARMS}).items():
                right[name] += correct
        return {name: count / len(given.asks) for name, count in right.items()}


def _put_together(arm: Arm, expected: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Scores `[N, P]` from expected shares `[L, Q, N, P]`."""
    if arm.aggregate == "learned":
        return measure.weighted(weights[arm.estimator])(expected)
    return measure.AGGREGATES[arm.aggregate](expected)
