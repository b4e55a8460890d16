"""One page's explanation as a person reads it: a label and a text a line."""

from __future__ import annotations

from tierkv.daemon.limits import show_bytes
from tierkv.protocol import Explained

WHERE = {
    "hbm": "exact in HBM",
    "middle": "in the middle form in HBM",
    "quantized": "low-bit in HBM",
    "host": "in host memory only",
    "dropped": "nowhere: it was dropped",
}

POOLS = {"hbm": "HBM", "host": "host memory"}

HELD = {
    "exact": "stays exact",
    "recent": "stays exact, unless nothing else can give way",
    "attendable": "stays in HBM, at least low-bit",
}


def rows(told: Explained) -> list[tuple[str, str]]:
    """What it is, where, why, by which numbers, and what comes next; further lines of a label have an empty one."""
    last = told.start + told.tokens - 1
    which = f"{told.page} of session {told.session} (0 to {told.pages - 1}); everywhere {told.id:#x}"
    paused = (
        f"; paused, so scores age by the wall: as if at {told.clock:,.0f}" if told.clock > told.step else ""
    )
    state = [f"tokens {told.start} to {last}", told.region]
    state += ["still open"] if told.open else []
    state += [f"shared by {told.shared_by} sessions"] if told.shared_by > 1 else []
    copies = [f"{copy.form} in {POOLS[copy.pool]} ({show_bytes(copy.bytes)})" for copy in told.replicas]
    found = [
        ("page", which),
        ("holds", ", ".join(state)),
        ("is", WHERE[told.tier]),
        ("why", told.why),
        ("copies", ", ".join(copies) or "none"),
        ("ladder", told.ladder),
        ("guard", "; ".join(f"{why}: {HELD[level]}" for why, level in told.guards.items()) or "none"),
        ("step", f"{told.step:,}{paused}"),
        ("score", f"{told.score:.3g} by {told.policy}, {_rank(told)}"),
        ("", _terms(told)),
        ("thresholds", ", ".join(_sides(told))),
        (
            "attention",
            f"{told.mass:.2%} of a query's, {'estimated' if told.tier == 'host' else 'observed'} lately",
        ),
    ]
    if told.verdict:
        found.append(("verdict", told.verdict))
    found += [("next" if not number else "", line) for number, line in enumerate(told.next)]
    return [(label, text) for label, text in found if text]


def _rank(told: Explained) -> str:
    colder = told.rank - 1
    return f"{colder} of the session's other {told.pages - 1} pages {'is' if colder == 1 else 'are'} colder"


def _terms(told: Explained) -> str:
    terms = ", ".join(f"{name} {value:.4g}" for name, value in told.terms.items())
    other = f"of session {told.scored_by}: " if told.scored_by != told.session else ""
    return other + terms if terms else ""


def _sides(told: Explained) -> list[str]:
    sides = []
    for name, threshold in told.thresholds.items():
        below = threshold.met == name.endswith("_below")
        sides.append(f"{'below' if below else 'not below'} {name} ({threshold.value:.3g})")
    return sides
