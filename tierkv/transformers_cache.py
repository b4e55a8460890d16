"""`TieredCache`: a transformers cache whose full-attention layers live in tierkv pages.

A forward goes: `begin_forward` lays the new tokens out (tentative), each layer's `update` writes them and hangs
itself on the key tensor, the attention function `"tierkv"` finds it there and attends pages, `end_forward` commits.
`tierkv.attach` drives that; an exception in between rolls back to the horizon.

transformers sees the *padded* view (every row as long as the longest); sessions hold real tokens only: padding is
never written. While drafts are verified (`activate_past_recording`) tokens stay tentative until `crop` accepts them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

import tierkv.attention
from tierkv import slices
from tierkv.attention.contract import PagedAttention
from tierkv.errors import GeometryMismatch
from tierkv.markers import UNKNOWN, Markers
from tierkv.observing import NO_PART, WHOLE_CHUNK, Observation, Part, Teller, layers_of, part_of
from tierkv.padding import real_columns
from tierkv.paged_step import DecodeStep, Looks, NewTokens, PagedSession, PrefillStep, Step
from tierkv.protocol import Audit
from tierkv.recall import Estimates, RecallMode, RecallOptions
from tierkv.regions import Run
from tierkv.tiered_layer import TieredLayer

REPLAY_REST = 8
"""Decode steps after pages were asked for in which no step is replayed: what did not come then will not come now."""


class _Row(NamedTuple):
    """What a forward leaves to commit of a row."""

    session: PagedSession
    token_ids: NDArray[np.int32] | None
    steps: int
    part: Part


class _Finished(NamedTuple):
    """A forward to be committed, and its step if it observed."""

    rows: list[_Row]
    step: Step | None


class TieredCache(Cache):  # type: ignore[misc]
    """Drop-in for `DynamicCache` on an attached model: `generate(**inputs, past_key_values=TieredCache(session))`.

    Args:
        sessions: one a row. A batch (or beams) that is a multiple of them forks each one; the cache owns the forks
            and closes rows that beam search drops, so read `cache.sessions` afterwards. Sessions that already hold
            tokens are continued.
        attention: an implementation of `tierkv.attention`, or its name; by default the one for where the pool lies.
        chunk_tokens: new tokens a forward takes at most; default 4,096, less when HBM pool or budget are small.
        recall: how pages that left HBM are attended all the same (`tierkv.recall`): a mode, or all its options.
        markers: by which tokens that no label names are given regions (`tierkv.markers`).

    Raises:
        GeometryMismatch: the sessions' pages differ in shape.
        ValueError: there is no session, or they are of several clients.
        ConfigError: the attention cannot serve the pool.
    """

    layers: list[Any]

    def __init__(
        self,
        sessions: PagedSession | Sequence[PagedSession],
        *,
        attention: PagedAttention | str | None = None,
        chunk_tokens: int | None = None,
        recall: RecallMode | RecallOptions = "direct",
        markers: Markers | None = None,
    ) -> None:
        self.sessions: list[PagedSession] = list(sessions) if isinstance(sessions, Sequence) else [sessions]
        if not self.sessions:
            raise ValueError("a TieredCache needs at least one session")
        geometry = self.sessions[0].geometry
        for session in self.sessions:
            if session.geometry != geometry:
                raise GeometryMismatch(
                    f"rows of one cache share a geometry; got {session.geometry} and {geometry}"
                )
            if session.length != session.horizon:
                raise ValueError(
                    f"the session's last {session.length - session.horizon} tokens are tentative: commit them or roll "
                    "them back; another TieredCache may still verify drafts in it (its crop(0) accepts them)"
                )
            if session.pool.address != self.sessions[0].pool.address:
                raise ValueError(
                    "rows of one cache must be sessions of one client: a kernel call reads one pool"
                )
        if attention is None:
            attention = "cpu" if self.sessions[0].pool.tensor is None else "triton"
        self.attention = tierkv.attention.get(attention) if isinstance(attention, str) else attention
        self.attention.check(self.sessions[0].pool)
        self.padded_length = max(session.length for session in self.sessions)
        self._pads = [list(range(self.padded_length - session.length)) for session in self.sessions]
        self._readers = [markers.reader(session.length) for session in self.sessions] if markers else []
        self._chunk_tokens = chunk_tokens
        self.recall = recall if isinstance(recall, RecallOptions) else RecallOptions(recall)
        self._observations = 0
        self._looked: tuple[Step, list[NewTokens]] | None = None  # whose estimates pages are asked for by
        self._asked_at = -1  # padded length at which pages were last asked for
        self._bound: object | None = None
        self._step: Step | None = None
        self._rows: list[NewTokens] = []
        self._columns = 0
        self._real: NDArray[np.bool_] | None = None
        self._parts: list[Part] = []
        self._ids: NDArray[np.int32] | None = None
        self._holding = False
        self._held: list[_Finished] = []
        self._teller = Teller()
        self._undo: list[tuple[Any, dict[str, Any]]] = []
        super().__init__(layers=[TieredLayer(self, index) for index in range(geometry.num_layers)])

    @property
    def audits(self) -> list[Audit]:
        """What the audits of this cache found, in order: one for each row and audit."""
        return self._teller.audits

    # What transformers asks -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"TieredCache(rows={len(self.sessions)}, padded_length={self.padded_length})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Padded length: columns seen, pads included."""
        return self.padded_length

    def activate_past_recording(self) -> None:
        """From now on tokens stay tentative until the `crop` that follows each forward (draft verification)."""
        super().activate_past_recording()
        self._holding = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns. Tentative tokens go locally, committed ones ask the daemon."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes 0 or a negative number of tokens to remove, not {tokens_to_remove}")
        for layer in self._own_layers():
            layer.crop(tokens_to_remove)
        self._crop_sessions(max(0, self.padded_length + tokens_to_remove))

    def _crop_sessions(self, padded_length: int) -> None:
        kept = [pads[: bisect_left(pads, padded_length)] for pads in self._pads]
        for pads, session in zip(kept, self.sessions, strict=True):
            length = padded_length - len(pads)
            if session.length > max(length, session.horizon):
                session.rollback(max(length, session.horizon))
            if session.horizon > length:
                self._teller.forget()  # other tokens will take the place of what was seen
                session.crop(length)
        self._pads, self.padded_length = kept, padded_length  # only now: a crop that fails can be tried again
        self._cut_readers()
        self._settle()

    def reset(self) -> None:
        """Forget everything; the sessions stay open."""
        self._crop_sessions(0)
        for layer in self._own_layers():
            layer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was. A row that stays keeps its session; copies are forks."""
        self._select(beam_idx.tolist())
        for layer in self._own_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.sessions)) for _ in range(repeats)])
        for layer in self._own_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.sessions))[indices.cpu()]
        self._select(rows.tolist())
        for layer in self._own_layers():
            layer.batch_select_indices(indices)

    def close(self) -> None:
        """Close every session of the cache, forks included."""
        for session in self.sessions:
            session.close()
        self.sessions, self._pads, self._readers = [], [], []

    # What the forward wrapper calls ---------------------------------------------------------------------------

    @property
    def running_step(self) -> Step:
        """The step of the forward that runs now."""
        if self._step is None:
            raise RuntimeError(
                "a TieredCache works on an attached model only: call tierkv.attach(model) first"
            )
        return self._step

    def slices(self, rows: int, columns: int) -> list[slices.Slice]:
        """The forwards that read `columns` new tokens of each of `rows` rows."""
        if self._chunk_tokens is not None:
            return slices.even(columns, self._chunk_tokens)
        session = self.sessions[0]
        pool, geometry = session.pool, session.geometry
        if session.hbm_budget:
            nbytes = min(session.hbm_budget, pool.nbytes // rows)
            packed = pool.codec.page_bytes(geometry)
            room = slices.Room(nbytes, geometry.page_tokens, geometry.page_bytes, packed)
            return slices.within(columns, self.padded_length, room)
        share = pool.nbytes // (slices.POOL_SHARE * geometry.token_bytes * rows)
        return slices.even(columns, max(geometry.page_tokens, min(slices.CHUNK_TOKENS, share)))

    @property
    def has_cold(self) -> bool:
        """Some row has pages that left HBM."""
        return any(session.has_cold for session in self.sessions)

    @property
    def chunk_reads_all(self) -> bool:
        """A chunk reads every cold page in place, exactly as it lies in host: it misses nothing."""
        return max(session.cold_pages for session in self.sessions) <= self.recall.chunk_read

    def misses_much(self) -> bool:
        """The running forward expects more of cold pages than `recall.missing`, and none were asked for just before."""
        self._looked = self.running_step, self._rows
        best = (sum(found.best(self.recall.pages)[1]) for _, found in self._estimates())
        rested = self.padded_length - self._asked_at >= REPLAY_REST
        return rested and max(best, default=0.0) >= self.recall.missing

    def ask_for_pages(self, wait: bool) -> None:
        """Ask the daemon for the cold pages that the last forward expects most of, and maybe wait for them: all rows
        together for `recall.seconds`.
        """
        if not self.recall.pages:
            return
        deadline = time.monotonic() + self.recall.seconds
        self._asked_at = self.padded_length
        for new, found in self._estimates():
            pages, masses = found.best(self.recall.pages)
            if pages:
                new.session.recall(pages, masses, max(0.0, deadline - time.monotonic()), wait)

    @property
    def verifies_drafts(self) -> bool:
        """Whether the tokens of a call stay tentative until the `crop` that follows it."""
        return self._holding

    def begin_call(self) -> None:
        """A call of the model begins (in slices, several forwards). What no `crop` followed was not a draft.

        transformers never says that it stopped verifying drafts: generating without drafts afterwards would leave its
        last token tentative.
        """
        if self._held:
            self._holding = False

    def serves(self, owner: object) -> bool:
        return self._bound is owner

    def bind(self, owner: object, own_layers: dict[int, Any], num_layers: int) -> None:
        """Take over the attached model's layer pattern: `own_layers` (by index) stay transformers' own.

        Raises:
            GeometryMismatch: the pages hold another number of layers than the model has full-attention layers.
            ValueError: the cache served another model, or sessions that hold tokens meet sliding-window layers
                (whose window nobody kept).
        """
        if self._bound is not None:
            raise ValueError("this TieredCache already serves another model; make one for each model")
        pages = self.sessions[0].geometry.num_layers
        if pages != num_layers - len(own_layers):
            raise GeometryMismatch(
                f"pages hold {pages} layers, the model has {num_layers - len(own_layers)} full-attention layers; "
                "open sessions with AttachedModel.open"
            )
        if own_layers and self.padded_length:
            raise ValueError(
                "a session that already holds tokens cannot continue on a model with sliding windows"
            )
        paged = iter(self.layers)
        self.layers = [own_layers[i] if i in own_layers else next(paged) for i in range(num_layers)]
        self._bound = owner
        if self._holding:
            self.activate_past_recording()

    def begin_forward(
        self,
        batch: int,
        columns: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        scout: bool = False,
        coming: int = 0,
    ) -> None:
        """Lay out `columns` new columns of `batch` rows.

        Args:
            input_ids: `[batch, columns]`, for the commit; None when embeddings were given.
            attention_mask: `[batch, padded_length + columns]`, 0 where a column is padding; None: no padding.
            scout: the forward will be abandoned; only its estimates matter.
            coming: columns of the forward that follows at once, whose room is made meanwhile.

        Raises:
            ValueError: batch or mask do not fit what the cache holds.
            CapacityError: no pages could be had; nothing is kept.
        """
        self._settle()
        rows_before = len(self.sessions)
        self._check_batch(batch)
        self._real = real_columns(batch, columns, attention_mask, self._pads, self.padded_length)
        if batch != rows_before:
            self.batch_repeat_interleave(batch // rows_before)
        self._undo = [(layer, dict(vars(layer))) for layer in self._own_layers()]
        self._columns, self._rows = columns, []
        ids = None if input_ids is None else input_ids.numpy(force=True).astype(np.int32, copy=False)
        try:
            rows = list(self._new_tokens(columns, ids))
            if len(rows) > 1:
                for new in rows:
                    new.session.reserve(new.tokens, new.regions)
            for new in rows:
                self._rows.append(new)
                new.session.begin(new.tokens, new.regions)
            for new in rows:
                if coming and new.columns is None:  # of a row that ends in padding fewer may come
                    new.session.expect(coming)
            self._build_step(batch, scout)
        except BaseException:
            self.abandon_forward()
            if batch != rows_before:
                self.batch_select_indices(torch.arange(0, batch, batch // rows_before))
            raise
        self._ids = ids

    def _new_tokens(self, columns: int, ids: NDArray[np.int32] | None) -> Iterator[NewTokens]:
        for row, session in enumerate(self.sessions):
            whole = self._real is None or bool(self._real[row].all())
            picked = None if whole or self._real is None else np.flatnonzero(self._real[row])
            tokens = columns if picked is None else len(picked)
            if tokens:
                regions: list[Run] = []
                if self._readers:
                    told = [UNKNOWN] * tokens if ids is None else _row_ids(ids, row, picked).tolist()
                    regions = self._readers[row].label(told)
                yield NewTokens(session, row, tokens, picked, regions)

    def end_forward(self) -> None:
        """The forward succeeded: commit (or hold) its tokens, send what it observed, open the step boundary."""
        step, rows, self._step, self._undo = self.running_step, self._rows, None, []
        decoded = self._columns == 1 or (self._holding and self.padded_length > 0)
        self._looked = step, rows
        finished = []
        for index, new in enumerate(rows):
            ids = None if self._ids is None else _row_ids(self._ids, new.row, new.columns)
            finished.append(_Row(new.session, ids, int(decoded), self._parts[index]))
        looked = any(part.looks for part in self._parts)
        if looked:
            step.leave()
        self._held.append(_Finished(finished, step if looked else None))
        if self._real is not None:
            for pads, real in zip(self._pads, self._real, strict=True):
                pads.extend((np.flatnonzero(~real) + self.padded_length).tolist())
        self.padded_length += self._columns
        self._rows, self._ids = [], None
        if not self._holding:
            self._settle()
        for new in rows:
            new.session.end()

    def abandon_forward(self) -> None:
        """The forward failed: its tokens are gone, the sessions stand at their horizon."""
        if self._step is not None:
            self._looked = self._step, self._rows
        rows, self._rows, self._step, self._ids = self._rows, [], None, None
        for new in rows:
            if new.session.length > new.session.horizon:
                new.session.rollback(new.session.horizon)
            new.session.end()
        self._cut_readers()
        for layer, state in self._undo:
            vars(layer).clear()
            vars(layer).update(state)
        self._undo = []

    # Inside ---------------------------------------------------------------------------------------------------

    def _own_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, TieredLayer)]

    def _cut_readers(self) -> None:
        for reader, session in zip(self._readers, self.sessions, strict=False):
            reader.cut(session.length)

    def _build_step(self, batch: int, scout: bool) -> None:
        recall, chunk = self.recall, self._columns > 1 or not self._rows
        settings = [new.session.observing for new in self._rows]
        if chunk:
            self._parts = [NO_PART if scout else WHOLE_CHUNK] * len(self._rows)
        else:  # the step that this forward will be is session.step + 1
            steps = (new.session.step + 1 for new in self._rows)
            self._parts = [part_of(step, mine) for step, mine in zip(steps, settings, strict=True)]
        told = any(part.tells for part in self._parts) or (chunk and not scout)
        observed = told or any(part.looks for part in self._parts)
        audit = told and self._audit_is_due(scout)
        layers = layers_of(self.sessions[0].geometry.num_layers, settings)
        estimates = recall.mode == "strict" or (recall.estimates and (chunk or observed))
        if chunk or (recall.exact_steps and recall.reads):
            read = recall.chunk_read if recall.reads else 0
            exact = recall.reads and (recall.exact_chunks if chunk else recall.exact_steps)
            looks = Looks(observed, estimates, read, exact, audit, layers)
            self._step = PrefillStep(self.attention, self._rows, looks)
        else:
            looks = Looks(observed, estimates, recall.read if recall.reads else 0, False, audit, layers)
            self._step = DecodeStep(self.attention, self._rows, batch, looks)

    def _audit_is_due(self, scout: bool) -> bool:
        """Counts observations; every so many of them is an audit."""
        if scout or not self.recall.audit_every:
            return False
        self._observations += 1
        return self._observations % self.recall.audit_every == 0

    def _estimates(self) -> list[tuple[NewTokens, Estimates]]:
        """What the last forward expects of its rows' cold pages. On a device, waits for it."""
        if self._looked is None:
            return []
        step, rows = self._looked
        return list(zip(rows, step.estimates(), strict=False))  # none, where no page is cold

    def _settle(self) -> None:
        """Commit what is held, which `crop` may have shortened, and tell what was seen."""
        held, self._held = self._held, []
        for rows, step in held:
            seen = []
            for index, (session, ids, steps, part) in enumerate(rows):
                fresh = session.length - session.horizon
                if fresh > 0:
                    session.commit(None if ids is None else ids[:fresh], steps=steps)
                    if part.looks:
                        seen.append((index, session, session.length, part))
            if step is not None and seen:
                self._teller.add(Observation(step, seen))
        if held:
            self._teller.tell(self.sessions)

    def _check_batch(self, batch: int) -> None:
        rows = len(self.sessions)
        if batch < rows or batch % rows:
            raise ValueError(f"a batch of {batch} rows does not fit a TieredCache of {rows} sessions")

    def _select(self, order: list[int]) -> None:
        """Rows become `order` of the present ones."""
        self._settle()
        old, old_pads = self.sessions, self._pads
        # A session stays in its own row where it can, else with the first row that wants it; others get forks.
        keeper: dict[int, int] = {}
        for row, source in enumerate(order):
            if source not in keeper or row == source:
                keeper[source] = row
        rows: list[PagedSession] = []
        try:
            for row, source in enumerate(order):
                rows.append(old[source] if keeper[source] == row else old[source].fork())
        except BaseException:
            for row, session in enumerate(rows):
                if keeper[order[row]] != row:
                    session.close()
            raise
        self.sessions = rows
        self._pads = [list(old_pads[source]) for source in order]
        self._readers = [self._readers[source].fork() for source in order] if self._readers else []
        for row, session in enumerate(old):
            if row not in keeper:
                session.close()


def _row_ids(ids: NDArray[np.int32], row: int, columns: NDArray[np.int64] | None) -> NDArray[np.int32]:
    """A row's token ids, only of the given columns."""
    whole: NDArray[np.int32] = ids[row]
    return whole if columns is None else whole[columns]


__all__ = ["TieredCache"]
