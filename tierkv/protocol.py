"""What travels between a worker and the daemon. Typed messages only; nothing on the wire is ever executed.

Lifecycle. A worker connects to the daemon's *attach socket* (Unix stream, `attach.sock` in the state directory) and
sends one `Attach`, length-prefixed; the daemon answers `Attached` with two descriptors (HBM pool read-write, host
pool read-only) as SCM_RIGHTS ancillary data. On re-attach after the owner died, the worker adds its HBM descriptor
and its sessions' tables, and the new owner *adopts* them. The stream stays open until the worker's farewell, a byte;
the kernel tells the daemon who the peer is (SO_PEERCRED), and the daemon watches that process through a pidfd.

Everything else goes over ZeroMQ: ROUTER in the daemon, DEALER in the worker, identity = `client_id`. A message is
`[header]` or `[header | raw buffers ...]`; the header is one msgpack `Request` (worker) or `Reply` / `Notice`
(daemon). `Observe` carries one raw float16 buffer. The daemon may answer late (a fork waits for a copy), never twice
differently: replies are remembered by `(client_id, request id)`, so a worker that re-sends gets the first answer.

Versions. A session's page table has a version; the daemon sends each change as a `Plan` in a `Notice`; the worker
adopts plans between steps and names the version it uses in `seen` of its next message. Memory that a plan took away
is reused only after every session that could read it has said so.

GPUs. Where the HBM pool is a GPU's (`Attached.device`), a worker tells of tokens, versions and ends only when the
kernels that it launched before are done with the pages concerned; what the daemon tells of is written when it does.

Trust. Peers are processes of one user. Every field is still validated: a malformed frame is answered with a
`Failure` where a header could be read, dropped and counted otherwise, and never changes state.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from tierkv.errors import ProtocolError
from tierkv.figures import SessionFigures
from tierkv.geometry import DTypeName
from tierkv.hint_messages import AgentHint, HintKind

PROTOCOL_VERSION = 7
MAX_HEADER_BYTES = 64 << 20
MAX_REQUEST_PAGES = 65_536
ATTACH_SOCKET = "attach.sock"
REQUEST_SOCKET = "requests.sock"
FAREWELL = b"\0"
"""Sent on the attach stream before it is closed: no kernel of this worker reads or writes the HBM pool any more."""


class _Struct(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class GeometryFields(_Struct, array_like=True):
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeName
    page_tokens: int


class PageEntry(_Struct, array_like=True):
    """One row of a page table as the daemon states it. Offsets are bytes into the pools, -1 where there is none.

    `digest` lies in HBM, and only while no replica of the page does.
    """

    page: int
    region: int
    count: int
    kind: int
    offset: int
    host_kind: int = 0
    host_offset: int = -1
    host_checksum: int = 0
    digest: int = -1


class PageChange(_Struct, array_like=True):
    """New replicas of a page that the session already has (same fields as in `PageEntry`)."""

    page: int
    kind: int
    offset: int
    host_kind: int
    host_offset: int
    host_checksum: int
    digest: int = -1


class BlankPage(_Struct, array_like=True):
    """A reserved page: exact, in HBM, not yet written. Both sides take blanks in the order given."""

    page: int
    offset: int


class Plan(_Struct):
    """Table changes of one session; adopting it makes `version` the seen version."""

    session: int
    version: int
    changes: list[PageChange]
    codec_state: int = -1
    """Byte offset in HBM of the codec's per-model state (float32) and, behind it, the digests'; -1 until they exist."""
    digest: str = "deviation"
    """Form of the digests of the session's pages (`tierkv.prefetch.digest_forms`)."""


class TableState(_Struct):
    """A whole page table: the answer to open, fork and crop, and what a worker hands back on re-attach."""

    session: int
    version: int
    length: int  # committed tokens: the horizon
    pages: list[PageEntry]
    blanks: list[BlankPage] = []
    codec_state: int = -1
    tail_open: bool = False
    """The last page still takes tokens (`lay_out` continues it); False after a crop into a sealed page."""
    digest: str = "deviation"


# Attach (Unix stream socket) -------------------------------------------------------------------------------------


class SessionOptions(_Struct, kw_only=True):
    """How a session's pages may be kept.

    `ladder` is what the daemon may do under pressure: `tiered` (exact, low-bit, host), `drop` (exact or gone: what
    the paper does) or `exact` (never demoted). `hbm_budget` caps the session's HBM replica bytes (0: no cap).
    `pins` names regions whose pages stay `exact` or `attendable`; `None` takes the daemon's configuration.
    """

    ladder: str = "tiered"
    hbm_budget: int = 0
    pins: dict[str, str] | None = None


class SessionState(_Struct):
    """One live session as its worker knows it, for adoption by a new owner."""

    table: TableState
    model_id: str
    geometry: GeometryFields
    options: SessionOptions
    step: int


