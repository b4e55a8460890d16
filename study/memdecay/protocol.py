"""Scores over a trace: which of its queries a policy observes, and when.

A stage's last `burst` tokens are decode steps (the final stage's last `final_burst`), the rest of it is a prompt. The
clock counts decode steps. The paper observes decode steps only; `prompt_window` also observes the last queries of each
prompt, at the step it came at, as the daemon does.
"""

from __future__ import annotations

from typing import NamedTuple

from tierkv.daemon.policy import Policy, TokenState
from tierkv.study.memdecay.traces import Trace


class Protocol(NamedTuple):
    burst: int = 8
    final_burst: int = 8
    every: int = 1  # k: of the decode steps, each k-th is observed
    prompt_window: int = 0


PAPER = Protocol()
FIT = Protocol(final_burst=48)
"""What the paper fits rates on; it evicts after `PAPER`: its asymmetry."""


class Scored(NamedTuple):
    state: TokenState
    step: int


def run(trace: Trace, policy: Policy, protocol: Protocol = PAPER) -> Scored:
    """The policy's state after it has seen the trace, and the decode step it is at."""
    state, step, begin = policy.new_state(), 0, 0
    rows = dict(trace.rows())
    stages = trace.stages.tolist()
    for end in stages:
        burst = min(protocol.final_burst if end == stages[-1] else protocol.burst, end - begin)
        state.append(trace.regions[begin : end - burst], step)
        for query in range(max(begin, end - burst - protocol.prompt_window), end - burst):
            state.observe(rows[query], step)
        for query in range(end - burst, end):
            step += 1
            state.append(trace.regions[query : query + 1], step)
            if step % protocol.every == 0:
                state.observe(rows[query], step)
        begin = end
    return Scored(state, step)
