"""The owner as a Ray actor: Ray starts it, restarts it when it dies, and finds it by name. No page passes through Ray.

One detached actor a node, `tierkv:<node id>` in namespace `tierkv`, pinned to its node. A restart runs `__init__`
only, with the plain values of the first start: lock, next epoch, pools, sockets; workers attach again by themselves.
The fence against two owners is the lock in the state directory, not Ray.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tierkv import errors
from tierkv.errors import ConfigError, OwnerUnavailable, TierKVError

NAMESPACE = "tierkv"
CONTROL = "control"
"""Concurrency group of methods that must answer while `drain` or `stop` runs."""

START_SECONDS = 60.0
"""A first start: Ray's worker process, imports, and reserving the pools' memory."""

EXIT_SECONDS = 10.0
"""What an actor gets to end by itself before it is killed."""

LOG_FILE = "owner.log"
LOG_BYTES = 1 << 20
"""The log is rotated once at this size: a state directory is memory."""

_RAISED = re.compile(r"^(?:tierkv\.errors\.)(\w+): (.*)", re.DOTALL | re.MULTILINE)


F = TypeVar("F", bound=Callable[..., object])
_control: Callable[[F], F] = ray.method(concurrency_group=CONTROL)


class Owner:
    """Hosts one `Incarnation` in plain threads; the actor itself only answers control calls.

    Args:
        config: `DaemonConfig` as plain values.
        origins: where each value came from.
    """

    def __init__(self, config: dict[str, object], origins: dict[str, str]) -> None:
        begun = time.perf_counter()
        from tierkv.daemon.config import (
            DaemonConfig,
        )  # not at the top: the driver needs neither kernels nor pools
        from tierkv.daemon.incarnation import Incarnation

        settings = DaemonConfig(**config)  # type: ignore[arg-type]  # plain values of a checked configuration
        _log_to(settings.state_dir, settings.log_level)
        self._incarnation = Incarnation(settings, origins)
        self._init_seconds = time.perf_counter() - begun

    @_control
    def info(self) -> dict[str, object]:
        """See `Incarnation.info`; also how long this start took, imports included."""
        return {**self._incarnation.info(), "init_seconds": self._init_seconds}

    @_control
    def ping(self) -> int:
        """The epoch."""
        return self._incarnation.epoch

    def drain(self, timeout: float) -> None:
        """Stop admitting sessions and pages, and finish moves; goes on answering what is open."""
        self._incarnation.drain(timeout)

    def stop(self, timeout: float) -> None:
        """Drain, then end everything but the process."""
        self._incarnation.stop(drain=True, timeout=timeout)


def actor_name() -> str:
    """Name of this node's owner."""
    return f"tierkv:{ray.get_runtime_context().get_node_id()}"


def find_owner() -> Any | None:
    """A handle to this node's owner, `None` where there is none."""
    try:
        return ray.get_actor(actor_name(), namespace=NAMESPACE)
    except ValueError:
        return None


def start_owner(config: dict[str, object], origins: dict[str, str]) -> Any:
    """Create this node's owner and wait until it serves; returns its handle.

    Raises:
        TierKVError: what its start met (`ConfigError`, `StateDirectoryLocked`, ...); no actor is left.
        OwnerUnavailable: it does not answer in `START_SECONDS`.
    """
    node = ray.get_runtime_context().get_node_id()
    kind = ray.remote(
        concurrency_groups={CONTROL: 2},
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
    )(Owner)
    owner = kind.options(
        name=actor_name(),
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(config, origins)
    try:
        owner_info(owner, START_SECONDS)
    except BaseException:
        ray.kill(owner, no_restart=True)
        raise
    return owner


def owner_info(owner: Any, timeout: float) -> dict[str, Any]:
    """`Owner.info`.

    Raises:
        OwnerUnavailable: it is restarting, or does not answer in time (retryable).
        TierKVError: it is gone for good; what its start met, where that is known.
    """
    try:
        answer: dict[str, Any] = ray.get(owner.info.remote(), timeout=timeout)
        return answer
    except GetTimeoutError:
        raise OwnerUnavailable(f"the owner does not answer within {timeout:g} s; see {LOG_FILE}") from None
    except ActorUnavailableError:
        raise OwnerUnavailable("the owner's process has ended and is being restarted") from None
    except RayActorError as error:
        raise _cause(error) from None


def stop_owner(owner: Any, pid: int, drain_seconds: float) -> bool:
    """Drain and end the owner; kill it when it takes too long. True when it ended by itself."""
    try:
        ray.get(owner.stop.remote(drain_seconds), timeout=drain_seconds + EXIT_SECONDS)
        owner.__ray_terminate__.remote()
        if _ended(pid, EXIT_SECONDS):
            return True
    except (GetTimeoutError, RayActorError):
        pass
    ray.kill(owner, no_restart=True)
    _ended(pid, EXIT_SECONDS)
    return False


def _ended(pid: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not os.path.exists(f"/proc/{pid}"):
            return True
        time.sleep(0.02)
    return False


def _cause(error: RayActorError) -> TierKVError:
    """What the actor's `__init__` raised, as it was raised; the rest is Ray's own words."""
    raised = _RAISED.search(str(error))
    if raised is None:
        return TierKVError(f"the owner is gone and Ray will not restart it: {str(error).splitlines()[0]}")
    kind = getattr(errors, raised[1], ConfigError)
    return kind(raised[2].strip()) if issubclass(kind, TierKVError) else ConfigError(raised[2].strip())


def _log_to(state_dir: Path, level: str) -> None:
    handler = logging.handlers.RotatingFileHandler(state_dir / LOG_FILE, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("tierkv")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
