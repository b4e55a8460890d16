"""A worker's line to the daemon: one thread that owns the socket, re-sends, keeps the lease and finds a new owner.

Callers hand over `Call`s and never touch the socket, but for one that waits for an answer: it may `drive` the line,
that is do the thread's work until the answer is there, which spares two wake-ups of another thread. Whoever holds
`_role` works; the other sleeps. Everything in one epoch arrives in order and at most once is
carried out twice (the daemon remembers answers), so a call is simply sent again until it is answered.

A call that speaks of pages on a GPU carries a fence (`Call.after`) and is held until that is passed, as are versions in
`seen`; heartbeats and what carries none go by.

The owner's death is the end of the attach stream, which the kernel reports; or an answer from a later epoch. Silence
alone is not: leaving a living owner would give up every page, so the line then only goes on asking. After the owner's
death the line attaches to the next one, for as long as the client is open, and carries over what is still in flight:
commits and observations whose effect the handed-back tables already contain count as done, the rest is sent again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import zmq

from tierkv.calls import RESEND_SECONDS, Attachment, Call, Host
from tierkv.errors import OwnerUnavailable, ProtocolError, TierKVError
from tierkv.handshake import say_farewell
from tierkv.protocol import (
    Close,
    Done,
    Failure,
    Ping,
    Reply,
    Request,
    Result,
    decode_from_daemon,
    encode,
)

log = logging.getLogger(__name__)

RESEND_LIMIT_SECONDS = 8.0
"""Longest wait for an answer before a call is sent again."""

FULL_QUEUE_SECONDS = 0.02
"""Wait when the socket takes no more."""

LONGEST_SLEEP_SECONDS = 0.5
"""The thread looks this often for calls that were queued without waking it, and for those to send again, since a driver
may have sent some that it does not know of. The daemon takes a session for paused after twice as long
(`daemon.sessions.IDLE_SECONDS`).
"""

FORK_SECONDS = 1.0
"""How long a fork waits for the line to be between two turns."""

HELD_SECONDS = 0.001
"""How often the fence of a call is looked at that waits for kernels; epoll knows no less."""

ACK_SECONDS = 0.002
"""How long an adopted plan waits for a message that carries the acknowledgement anyway."""

RETRY_SECONDS = (0.01, 0.5)
"""First and longest wait between attempts to find an owner."""

ATTEMPT_SECONDS = 5.0
"""One attach attempt; adoption of many pages takes part of it."""

EVENTS, POLLIN, NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As plain integers, which pyzmq takes faster than its enumerations."""