class Attach(_Struct, tag="attach"):
    protocol: int
    client_id: str
    sessions: list[SessionState] = []
    codec: str = ""
    """Of the low-bit pages that the sessions hold; empty without sessions."""
    middle: str = ""
    """Of their pages of the middle form; empty: there is none."""


class Observing(NamedTuple):
    """When and at what attention mass is looked; see the daemon's settings `observe_*`."""

    every: int = 4
    window: int = 1
    queries: int = 16
    layers: int = 0


DEFAULT_OBSERVING = Observing()


class Attached(_Struct, tag="attached"):
    protocol: int
    epoch: int
    endpoint: str
    hbm_bytes: int
    host_bytes: int
    codec: str
    page_tokens: int
    straddle: bool
    observing: Observing
    heartbeat_seconds: float
    digest_layers: int = 0
    """Last layers of a page that a digest describes, as far as the page has so many; 0: cold pages leave none."""
    middle: str = ""
    """Codec of the form between exact and `codec`; empty: there is none."""
    lost: list[tuple[int, int, int]] = []
    """After adoption: `(session, first token, stop token)` ranges that no replica holds."""
    device: str = ""
    """UUID (32 hexadecimal digits) of the GPU whose memory the HBM pool is; empty: it is this machine's memory."""


class Refused(_Struct, tag="refused"):
    code: str
    message: str


AttachReply = Attached | Refused


# Requests (ZeroMQ) -----------------------------------------------------------------------------------------------


class Open(_Struct, tag="open"):
    model_id: str
    geometry: GeometryFields
    options: SessionOptions


class Fork(_Struct, tag="fork"):
    """A child that shares the committed pages; its open page is a copy."""

    session: int


class Crop(_Struct, tag="crop"):
    """Roll back below the horizon: tokens `[length, horizon)` are forgotten."""

    session: int
    length: int


class Close(_Struct, tag="close"):
    session: int


class Reserve(_Struct, tag="reserve"):
    session: int
    pages: int


class Commit(_Struct, tag="commit"):
    """Tokens up to `length` are final. `runs` are (region, tokens) since the last commit, `steps` decode steps.

    `token_ids` (may be empty) are int32 little-endian bytes, for prefix sharing.
    """

    session: int
    length: int
    runs: list[tuple[int, int]]
    steps: int
    token_ids: bytes = b""


class Audit(_Struct):
    """What one query's attention would have been over all pages, cold ones included. Shares of 1.

    `attended` is what was attended; `oracle` what the best choice of pages of the same bytes would have attended (pages
    by true mass); `estimated` the digests' sum over `missed`, the true mass of all cold pages; `needed_cold` counts
    pages that were not attended although they had at least twice the mass of as many average tokens.
    """

    attended: float
    oracle: float
    missed: float
    estimated: float
    needed_cold: int


class Observe(_Struct, tag="observe"):
    """One raw float16 buffer follows: mass of tokens `[0, tokens)`, NaN where it is not known.

    A token of a cold page has its share of the page's estimated mass. `step` is the session's decode step of the
    observation; at most one a step counts. `blocked`: seconds that steps waited for the daemon since the last one.
    """

    session: int
    step: int
    tokens: int
    audit: Audit | None = None
    blocked: float = 0.0


class Recall(_Struct, tag="recall"):
    """Bring cold pages back as low-bit replicas, most wanted first; answered by `Ready`, when what can be had is there.

    `masses` are the estimates (shares of attention) by which pages that are colder may give way. After `seconds` the
    answer comes with whatever is there; what is still on its way arrives as a plan.
    """

    session: int
    pages: list[int]
    masses: list[float]
    seconds: float


class Pin(_Struct, tag="pin"):
    """Pages that hold tokens `[start, stop)` stay `exact` or `attendable`; `none` lifts the pin."""

    session: int
    start: int
    stop: int
    level: str


class Hint(_Struct, tag="hint"):
    """What the orchestrator knows; `agent` names the step and may pause the session, too."""

    session: int
    hint: HintKind | None = None
    agent: AgentHint | None = None


class Stats(_Struct, tag="stats"):
    """Whole daemon (`session` < 0) or one session."""

    session: int = -1


class Sessions(_Struct, tag="sessions"):
    """Every session of the daemon."""


class Explain(_Struct, tag="explain"):
    """Why a page is where it is: row `page` of the session's table, or the page of token `token`; one of them is -1."""

    session: int
    page: int = -1
    token: int = -1


class Ping(_Struct, tag="ping"):
    pass


class Drain(_Struct, tag="drain"):
    """Stop admitting sessions and pages; finish moves."""


