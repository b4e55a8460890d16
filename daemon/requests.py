"""From the wire to the brain: every field is checked, then the operation becomes an event.

A request that cannot be is refused with a class of `tierkv.errors` and changes nothing. What only the brain can know
(whether a session is this client's, whether there is room) is the brain's to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierkv import errors
from tierkv.daemon import events
from tierkv.daemon.hint_checks import agent_hint, hint
from tierkv.geometry import Geometry
from tierkv.protocol import (
    MAX_REQUEST_PAGES,
    Audit,
    Close,
    Commit,
    Crop,
    Fork,
    GeometryFields,
    Hint,
    Observe,
    Open,
    Operation,
    Pin,
    Recall,
    Reserve,
    SessionOptions,
)
from tierkv.regions import Run, parse_region

MAX_TOKENS = 1 << 26
"""Longest session; beyond it a number is a mistake."""

MAX_NAME = 256
"""Characters of a model id."""

MAX_RUNS = 1 << 16
"""Runs in one commit."""

MASS_SLACK = 1.01
"""A probability may exceed 1 by the rounding of float16 and of an average."""

MAX_WAIT_SECONDS = 3600.0

LADDERS = ("tiered", "drop", "exact")
PIN_LEVELS = ("exact", "attendable", "none")
MAX_ID = (1 << 63) - 1

Buffers = Sequence[memoryview]


def to_event(client: str, token: int, op: Operation, buffers: Buffers) -> events.Event:
    """The event that `op` asks for, answered under `token`.

    Raises:
        ProtocolError: buffers that the operation does not have, or not of the announced length.
        RequestError: a value that cannot be.
    """
    if not isinstance(op, Observe) and buffers:
        raise errors.ProtocolError(f"{len(buffers)} buffers came with an operation that has none")
    match op:
        case Open():
            return events.Opened(
                token, client, _model(op.model_id), geometry(op.geometry), options(op.options)
            )
        case Fork():
            return events.Forked(token, client, _session(op.session))
        case Crop():
            return events.Cropped(token, client, _session(op.session), _within(op.length, "length"))
        case Close():
            return events.Closed(token, client, _session(op.session))
        case Reserve():
            pages = _within(op.pages, "pages", MAX_REQUEST_PAGES, least=1)
            return events.Reserved(token, client, _session(op.session), pages)
        case Commit():
            return _committed(client, token, op)
        case Observe():
            return _observed(client, token, op, buffers)
        case Recall():
            return _recalled(client, token, op)
        case Pin():
            return _pinned(client, token, op)
        case Hint():
            return events.Hinted(token, client, _session(op.session), hint(op.hint), agent_hint(op.agent))
        case _:
            raise errors.ProtocolError(f"{type(op).__name__} is no event")


def geometry(fields: GeometryFields) -> Geometry:
    """Raises `GeometryMismatch` for a shape that cannot be."""
    try:
        return Geometry(
            fields.num_layers, fields.num_kv_heads, fields.head_dim, fields.dtype, fields.page_tokens
        )
    except errors.ConfigError as error:
        raise errors.GeometryMismatch(str(error)) from None


def options(given: SessionOptions) -> SessionOptions:
    if given.ladder not in LADDERS:
        raise errors.RequestError(f"ladder {given.ladder!r} does not exist; use one of {', '.join(LADDERS)}")
    _within(given.hbm_budget, "hbm_budget", MAX_ID)
    for region, level in (given.pins or {}).items():
        parse_region(region)
        _level(level)
    return given


def _committed(client: str, token: int, op: Commit) -> events.Committed:
    if len(op.runs) > MAX_RUNS:
        raise errors.RequestError(f"{len(op.runs):,} runs in one commit; at most {MAX_RUNS:,}")
    runs = tuple(
        Run(parse_region(region), _within(tokens, "tokens of a run", least=1)) for region, tokens in op.runs
    )
    total = sum(run.tokens for run in runs)
    length = _within(op.length, "length")
    if total > length:
        raise errors.RequestError(f"runs of {total} tokens do not fit into a length of {length}")
    if len(op.token_ids) not in (0, 4 * total):
        raise errors.RequestError(
            f"{len(op.token_ids)} bytes of token ids for {total} tokens; 4 a token, or none"
        )
    token_ids = np.frombuffer(op.token_ids, "<i4")
    return events.Committed(
        token, client, _session(op.session), length, runs, _within(op.steps, "steps"), token_ids
    )


def _observed(client: str, token: int, op: Observe, buffers: Buffers) -> events.Observed:
    tokens = _within(op.tokens, "tokens", least=1)
    if len(buffers) != 1 or len(buffers[0]) != 2 * tokens:
        sizes = ", ".join(str(len(buffer)) for buffer in buffers) or "no buffer"
        raise errors.ProtocolError(
            f"an observation of {tokens} tokens is one buffer of {2 * tokens} bytes, not {sizes}"
        )
    step, mass = _within(op.step, "step"), _mass(buffers[0])
    if not 0.0 <= op.blocked < math.inf:
        raise errors.RequestError(f"blocked is {op.blocked:g}; it must be a number of 0 or more")
    return events.Observed(token, client, _session(op.session), step, mass, _audit(op.audit), op.blocked)


def _audit(audit: Audit | None) -> Audit | None:
    if audit is not None:
        _within(audit.needed_cold, "needed_cold")
        for name in ("attended", "oracle", "missed"):
            _share(getattr(audit, name), name)
        if not 0.0 <= audit.estimated < math.inf:
            raise errors.RequestError(f"estimated is {audit.estimated:g}; it must be a number of 0 or more")
    return audit


def _recalled(client: str, token: int, op: Recall) -> events.Recalled:
    if len(op.pages) > MAX_REQUEST_PAGES or len(op.pages) != len(op.masses):
        raise errors.RequestError(
            f"{len(op.pages)} pages with {len(op.masses)} masses; one each, at most {MAX_REQUEST_PAGES}"
        )
    masses = tuple(_share(mass, "a mass") for mass in op.masses)
    if not 0.0 <= op.seconds <= MAX_WAIT_SECONDS:
        raise errors.RequestError(f"seconds is {op.seconds:g}; a recall may wait 0 to {MAX_WAIT_SECONDS:g}")
    return events.Recalled(token, client, _session(op.session), tuple(op.pages), masses, op.seconds)


def _share(value: float, name: str) -> float:
    if not 0.0 <= value <= MASS_SLACK:  # False for NaN, too
        raise errors.RequestError(f"{name} is {value:g}; a share of attention is between 0 and 1")
    return value


def _mass(buffer: memoryview) -> NDArray[np.float32]:
    mass = np.frombuffer(buffer, "<f2").astype(np.float32)
    low, high = float(np.nanmin(mass, initial=0.0)), float(np.nanmax(mass, initial=0.0))
    if low < 0.0 or high > MASS_SLACK:
        raise errors.RequestError(
            f"mass between {low:g} and {high:g}; attention probabilities are between 0 and 1"
        )
    return mass


def _pinned(client: str, token: int, op: Pin) -> events.Pinned:
    start, stop = _within(op.start, "start"), _within(op.stop, "stop")
    if start > stop:
        raise errors.RequestError(f"the range [{start}, {stop}) is reversed")
    return events.Pinned(token, client, _session(op.session), start, stop, _level(op.level))


def _model(name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME:
        raise errors.RequestError(f"a model id has 1 to {MAX_NAME} characters, not {len(name)}")
    return name


def _level(level: str) -> str:
    if level not in PIN_LEVELS:
        raise errors.RequestError(f"pin level {level!r} does not exist; use one of {', '.join(PIN_LEVELS)}")
    return level


def _session(session: int) -> int:
    return _within(session, "session", MAX_ID)


def _within(value: int, name: str, most: int = MAX_TOKENS, least: int = 0) -> int:
    if not least <= value <= most:
        raise errors.RequestError(f"{name} is {value}; it must be between {least} and {most}")
    return value
