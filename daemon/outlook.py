"""Sentences about one page: how it came to where it is, and what would move it next.

They restate the rules of pressure.py, promotion.py, recall.py and hostroom.py for the one page that is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierkv.daemon.pages import NEVER, REASONS, Goal, Guard, Ladder
from tierkv.daemon.sessions import Session
from tierkv.daemon.state import State
from tierkv.table import NOWHERE, Kind

BECAME = {
    "hbm": "became exact",
    "middle": "took the middle form",
    "quantized": "became low-bit",
    "host": "left HBM",
    "dropped": "was dropped",
}

BECAUSE = {
    "pressure": "room was wanted",
    "budget": "its session's HBM budget was used up",
    "threshold": "its score fell below the threshold",
    "room": "there was room for it",
    "pin": "it is pinned",
    "hot": "its score reached promote_above",
    "pause": "its session is paused, or it was superseded, and room was wanted",
    "resume": "its session resumes, or was about to",
    "hint": "a hint named it",
    "host-full": "host memory was full and its score below drop_below",
    "checksum": "its copy in host memory was damaged",
}

ON_ITS_WAY = {
    Goal.MIDDLE: "is taking the middle form now",
    Goal.QUANTIZED: "is becoming low-bit now",
    Goal.HOST: "is leaving HBM for host memory now",
    Goal.EXACT: "is becoming exact now",
    Goal.LOWBIT: "is coming back from host memory now",
    Goal.RELOCATE: "is changing its place in HBM now, to empty a frame",
}


class Facts(NamedTuple):
    """Of one page of one session, as found out by `explain`."""

    slot: int
    row: int
    session: Session
    tier: str
    guards: dict[str, Guard]
    score: float

    @property
    def stop(self) -> int:
        """Behind its last token."""
        starts = self.session.starts.view
        return int(starts[self.row + 1]) if self.row + 1 < len(starts) else self.session.length

    @property
    def guard(self) -> Guard:
        return max(self.guards.values(), default=Guard.NONE)


def moved_ago(state: State, slot: int) -> float:
    """Decode steps since the page last changed its tier; infinite if it never did."""
    owner = state.sessions[int(state.pages.owner[slot])]
    return owner.step - float(state.pages.moved_step[slot])


def why(state: State, facts: Facts) -> str:
    """How the page came to its tier."""
    ago, reason = moved_ago(state, facts.slot), REASONS[state.pages.moved_why[facts.slot]]
    if ago == -NEVER:
        return "it was written there" if facts.tier == "hbm" else "it was there when this owner took over"
    if reason == "recall":
        because = (
            "a page with more attention took its place"
            if facts.tier == "host"
            else "attention was expected on it"
        )
    elif reason == "budget" and facts.tier == "dropped":
        because = BECAUSE["pressure"]
    else:
        because = BECAUSE[reason]
    return f"it {BECAME[facts.tier]} {ago:g} steps ago: {because}"


def what_next(state: State, facts: Facts) -> list[str]:
    """What would move the page, the nearest first; `nothing: ...` where nothing would."""
    pages, slot = state.pages, facts.slot
    if facts.tier == "dropped":
        start = int(facts.session.starts.view[facts.row])
        return [f"nothing: no copy is left; crop to {start} tokens and prefill again"]
    if pages.goal[slot]:
        return [ON_ITS_WAY[Goal(int(pages.goal[slot]))]]
    if not pages.sealed[slot]:
        left = state.config.page_tokens - int(pages.count[slot])
        return [f"nothing while it is open: it takes {left} more tokens, or the next region closes it"]
    ladder = Ladder(int(pages.ladder[slot]))
    if ladder is Ladder.EXACT:
        return ["nothing: its session's ladder is exact"]
    found = list(_holding(state, facts))
    if ladder is Ladder.DROP:
        if facts.guard == Guard.NONE:
            found.append(f"is dropped for good when {_wanted(state, facts)}")
    elif facts.tier == "hbm":
        found += _from_exact(state, facts)
    elif facts.tier == "middle":
        found += _from_middle(state, facts)
    elif facts.tier == "quantized":
        found += _from_low_bit(state, facts)
    else:
        found += _from_host(state, facts)
    return found


def _holding(state: State, facts: Facts) -> Iterator[str]:
    """What keeps it from being moved, for now or for good."""
    pages, slot, config = state.pages, facts.slot, state.config
    if pages.retry_at[slot] > state.now:
        yield f"is left alone for {pages.retry_at[slot] - state.now:.2f} s: a move of it failed"
    owner = state.sessions[int(pages.owner[slot])]
    if owner.step < pages.wanted_until[slot]:
        yield f"gives way last until step {pages.wanted_until[slot]:.0f}: it was recalled for these steps"
    if pages.linked[slot]:
        yield "gives way last: the present step depends on it"
    if pages.stale[slot]:
        yield "gives way before all others: its tokens were superseded"
    elif pages.held[slot]:
        yield "gives way by its score when its session stopped: that is paused, and may resume any moment"
    elif pages.back_at[slot] > 0:
        back = pages.back_at[slot] - state.now
        when = f"in {back:.1f} s" if back < 1e9 else "no more"
        yield f"gives way before pages of sessions that run: its own is paused, and expected back {when}"
    if "retained" in facts.guards:
        yield f"stays in HBM for {pages.retained_until[slot] - state.now:.1f} s more: a hint retains it"
    if "stopped" in facts.guards:
        yield "stays until its worker, which is silent, is heard again"
    if "sink" in facts.guards:
        yield f"is not demoted: it holds one of the first {config.sink_tokens} tokens"
    if facts.guards.get("pin") == Guard.EXACT:
        yield "is not demoted while it is pinned"
    elif "pin" in facts.guards and facts.guard < Guard.EXACT:
        yield "stays in HBM while it is pinned, at least low-bit"
    if "recent" in facts.guards:
        left = config.recent_tokens - (facts.session.length - facts.stop)
        until = f"for {left} more tokens" if left > 0 else "while it is recent in a session that shares it"
        stays = "exact, unless nothing else can give way" if facts.tier == "hbm" else "in HBM"
        yield f"stays {until} {stays}"


def _from_exact(state: State, facts: Facts) -> Iterator[str]:
    if state.pages.refused[facts.slot]:
        yield "cannot become low-bit: the codec refused its values"
        if facts.guard == Guard.NONE:
            yield f"leaves HBM as it is when {_wanted(state, facts)}"
    elif facts.guard <= Guard.ATTENDABLE:
        form, threshold = ("middle", "middle_below") if state.middle else ("quantized", "quantize_below")
        replica = state.pages.middle if state.middle else state.pages.quant
        ready = " (that form is ready)" if replica[facts.slot] != NOWHERE else ""
        does = "takes the middle form" if form == "middle" else "becomes low-bit"
        yield f"{does}{ready} when {_below(state, facts, threshold)}"
        if state.middle:
            yield "becomes low-bit instead where the middle form has no room, or host memory none for an exact copy"


def _from_low_bit(state: State, facts: Facts) -> Iterator[str]:
    if facts.guard == Guard.NONE:
        yield f"leaves HBM when {_below(state, facts, 'offload_below', ', no low-bit slot is left')}"
        yield "leaves HBM, too, for a cold page on which more attention is expected"
    yield from _back_to_exact(state, facts)


def _from_middle(state: State, facts: Facts) -> Iterator[str]:
    pages, slot = state.pages, facts.slot
    if pages.host_kind[slot] != Kind.EXACT or pages.refused[slot]:
        yield "cannot become low-bit: " + (
            "the codec refused its values" if pages.refused[slot] else "no exact copy is left to make it from"
        )
        if facts.guard == Guard.NONE:
            yield f"leaves HBM as it is when {_wanted(state, facts)}"
    elif facts.guard <= Guard.ATTENDABLE:
        besides = ", no exact page may give way"
        yield f"becomes low-bit when {_below(state, facts, 'quantize_below', besides)}"
    yield from _back_to_exact(state, facts)


def _back_to_exact(state: State, facts: Facts) -> Iterator[str]:
    pages, slot = state.pages, facts.slot
    if pages.host_kind[slot] != Kind.EXACT:
        yield "cannot become exact again: no exact copy is left"
    elif facts.guards.get("pin") == Guard.EXACT:
        yield "becomes exact as soon as a frame is free"
    else:
        left = state.config.min_residency_steps - moved_ago(state, slot)
        rest = f", in {left:g} steps at the earliest" if left > 0 else ""
        yield (
            f"becomes exact when its score reaches promote_above ({_number(state.thresholds.promote_above)}; "
            f"it is {_number(facts.score)}) and a frame is free{rest}"
        )


def _from_host(state: State, facts: Facts) -> Iterator[str]:
    pages, slot, thresholds = state.pages, facts.slot, state.thresholds
    exact = pages.host_kind[slot] == Kind.EXACT
    if exact and pages.refused[slot]:
        yield "is read from host memory only: the codec refused its values"
    elif "pin" in facts.guards:
        yield "comes back, low-bit, as soon as there is a slot"
    else:
        yield "comes back, low-bit, when a step asks for it because it expects attention on it"
        if state.config.demotion == "pressure":
            yield from _coming_back(state, facts)
    if exact and not pages.refused[slot]:
        yield "keeps only a low-bit copy when host memory is full and no colder page is left to compress"
    if facts.score < thresholds.drop_below:
        yield (
            f"is dropped for good when host memory is full: its score, {_number(facts.score)}, is below drop_below "
            f"({_number(thresholds.drop_below)})"
        )


def _coming_back(state: State, facts: Facts) -> Iterator[str]:
    level = state.thresholds.offload_below
    if facts.score >= level or state.pages.mass[facts.slot] > 0:
        yield "comes back, low-bit, when nobody asks for HBM and a slot is free"
    else:
        yield (
            f"does not come back by itself: no attention is expected on it and its score, {_number(facts.score)}, is "
            f"below offload_below ({_number(level)})"
        )


def _below(state: State, facts: Facts, threshold: str, besides: str = "") -> str:
    """When a page that may be demoted is: at a threshold (`demotion = "eager"`), or when its memory is wanted."""
    if state.config.demotion != "eager":
        return _wanted(state, facts, besides)
    value = state.middle_below if threshold == "middle_below" else getattr(state.thresholds, threshold)
    score, level = _number(facts.score), _number(value)
    if facts.score < value:
        return f"its turn comes: its score, {score}, is below {threshold} ({level})"
    return f"its score, {score}, falls below {threshold} ({level}), or room is wanted"


def _wanted(state: State, facts: Facts, besides: str = "") -> str:
    """What makes room be made, what must be so `besides`, and in which order."""
    free, low = state.hbm.free_bytes / state.hbm.size, state.config.low_watermark
    asked = f"under {low:.0%} of HBM free, now {free:.0%}, or a reservation waits"
    budget = facts.session.options.hbm_budget
    if budget:
        asked += f", or its session's budget used up, now {state.hbm_bytes_of(facts.session) / budget:.0%}"
    return f"room is wanted ({asked}){besides} and no colder page can give way"


def _number(value: float) -> str:
    return f"{value:.3g}"
