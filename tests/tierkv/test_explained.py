"""An explanation as lines for a person."""

from __future__ import annotations

import math

import pytest

from tierkv.client import Client
from tierkv.errors import RequestError
from tierkv.explained import rows
from tierkv.protocol import Explained, Replica, Threshold

PAGE = {
    "session": 9, "step": 40, "clock": 40.0, "page": 3, "pages": 10, "id": 0x1F, "start": 48, "tokens": 16,
    "region": "tool_out", "open": False, "shared_by": 1, "tier": "quantized", "goal": "", "moved_ago": 4.0,
    "replicas": [Replica("low-bit", "hbm", 2048), Replica("exact", "host", 8192)], "moved_why": "pressure",
    "ladder": "tiered", "guards": {}, "policy": "memdecay", "score": 0.25, "scored_by": 9, "terms": {"age": 12.0},
    "verdict": "", "rank": 2, "mass": 0.125, "why": "so", "next": ["one thing", "or another"],
    "thresholds": {"offload_below": Threshold(0.3, True), "promote_above": Threshold(0.2, True)},
}  # fmt: skip


def lines(**changes: object) -> list[tuple[str, str]]:
    return rows(Explained(**{**PAGE, **changes}))  # type: ignore[arg-type]


def test_every_fact_has_its_line() -> None:
    assert lines() == [
        ("page", "3 of session 9 (0 to 9); everywhere 0x1f"),
        ("holds", "tokens 48 to 63, tool_out"),
        ("is", "low-bit in HBM"),
        ("why", "so"),
        ("copies", "low-bit in HBM (2 KiB), exact in host memory (8 KiB)"),
        ("ladder", "tiered"),
        ("guard", "none"),
        ("step", "40"),
        ("score", "0.25 by memdecay, 1 of the session's other 9 pages is colder"),
        ("", "age 12"),
        ("thresholds", "below offload_below (0.3), not below promote_above (0.2)"),
        ("attention", "12.50% of a query's, observed lately"),
        ("next", "one thing"),
        ("", "or another"),
    ]


def test_what_is_unusual_is_said_in_its_place() -> None:
    said = dict(lines(
        open=True, shared_by=3, clock=1234.5, tier="host", scored_by=8, verdict="evict: old", replicas=[],
        guards={"pin": "attendable", "sink": "exact"}, thresholds={"drop_below": Threshold(-math.inf, False)},
        next=["nothing"],
    ))  # fmt: skip
    assert said["holds"] == "tokens 48 to 63, tool_out, still open, shared by 3 sessions"
    assert said["step"] == "40; paused, so scores age by the wall: as if at 1,234"
    assert said["copies"] == "none"
    assert said["guard"] == "pin: stays in HBM, at least low-bit; sink: stays exact"
    assert said[""] == "of session 8: age 12"
    assert said["thresholds"] == "not below drop_below (-inf)"
    assert said["attention"] == "12.50% of a query's, estimated lately"
    assert said["verdict"] == "evict: old"


def test_a_policy_without_terms_has_no_line_for_them() -> None:
    assert "" not in dict(lines(terms={}, next=["nothing"]))


@pytest.mark.parametrize(
    ("session", "page", "token", "said"),
    [
        (5, None, None, "either a page or a token"),
        (5, 0, 0, "either a page or a token"),
        (5, -1, None, "no page -1 of session 5"),
        (5, None, 2**70, f"no token {2**70} of session 5"),
        (2**64, 0, None, f"no page 0 of session {2**64}"),
    ],
)
def test_what_no_message_can_ask_is_refused_before_it_is_sent(
    session: int, page: int | None, token: int | None, said: str
) -> None:
    client = object.__new__(Client)  # without a daemon: nothing may be sent
    with pytest.raises(RequestError, match=said):
        client.explain(session, page, token=token)
    with pytest.raises(TypeError, match="integer"):
        client.explain("5", 0)  # type: ignore[arg-type]
