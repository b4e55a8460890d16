"""The packed forms of a daemon's pages, and what the CPU does with them wherever pages lie: fit, read back, compare."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv.daemon import scoring
from tierkv.daemon.calibrations import Calibrations
from tierkv.daemon.events import FitCodec, Quantize, Summarize
from tierkv.geometry import DTypeName, Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.prefetch.digest_forms import get as get_digest_form
from tierkv.prefetch.digests import DigestForm, Digests
from tierkv.prefetch.transform_digests import TransformForm, flat_state
from tierkv.quant.contract import Bytes, Codec, Floats, NonFiniteValues
from tierkv.quant.moments import plain_keys
from tierkv.quant.quality import ErrorRatios, error_ratios
from tierkv.table import Kind

WARM_UP_HEAD_DIM = 64
"""A head size that every codec packs."""

WARM_UP_DIGEST = TransformForm(12)
"""Its kernel is that of every size."""

NO_STATE = np.zeros(0, np.float32)


class Forms:
    """Not thread-safe: the mover's.

    Args:
        middle: the codec of the middle form, if there is one.
        measure_every: of so many pages that become low-bit, the first one is decoded again and compared with its exact
            bytes; 0 measures none.
    """

    def __init__(
        self,
        codec: Codec,
        middle: Codec | None = None,
        calibrations: Calibrations | None = None,
        measure_every: int = 0,
    ) -> None:
        self.codec = codec
        self.middle = middle
        self._calibrations = calibrations or Calibrations(None)
        self._measure_every = measure_every
        self._encoded = 0
        self._digests: dict[tuple[int, str, Geometry, int], Digests] = {}  # by where their state lies in HBM

    def warm_up(self) -> None:
        """Encode one small page of each element type, so that the first demotion need not wait for a compiler; nor need
        the loop when it scores pages first.
        """
        scoring.warm_up()
        dtypes: tuple[DTypeName, ...] = ("bfloat16", "float16", "float32")
        forms: list[DigestForm] = [DEVIATION]
        if self._calibrations.digest_models:
            forms.append(WARM_UP_DIGEST)
        codecs = self.codec.members() if self.middle is None else (*self.codec.members(), self.middle)
        for codec, dtype in itertools.product(codecs, dtypes):
            geometry = Geometry(1, 1, WARM_UP_HEAD_DIM, dtype)
            page = np.zeros(geometry.page_bytes, np.uint8)
            state = codec.fit_state(geometry, [page], [1])
            packed = np.empty(codec.page_bytes(geometry), np.uint8)
            codec.encode(geometry, page, geometry.page_tokens, state, packed)
            if self._measure_every:
                codec.decode(geometry, packed, geometry.page_tokens, state, page)
                error_ratios(geometry, page, page, geometry.page_tokens)
            for form in forms:
                own = flat_state(plain_keys(geometry)) if form.state_floats(geometry) else NO_STATE
                digests = form.of(geometry, 0, own)
                digests.write(page, geometry.page_tokens, np.empty(digests.shape.nbytes, np.uint8))

    def of(self, form: int) -> Codec:
        """Raises `ValueError`: there is no such form here."""
        if form != Kind.MIDDLE:
            return self.codec
        if self.middle is None:
            raise ValueError("there is no middle form")
        return self.middle

    def state_floats(self, form: int, geometry: Geometry) -> int:
        """float32 values of the form's state in HBM; only the low-bit one may have any."""
        return self.codec.state_floats(geometry) if form == Kind.QUANTIZED else 0

    # The codec's state -------------------------------------------------------------------------------------------

    def calibrated(self, move: FitCodec) -> Floats | None:
        """The model's state from its calibration; None where the codec takes none, or there is none."""
        if not self.codec.takes_moments:
            return None
        return self._calibrations.fit(self.codec, move.model_id, move.geometry)

    def fitted(self, geometry: Geometry, pages: list[Bytes], counts: Sequence[int]) -> Floats:
        """The state from the pages that the codec takes. Raises `NonFiniteValues` when it takes none."""
        try:
            return self.codec.fit_state(geometry, pages, counts)
        except NonFiniteValues:
            sound = [pair for pair in zip(pages, counts, strict=True) if self._can_fit(geometry, *pair)]
            if not sound:
                raise
            return self.codec.fit_state(geometry, [page for page, _ in sound], [count for _, count in sound])

    def as_bytes(self, move: FitCodec, state: Floats) -> Bytes:
        """The codec's state, and the digests', as they lie in HBM. What lay there is forgotten.

        Raises `NonFiniteValues`, or `ValueError` where the size is not what was announced.
        """
        geometry = move.geometry
        floats = self.codec.state_floats(geometry)
        if state.dtype != np.float32 or state.size != floats:
            raise ValueError(
                f"the codec's state has {state.size} values of {state.dtype}; {floats} were announced"
            )
        if not np.isfinite(state).all():
            raise NonFiniteValues("the codec's state is not finite")
        own = np.ascontiguousarray(state).reshape(-1)
        self._digests = {key: digests for key, digests in self._digests.items() if key[0] != move.dst}
        if get_digest_form(move.digest).state_floats(geometry):
            own = np.concatenate([own, self._calibrations.digest_state(move.model_id, geometry)])
        return own.view(np.uint8)

    def _can_fit(self, geometry: Geometry, page: Bytes, count: int) -> bool:
        try:
            self.codec.fit_state(geometry, [page], [count])
        except NonFiniteValues:
            return False
        return True

    # Pages -------------------------------------------------------------------------------------------------------

    def measures(self, move: Quantize) -> bool:
        """Whether this page is one of those that are compared with their exact bytes. Counts it."""
        if move.form == Kind.MIDDLE:
            return False
        number, self._encoded = self._encoded, self._encoded + 1
        return bool(self._measure_every) and number % self._measure_every == 0

    def loss(self, move: Quantize, exact: Bytes, packed: Bytes, state: NDArray[np.float32]) -> ErrorRatios:
        """What the low-bit form loses of this page."""
        decoded = np.empty(move.geometry.page_bytes, np.uint8)
        self.codec.decode(move.geometry, packed, move.count, state, decoded)
        return error_ratios(move.geometry, exact, decoded, move.count)

    def source_bytes(self, move: Summarize) -> int:
        """Bytes of the host replica that a digest is made of."""
        if move.src_kind == Kind.EXACT:
            return move.geometry.page_bytes
        return self.of(move.src_kind).page_bytes(move.geometry)

    def digest_state(self, move: Summarize) -> tuple[int, int] | None:
        """Where in HBM the state lies that `digest` wants, and how many bytes it has; `None`: it needs none (again)."""
        floats = get_digest_form(move.digest).state_floats(move.geometry)
        if not floats or self._digest_key(move) in self._digests:
            return None
        return move.codec_state + 4 * self.codec.state_floats(move.geometry), 4 * floats

    def digest(
        self, move: Summarize, source: Bytes, state: NDArray[np.float32], digest_state: NDArray[np.float32]
    ) -> Bytes:
        """Of a host replica's bytes. `state` is that of its form, `digest_state` what `digest_state` asked for."""
        geometry = move.geometry
        if move.src_kind != Kind.EXACT:
            packed, source = source, np.empty(geometry.page_bytes, np.uint8)
            self.of(move.src_kind).decode(geometry, packed, move.count, state, source)
        key = self._digest_key(move)
        digests = self._digests.get(key)
        if digests is None:
            digests = get_digest_form(move.digest).of(geometry, move.layers, digest_state)
            self._digests[key] = digests
        digest = np.empty(digests.shape.nbytes, np.uint8)
        digests.write(source, move.count, digest)
        return digest

    @staticmethod
    def _digest_key(move: Summarize) -> tuple[int, str, Geometry, int]:
        return move.codec_state, move.digest, move.geometry, move.layers