class Line:
    """Starts attached (`attachment` is the first one's); `close` ends it."""

    def __init__(self, client_id: str, host: Host, attachment: Attachment) -> None:
        self._client_id = client_id
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queue: deque[Call] = deque()
        self._held: deque[Call] = deque()  # until kernels are done
        self._flight: dict[int, Call] = {}
        self._ids = itertools.count(1)
        self._socket: zmq.Socket[bytes] | None = None
        self._stream: socket.socket | None = None
        self._role = threading.Lock()
        self._paused = False
        # Wake, socket and stream; level-triggered, so that nothing is missed by a pause.
        self._watched = select.epoll()
        self._watched.register(self._wake, select.EPOLLIN)
        self._sleep = select.epoll()  # what wakes the thread: `_watched`, unless somebody drives
        self._sleep.register(self._watched, select.EPOLLIN)
        self._ack_due = 0.0
        self._sent_at = self._heard_at = 0.0
        self._retry_at, self._retry_wait = 0.0, RETRY_SECONDS[0]
        self._closing = False
        self.epoch = 0
        self.connected = False
        self.reattached = 0
        self.problem = ""
        """Why no owner could be attached to, for error messages."""
        self._connect(attachment)
        _lines.add(self)
        self._thread = threading.Thread(target=self._run, name="tierkv-line", daemon=True)
        self._thread.start()

    # Any thread --------------------------------------------------------------------------------------------------

    def submit(self, call: Call, wake: bool = True) -> None:
        """Queue a call. Without `wake` it leaves with the next one that wakes, at `flush`, or when the thread looks."""
        self._queue.append(call)
        if self._closing:
            self._fail_all()
        elif wake:
            os.eventfd_write(self._wake, 1)

    def flush(self) -> None:
        """Send what is queued now."""
        if self._queue and not self._closing:
            os.eventfd_write(self._wake, 1)

    def drive(self, done: Callable[[], bool], seconds: float) -> None:
        """Send what is queued and work in the calling thread until `done`, or for `seconds`, or as long as it can.

        Returns early, with the work left to the line's thread, when that is busy itself or the owner is gone: wait for
        the answer as if nothing had been driven. `done` is asked after each turn.
        """
        if self._closing or not self._role.acquire(blocking=False):
            self.flush()
            return
        try:
            self._sleep.modify(self._watched, 0)
            end = time.monotonic() + seconds
            if self.connected:
                self._work()
            while self.connected and not (done() or self._closing):
                now = time.monotonic()
                if now >= end:
                    break
                self._turn(min(end, self._next_due()) - now)
        except Exception:
            log.exception("the line to the daemon met an error and goes on")
        finally:
            self._sleep.modify(self._watched, select.EPOLLIN)
            if self._queue or self._ack_due or self._closing or not self.connected:
                os.eventfd_write(self._wake, 1)
            self._role.release()

    def acknowledge_soon(self) -> None:
        """An adopted plan wants to be acknowledged, with the next message or a little later."""
        if not self._ack_due:
            self._ack_due = time.monotonic() + ACK_SECONDS
        if threading.current_thread() is not self._thread and not self._closing:
            os.eventfd_write(self._wake, 1)

    def silence(self) -> float:
        """Seconds since the daemon was last heard."""
        return time.monotonic() - self._heard_at

    def close(self) -> None:
        """End the thread, fail what is in flight, close the stream (which detaches)."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(ATTEMPT_SECONDS + 1.0)
        mine = self._role.acquire(timeout=ATTEMPT_SECONDS)
        if self._stream is not None:
            say_farewell(self._stream)
        self._disconnect()
        self._context.destroy(linger=0)
        self._fail_all()
        if mine:
            self._role.release()
        self._sleep.close()
        self._watched.close()
        os.close(self._wake)

    # The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            try:
                if self.connected:
                    self._sleep.poll(min(LONGEST_SLEEP_SECONDS, max(0.0, due - time.monotonic())))
                with self._role:
                    if self.connected:
                        self._turn(0.0)
                    else:
                        self._find_owner()
                    due = self._next_due()
            except Exception:
                log.exception("the line to the daemon met an error and goes on")
                time.sleep(FULL_QUEUE_SECONDS)

    # With the role -----------------------------------------------------------------------------------------------

    def _turn(self, wait: float) -> None:
        """Sleep until something happens, for `wait` seconds at most, and do what is to be done."""
        stream = self._stream
        assert stream is not None
        ready = [descriptor for descriptor, _ in self._watched.poll(max(0.0, wait))]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._work()
        if self.connected and stream is self._stream and stream.fileno() in ready and self._ended():
            log.warning("the owner of epoch %d is gone", self.epoch)
            self._disconnect()

    def _work(self) -> None:
        """Send what is queued or due, and take what has come.

        The socket's descriptor tells of a message only once, and sending may consume that: so the last look at
        `EVENTS` comes after the last sending, and finds nothing.
        """
        self._timers()
        while self.connected:
            while self._queue:
                self._dispatch(self._queue.popleft())
            self._release()
            self._receive()
            if not self._queue:
                return

    def _next_due(self) -> float:
        due = self._sent_at + self._heartbeat
        if self._ack_due:
            due = min(due, self._ack_due)
        if self._held:
            due = min(due, time.monotonic() + HELD_SECONDS)
        for call in self._flight.values():
            due = min(due, call.due)
        return due

    def _timers(self) -> None:
        now = time.monotonic()
        for call in list(self._flight.values()):
            if call.due <= now:
                call.wait = min(2 * call.wait, RESEND_LIMIT_SECONDS)
                self._transmit(call, now)
        if self._ack_due and self._ack_due <= now:
            seen = self._host.take_seen()
            self._ack_due = now + ACK_SECONDS if self._host.unseen() else 0.0
            if seen:
                self._send(Call(Ping(), lambda result: None), seen)
        if self._sent_at + self._heartbeat <= now:
            self._send(Call(Ping(), lambda result: None))

    def _dispatch(self, call: Call) -> None:
        if call.after is None:
            self._send(call)
        else:
            self._held.append(call)

    def _release(self) -> None:
        """Send what waited for kernels that are done."""
        while self._held:
            fence = self._held[0].after
            assert fence is not None
            try:
                if not fence.query():
                    return
            except Exception as error:  # the device's: nobody will know what kernels have done
                self._finish(self._held.popleft(), Failure(TierKVError.code, f"the GPU failed: {error}"))
                continue
            self._send(self._held.popleft())

    def _send(self, call: Call, seen: dict[int, int] | None = None) -> None:
        """First sending in this epoch: the frames are fixed now, with the versions seen so far."""
        call.id = next(self._ids)
        now = time.monotonic()
        deadline = max(0.001, call.deadline - now) if call.deadline else 0.0
        if seen is None:
            seen = self._host.take_seen()
            self._ack_due = now + ACK_SECONDS if self._host.unseen() else 0.0
        request = Request(id=call.id, epoch=self.epoch, op=call.op, deadline=deadline, seen=seen)
        call.frames = [encode(request), *call.buffers]
        call.wait = RESEND_SECONDS
        self._flight[call.id] = call
        self._transmit(call, now)

    def _transmit(self, call: Call, now: float) -> None:
        assert self._socket is not None
        try:
            if call.buffers:
                self._socket.send_multipart(call.frames, NOBLOCK)
            else:
                self._socket.send(call.frames[0], NOBLOCK)
            call.due = now + call.wait
        except zmq.Again:
            call.due = now + FULL_QUEUE_SECONDS
        self._sent_at = now

    def _receive(self) -> None:
        while self._socket is not None and cast(int, self._socket.getsockopt(EVENTS)) & POLLIN:
            raw = self._socket.recv(NOBLOCK)  # the daemon's messages have one frame
            try:
                message = decode_from_daemon(raw)
            except ProtocolError as error:
                log.error("a message of the daemon was dropped: %s", error)
                continue
            if message.epoch != self.epoch:  # a later owner on the same path, told by its first answer
                self._disconnect()
                return
            self._heard_at = time.monotonic()
            if isinstance(message, Reply):
                call = self._flight.pop(message.id, None)
                if call is not None:
                    self._finish(call, message.result)
            else:
                self._host.plans(message.plans)

    def _ended(self) -> bool:
        assert self._stream is not None
        try:
            return not self._stream.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # Owners ------------------------------------------------------------------------------------------------------

    def _find_owner(self) -> None:
        """One attempt, or a part of the wait before it."""
        wait = self._retry_at - time.monotonic()
        if wait > 0:
            if self._watched.poll(wait):
                os.eventfd_read(self._wake)
            return
        try:
            attachment = self._host.attach(ATTEMPT_SECONDS)
        except TierKVError as error:
            self.problem = str(error)
            level = logging.DEBUG if isinstance(error, OwnerUnavailable) else logging.WARNING
            log.log(level, "no owner yet: %s", error)
            self._retry_at = time.monotonic() + self._retry_wait
            self._retry_wait = min(2 * self._retry_wait, RETRY_SECONDS[1])
            return
        self.reattached += 1
        self._connect(attachment)
        log.warning("attached to the owner of epoch %d", self.epoch)
        carried = [*self._flight.values(), *self._held]
        self._flight.clear()
        self._held.clear()
        carried += [self._queue.popleft() for _ in range(len(self._queue))]
        for call in carried:
            self._carry_over(call, attachment.folded)
        self._work()

    def _carry_over(self, call: Call, folded: dict[int, int]) -> None:
        if isinstance(call.op, Ping):
            self._finish(call, Done())
        elif call.session >= 0 and call.session not in folded:
            gone = Failure("unknown-session", f"session {call.session} was not carried over to the new owner")
            self._finish(call, Done() if isinstance(call.op, Close) else gone)
        elif call.number and call.number <= folded[call.session]:
            self._finish(call, Done())
        elif call.deadline and call.deadline < time.monotonic():
            self._finish(call, Failure(OwnerUnavailable.code, "the deadline passed while there was no owner"))
        else:
            self._dispatch(call)

    def _connect(self, attachment: Attachment) -> None:
        self._stream = attachment.stream
        self.epoch = attachment.reply.epoch
        self._heartbeat = attachment.reply.heartbeat_seconds
        line = self._context.socket(zmq.DEALER)
        line.set(zmq.LINGER, 0)
        line.set(zmq.SNDHWM, 1000)
        line.set(zmq.RCVHWM, 1000)
        line.set(zmq.IDENTITY, self._client_id.encode())
        line.connect(attachment.reply.endpoint)
        self._socket = line
        for descriptor in (cast(int, line.getsockopt(zmq.FD)), self._stream.fileno()):
            self._watched.register(descriptor, select.EPOLLIN)
        self._sent_at = 0.0  # a heartbeat at once: the daemon learns the way back
        self._heard_at = time.monotonic()
        self._retry_wait = RETRY_SECONDS[0]
        self.problem = ""
        self.connected = True

    def _disconnect(self) -> None:
        self.connected = False
        self._retry_at = 0.0
        if self._socket is not None:
            self._watched.unregister(cast(int, self._socket.getsockopt(zmq.FD)))
            self._socket.close(linger=0)
            self._socket = None
        if self._stream is not None:
            self._watched.unregister(self._stream.fileno())
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)  # also where a forked child holds a copy
            self._stream.close()
            self._stream = None

    # Answers -----------------------------------------------------------------------------------------------------

    def _finish(self, call: Call, result: Result) -> None:
        try:
            call.done(result)
        except Exception:
            log.exception("an answer could not be handled")

    def _fail_all(self) -> None:
        closed = Failure(OwnerUnavailable.code, "the client is closed")
        # Another caller may be emptying them too: each call is taken by one of the two.
        with contextlib.suppress(KeyError):
            while True:
                self._finish(self._flight.popitem()[1], closed)
        for waiting in (self._held, self._queue):
            with contextlib.suppress(IndexError):
                while True:
                    self._finish(waiting.popleft(), closed)

    # Forks -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Let nobody be in the middle of a turn: a forked child would inherit a lock that is never released."""
        self._paused = self._role.acquire(timeout=FORK_SECONDS)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._role.release()


_lines: weakref.WeakSet[Line] = weakref.WeakSet()
_forking: list[Line] = []


def _before_fork() -> None:
    _forking[:] = _lines
    for line in _forking:
        line.pause()


def _after_fork() -> None:
    for line in _forking:
        line.resume()
    _forking.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
