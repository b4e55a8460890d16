"""What the loop remembers of one worker: its lease, the answers it may ask for again, and what is still to be sent.

Everything for one worker leaves in order and nothing is skipped: a table that was answered is sent before a plan that
changes it, also when the worker is stopped and its queue is full. Plans that wait are merged, so a stopped worker
costs a bounded amount of memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from tierkv.protocol import Notice, Plan, Reply, encode

DEDUPE_REPLIES = 1024
"""Answers remembered a worker; older requests are refused when they are sent again."""

MAX_PENDING = 4096
"""Requests of one worker that wait for the brain."""


class Waiting(dict[int, Plan]):
    """Plans by session that were not sent yet."""

    def merge(self, plan: Plan) -> None:
        """Later changes of a page replace earlier ones; the version is the last one's."""
        earlier = self.get(plan.session)
        if earlier is None:
            self[plan.session] = plan
            return
        changes = {change.page: change for change in (*earlier.changes, *plan.changes)}
        self[plan.session] = Plan(
            plan.session, plan.version, list(changes.values()), plan.codec_state, plan.digest
        )


@dataclass(eq=False)
class Peer:
    """One attached worker."""

    client: str
    heard_at: float
    lease_expired: bool = False
    outbox: deque[bytes | Waiting] = field(default_factory=deque)
    pending: set[int] = field(default_factory=set)
    replies: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    forgotten: int = 0
    """Highest request id whose answer is not remembered any more."""

    @property
    def identity(self) -> bytes:
        return self.client.encode()

    def is_pending(self, request: int) -> bool:
        return request in self.pending

    def remember(self, reply: Reply) -> None:
        """Queue the answer, and keep it for a worker that asks again."""
        raw = encode(reply)
        self.pending.discard(reply.id)
        self.replies[reply.id] = raw
        while len(self.replies) > DEDUPE_REPLIES:
            self.forgotten = max(self.forgotten, self.replies.popitem(last=False)[0])
        self.outbox.append(raw)

    def queue_plan(self, plan: Plan) -> None:
        if not self.outbox or not isinstance(self.outbox[-1], Waiting):
            self.outbox.append(Waiting())
        waiting = self.outbox[-1]
        assert isinstance(waiting, Waiting)
        waiting.merge(plan)

    def frame(self, epoch: int) -> bytes | None:
        """The next message to send; call `sent` when it went out."""
        if not self.outbox:
            return None
        head = self.outbox[0]
        return encode(Notice(epoch, list(head.values()))) if isinstance(head, Waiting) else head

    def sent(self) -> None:
        self.outbox.popleft()
