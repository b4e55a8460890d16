"""`tierkv-daemon`: starts this node's owner and keeps it until SIGTERM or Ctrl-C.

Alone, it starts a local Ray as its child, and everything ends with this process. With `--ray-address` it joins a
cluster, where the owner is a detached actor: it survives a crash of this process, and a new `tierkv-daemon` with the
same configuration takes it over. SIGTERM ends the owner in both cases: drain, terminate, kill on timeout.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from tierkv.daemon import statedir
from tierkv.daemon.config import DaemonConfig, Loaded, check_machine, load_config, show_size
from tierkv.daemon.gpu import CPU, find_gpu
from tierkv.daemon.http import version
from tierkv.daemon.local_ray import JoinedRay, LocalRay, quiet_ray
from tierkv.errors import ConfigError, OwnerUnavailable, StateDirectoryLocked, TierKVError

if TYPE_CHECKING:
    from types import FrameType

DRAIN_SECONDS = 20.0
"""What a clean stop gives moves to finish, before the owner is killed."""

POLL_SECONDS = 0.5
"""How often the owner is looked at."""

ANSWER_SECONDS = 10.0
"""What the owner gets to answer one look."""

GONE_SECONDS = 60.0
"""An owner that is away for so long is not restarting any more (it takes 2-3 s)."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def daemon(
    hbm: Annotated[str | None, typer.Option(help="Bytes of HBM a device, for instance 8GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="Where HBM is: cpu, or cuda:0 for a GPU.")] = None,
    host: Annotated[str | None, typer.Option(help="Bytes of host memory, for instance 64GiB.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Sockets, host pool and epoch; workers connect here.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join, instead of a local Ray.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Where /metrics and /health are served.")] = None,
    http_port: Annotated[int | None, typer.Option(help="0 takes any free port.")] = None,
    codec: Annotated[str | None, typer.Option(help="Low-bit form of a page.")] = None,
    policy: Annotated[str | None, typer.Option(help="Which score decides what stays.")] = None,
    policy_file: Annotated[
        Path | None, typer.Option(help="A TOML file that names a policy and its settings.")
    ] = None,
    demotion: Annotated[str | None, typer.Option(help="pressure or eager.")] = None,
    backup: Annotated[str | None, typer.Option(help="on_seal, on_demote or never.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; repeatable.")
    ] = None,
) -> None:
    """Own this node's KV pages until SIGTERM or Ctrl-C. `tierkv config show` lists every setting."""
    flags: dict[str, object] = {
        "hbm": hbm, "device": device, "host": host, "state_dir": state_dir, "ray_address": ray_address,
        "http_host": http_host, "http_port": http_port, "codec": codec, "policy": policy, "policy_file": policy_file,
        "demotion": demotion, "backup": backup, "log_level": log_level,
    }  # fmt: skip
    try:
        run(load_config(flags | _pairs(setting or []), config))
    except TierKVError as error:
        print(f"tierkv-daemon: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        print("tierkv-daemon: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def run(loaded: Loaded) -> None:
    """Serve until a signal. Raises `TierKVError` when it cannot start, or the owner is gone for good."""
    config = loaded.config
    find_gpu(config.device)  # refuse before anything is created
    if not config.state_dir.exists():
        check_machine(config)
    _interrupt_on_sigterm()
    with (
        statedir.StateLock(config.state_dir, statedir.DAEMON_LOCK, config.model_dump(mode="json")),
        _ray(config),
    ):
        from tierkv.daemon.owner import owner_info

        owner = _owner(loaded)
        info = owner_info(owner, ANSWER_SECONDS)
        ended = _stop_on_signals()
        try:
            show_banner(loaded, info)
            _watch(owner, info, ended)
        finally:
            _stop(owner, info, config)


def show_banner(loaded: Loaded, info: dict[str, Any]) -> None:
    """One overview on stdout: framed on a terminal, plain lines elsewhere."""
    config = loaded.config
    rows = [
        ("endpoint", str(info["endpoint"])),
        ("state directory", str(config.state_dir)),
        ("epoch", str(info["epoch"])),
        ("hbm", show_size(info["hbm_bytes"], config.page_tokens)),
        *([] if config.device == CPU else [("device", config.device)]),
        ("host", show_size(info["host_bytes"], config.page_tokens)),
        (
            "codec, policy",
            f"{config.low_bit_form}, {config.policy} ({config.demotion}, backup {config.backup})",
        ),
        *([("middle form", config.middle)] if config.middle else []),
        *([("policy file", str(config.policy_file))] if config.policy_file else []),
        ("metrics", f"{info['url']}/metrics"),
        ("life", _life(config)),
    ]
    title = f"tierkv-daemon {version()['version']} is ready"
    console = Console()
    if console.is_terminal:
        grid = Table.grid(padding=(0, 2))
        for label, value in rows:
            grid.add_row(f"[bold]{label}[/bold]", value)
        console.print(Panel(grid, title=title, expand=False))
    else:
        print("\n".join([title, *(f"{label}: {value}" for label, value in rows)]), flush=True)


def _life(config: DaemonConfig) -> str:
    if config.ray_address:
        return f"an actor of the Ray cluster at {config.ray_address}; SIGTERM ends it, a crash of this process does not"
    return "local Ray; the daemon ends with this process"


@contextlib.contextmanager
def _ray(config: DaemonConfig) -> Iterator[None]:
    from tierkv.daemon.incarnation import reusable_bytes, tidy

    quiet_ray()
    ray: LocalRay | JoinedRay
    if config.ray_address:
        ray = JoinedRay(config.ray_address)
    else:
        check_machine(config, reusable=reusable_bytes(config.state_dir))
        print("starting a local Ray, which ends with this process ...", file=sys.stderr, flush=True)
        ray = LocalRay(config.state_dir)
    try:
        yield
    finally:
        ray.stop()
        with contextlib.suppress(StateDirectoryLocked), statedir.StateLock(config.state_dir):
            tidy(config.state_dir)  # where the owner had to be killed


def _owner(loaded: Loaded) -> Any:
    """A new owner, or in a cluster the one that an earlier daemon left, if it is configured the same."""
    from tierkv.daemon import owner as actor

    config = loaded.config
    plain = config.model_dump(mode="json")
    found = actor.find_owner()
    if found is None:
        if config.ray_address:
            from tierkv.daemon.incarnation import reusable_bytes

            check_machine(config, reusable=reusable_bytes(config.state_dir))
        return actor.start_owner(plain, loaded.origins)
    info = actor.owner_info(found, ANSWER_SECONDS)
    if differ := statedir.differences(info["config"], plain):
        raise StateDirectoryLocked(
            f"this node already has an owner (process {info['pid']}, state directory {info['state_dir']}), and its "
            f"configuration differs from yours in {differ}. Use that owner, or stop it first"
        )
    return found


def _watch(owner: Any, info: dict[str, Any], ended: threading.Event) -> None:
    """Until `ended`. Tells when the owner died and when it serves again; keeps `info` up to date."""
    from tierkv.daemon.owner import owner_info

    lost_at: float | None = None
    while not ended.wait(POLL_SECONDS):
        try:
            now = owner_info(owner, ANSWER_SECONDS)
        except OwnerUnavailable as error:
            if lost_at is None:
                lost_at = time.monotonic()
                print(f"tierkv-daemon: {error}", file=sys.stderr, flush=True)
            elif time.monotonic() - lost_at > GONE_SECONDS:
                raise OwnerUnavailable(
                    f"the owner has not come back for {GONE_SECONDS:g} s; is Ray gone?"
                ) from None
            continue
        if now["epoch"] != info["epoch"]:
            print(f"tierkv-daemon: the owner serves again, epoch {now['epoch']}", file=sys.stderr, flush=True)
        lost_at = None
        info.update(now)


def _stop(owner: Any, info: dict[str, Any], config: DaemonConfig) -> None:
    from tierkv.daemon.owner import stop_owner

    print("tierkv-daemon: draining ...", file=sys.stderr, flush=True)
    clean = stop_owner(owner, info["pid"], DRAIN_SECONDS)
    how = "stopped" if clean else f"killed after {DRAIN_SECONDS:g} s"
    print(f"tierkv-daemon: {how}; {config.state_dir} keeps the epoch", file=sys.stderr, flush=True)


def _pairs(settings: list[str]) -> dict[str, object]:
    pairs = [setting.partition("=") for setting in settings]
    for key, sign, _ in pairs:
        if not sign:
            raise ConfigError(f"--set {key}: write it as KEY=VALUE, for instance --set observe_every=8")
    return {key.replace("-", "_"): value for key, _, value in pairs}


def _interrupt_on_sigterm() -> None:
    """While starting, SIGTERM unwinds like Ctrl-C, so that nothing half-started stays."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _stop_on_signals() -> threading.Event:
    """The first signal asks for a clean stop; the next one interrupts it."""
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return ended
