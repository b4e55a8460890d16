"""What goes into the brain and what comes out of it. Plain values: the same events give the same instructions.

Every event is handed over with the time (`Brain.handle(event, now)`, seconds, monotonic); the brain reads no clock.
`request` fields are opaque tokens of the server: the brain answers a request, now or later, with one `Answer`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierkv.geometry import Geometry
from tierkv.hint_messages import AgentHint, HintKind
from tierkv.protocol import Audit, Plan, Result, SessionOptions, SessionState
from tierkv.quant.quality import ErrorRatios
from tierkv.regions import Run
from tierkv.table import Kind

RequestToken = int
"""Names a waiting request; 0 where nobody waits."""

# Events ----------------------------------------------------------------------------------------------------------


class Attached(NamedTuple):
    """A worker is here; `sessions` are what it hands back after an owner died (adoption)."""

    client: str
    sessions: tuple[SessionState, ...] = ()


class AdoptionEnded(NamedTuple):
    """Every worker that could hold pages has re-attached or is dead: unclaimed memory is free."""


class Opened(NamedTuple):
    request: RequestToken
    client: str
    model_id: str
    geometry: Geometry
    options: SessionOptions


class Forked(NamedTuple):
    request: RequestToken
    client: str
    session: int


class Cropped(NamedTuple):
    request: RequestToken
    client: str
    session: int
    length: int


class Closed(NamedTuple):
    request: RequestToken
    client: str
    session: int


class Reserved(NamedTuple):
    request: RequestToken
    client: str
    session: int
    pages: int


class Committed(NamedTuple):
    request: RequestToken
    client: str
    session: int
    length: int
    runs: tuple[Run, ...]
    steps: int
    token_ids: NDArray[np.int32]


class Observed(NamedTuple):
    request: RequestToken
    client: str
    session: int
    step: int
    mass: NDArray[
        np.float32
    ]  # [tokens], NaN where not known; of a cold page: its estimate, spread over its tokens
    audit: Audit | None = None
    blocked: float = 0.0  # seconds that steps waited for the daemon since the last one


class Recalled(NamedTuple):
    """Bring pages (ids, most wanted first) back; `masses` are their estimated shares of attention."""

    request: RequestToken
    client: str
    session: int
    pages: tuple[int, ...]
    masses: tuple[float, ...]
    seconds: float


class Pinned(NamedTuple):
    request: RequestToken
    client: str
    session: int
    start: int
    stop: int
    level: str


class Hinted(NamedTuple):
    """`hint` of the orchestrator, and what it says of the step that runs from now on."""

    request: RequestToken
    client: str
    session: int
    hint: HintKind | None = None
    agent: AgentHint | None = None


class Acked(NamedTuple):
    """`client` reads table `version` (or a later one) of `session` from now on."""

    client: str
    session: int
    version: int


class LeaseExpired(NamedTuple):
    """The worker is silent but alive: its pages are quarantined, never reused while it could wake and write."""

    client: str


class LeaseRenewed(NamedTuple):
    client: str


class WorkerDied(NamedTuple):
    """The process is gone (pidfd) or has detached: everything it held comes back at once."""

    client: str


class Draining(NamedTuple):
    pass


class MoveDone(NamedTuple):
    """`checksum` of the destination where it is a host replica; `errors` of a page that was encoded, if it was measured
    (see `quant.quality`).
    """

    move: int
    checksum: int = 0
    errors: ErrorRatios | None = None


class MoveFailed(NamedTuple):
    """`reason` is a short label: `non-finite`, `checksum`, `io`, `codec`."""

    move: int
    reason: str


class Tick(NamedTuple):
    """Time passed: scores decayed, waiting work may be due."""


Event = (
    Attached | AdoptionEnded | Opened | Forked | Cropped | Closed | Reserved | Committed | Observed | Recalled | Pinned
    | Hinted | Acked | LeaseExpired | LeaseRenewed | WorkerDied | Draining | MoveDone | MoveFailed | Tick
)  # fmt: skip

# Instructions ----------------------------------------------------------------------------------------------------


class Quantize(NamedTuple):
    """Encode an exact page into a packed replica. Pools are `hbm` or `host`; answered by `MoveDone`/`MoveFailed`."""

    move: int
    geometry: Geometry
    codec_state: int  # byte offset in HBM
    count: int  # type: ignore[assignment]  # a tuple's own `count` is not wanted here
    src_pool: str
    src: int
    src_checksum: int  # of a host source, verified before use
    dst_pool: str
    dst: int
    key: int  # seeds the checksum of a host destination
    form: int = Kind.QUANTIZED  # or MIDDLE


class Copy(NamedTuple):
    """Copy `size` bytes of a replica (backup, promotion, copy-on-write). Same answers as `Quantize`.

    A host source is verified against `src_checksum` (reason `checksum` when it differs); the checksum of a host
    destination is xxh3-64 of its bytes, seeded with `key` (the page id).
    """

    move: int
    src_pool: str
    src: int
    src_checksum: int
    dst_pool: str
    dst: int
    size: int
    key: int


class Summarize(NamedTuple):
    """Write the digest (`prefetch.digests`) of a host replica at `dst` in HBM; verified like a `Copy`'s source."""

    move: int
    geometry: Geometry
    layers: int
    count: int  # type: ignore[assignment]
    src: int
    src_kind: int  # table.Kind
    src_checksum: int
    codec_state: (
        int  # byte offset in HBM, for a low-bit source; the digests' state, if they have one, lies behind it
    )
    dst: int
    key: int
    digest: str = "deviation"  # its form


class FitCodec(NamedTuple):
    """Fit the codec's per-model state from exact HBM pages and write it at `dst` in HBM, that of digests behind it.

    Pages that are not finite are left out; `MoveFailed` says `non-finite` when no page is left.
    """

    move: int
    geometry: Geometry
    pages: tuple[int, ...]  # byte offsets in HBM
    counts: tuple[int, ...]
    dst: int
    model_id: str = ""
    digest: str = "deviation"  # form of the model's digests


class SendPlan(NamedTuple):
    client: str
    plan: Plan


class Answer(NamedTuple):
    """The one reply to a request."""

    request: RequestToken
    result: Result


class Adopted(NamedTuple):
    """The one answer to an `Attached` that hands sessions back: `(session, first, stop)` that no replica holds."""

    client: str
    lost: tuple[tuple[int, int, int], ...]


Instruction = Quantize | Copy | Summarize | FitCodec | SendPlan | Answer | Adopted