Operation = (
    Open | Fork | Crop | Close | Reserve | Commit | Observe | Recall | Pin | Hint | Stats | Sessions | Explain | Ping
    | Drain
)  # fmt: skip


class Request(_Struct, kw_only=True):
    """`deadline` is in seconds from receipt (0: none); `seen` maps sessions to adopted table versions."""

    id: int
    epoch: int
    op: Operation
    deadline: float = 0.0
    seen: dict[int, int] = {}


# Replies ---------------------------------------------------------------------------------------------------------


class Done(_Struct, tag="done"):
    pass


class Table(_Struct, tag="table"):
    """Answer to `Open`, `Fork` and `Crop`."""

    table: TableState


class Reserved(_Struct, tag="reserved"):
    blanks: list[BlankPage]


class Ready(_Struct, tag="ready"):
    """Answer to `Recall`: adopt the plan that makes the table `version`, then go on."""

    version: int


class StatsResult(_Struct, tag="stats"):
    values: dict[str, float]


class SessionsResult(_Struct, tag="sessions"):
    sessions: list[SessionFigures]


class Replica(_Struct):
    """One copy of a page: `exact`, `low-bit` or a `digest`, in `hbm` or `host`."""

    form: str
    pool: str
    bytes: int


class Threshold(_Struct):
    """`met`: the score stands where the name says; a score equal to the value is above it."""

    value: float
    met: bool


class Explained(_Struct, tag="explained", kw_only=True):
    """What is known of one page. `why` and `next` say it in sentences; the rest is what they follow from.

    Attributes:
        clock: the step by which scores age: ahead of `step` while the session is paused.
        page: row in the session's table, of `pages` rows; `id` is its number everywhere.
        start: first token; it holds `tokens` from there on.
        open: it still takes tokens, and is not moved until it is full.
        shared_by: sessions that name it.
        tier: what attention reads: `hbm` (exact), `middle`, `quantized`, `host` (not attended in place of HBM)
            or `dropped`.
        goal: where it is on its way to; empty: nowhere.
        moved_ago: decode steps since the last change of tier, None if there was none; `moved_why` is its reason.
        guards: how far it may be demoted, by reason (`pin`, `sink`, `recent`, `stopped`): `exact`, `recent`
            (exact, unless nothing else can give way) or `attendable` (may be low-bit, not leave HBM).
        score: the highest that the policy gives it in any session; `scored_by` is that session, of its tokens are
            `terms`, and `verdict` is what the policy's own rule would do, in words, if it has one.
        rank: 1 for the lowest score of the session's pages; equals share a rank.
        mass: share of attention, observed or, while it is cold, estimated; over the latest observations.
    """

    session: int
    step: int
    clock: float
    page: int
    pages: int
    id: int
    start: int
    tokens: int
    region: str
    open: bool
    shared_by: int
    tier: str
    replicas: list[Replica]
    goal: str
    moved_ago: float | None
    moved_why: str
    ladder: str
    guards: dict[str, str]
    policy: str
    score: float
    scored_by: int
    terms: dict[str, float]
    verdict: str
    rank: int
    thresholds: dict[str, Threshold]
    mass: float
    why: str
    next: list[str]


class Failure(_Struct, tag="failure"):
    """`code` names a class of `tierkv.errors`; `retry_after` in seconds for backpressure."""

    code: str
    message: str
    retry_after: float = 0.0


Result = Done | Table | Reserved | Ready | StatsResult | SessionsResult | Explained | Failure


class Reply(_Struct, tag="reply"):
    id: int
    epoch: int
    result: Result


class Notice(_Struct, tag="notice"):
    """Unsolicited: plans to adopt at the next step boundary."""

    epoch: int
    plans: list[Plan]


FromDaemon = Reply | Notice

_request = msgspec.msgpack.Decoder(Request)
_from_daemon = msgspec.msgpack.Decoder(FromDaemon)
_attach = msgspec.msgpack.Decoder(Attach)
_attach_reply = msgspec.msgpack.Decoder(AttachReply)
encode = msgspec.msgpack.Encoder().encode


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], raw: bytes | memoryview, what: str) -> _T:
    if len(raw) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{what} of {len(raw):,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} is not readable: {error}") from None


def decode_request(raw: bytes | memoryview) -> Request:
    """Raises `ProtocolError`."""
    return _decode(_request, raw, "request header")


def decode_from_daemon(raw: bytes | memoryview) -> FromDaemon:
    """Raises `ProtocolError`."""
    return _decode(_from_daemon, raw, "reply header")


def decode_attach(raw: bytes | memoryview) -> Attach:
    """Raises `ProtocolError`."""
    return _decode(_attach, raw, "attach message")


def decode_attach_reply(raw: bytes | memoryview) -> AttachReply:
    """Raises `ProtocolError`."""
    return _decode(_attach_reply, raw, "attach reply")
