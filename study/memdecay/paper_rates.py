"""Half-lives of the paper (arXiv 2607.10582, Table II): beside ours, not to be reached."""

from __future__ import annotations

PAPER_TABLE: dict[str, dict[str, tuple[int, int, int]]] = {
    "1.5B short": {
        "system": (150, 126, 182), "plan": (33, 27, 38), "user": (27, 24, 31), "tool_in": (26, 21, 32),
        "tool_out": (33, 27, 38), "retrieval": (48, 38, 61), "scratchpad": (14, 13, 15),
    },
    "1.5B long": {
        "system": (148, 136, 166), "plan": (44, 40, 49), "user": (31, 27, 35), "tool_in": (22, 19, 25),
        "tool_out": (37, 32, 42), "retrieval": (76, 59, 95), "scratchpad": (14, 13, 15),
    },
    "3B long": {
        "system": (189, 174, 206), "plan": (52, 49, 55), "user": (35, 30, 40), "tool_in": (26, 22, 29),
        "tool_out": (39, 32, 50), "retrieval": (66, 50, 92), "scratchpad": (16, 15, 17),
    },
}  # fmt: skip
"""Table II, Qwen2.5: half-life and its 95% interval."""
