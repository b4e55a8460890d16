"""The commands of `tierkv`. Those that ask a daemon take `--json` and, but for `replay`, read only; 1 is the exit code
when no daemon answers. `study`, `bench` and `calibrate` need none to run: they write files.

`status` and `stats` ask over HTTP, which answers whatever the loop does; `sessions`, `explain`, `ping` and `replay`
take a worker's way.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from tierkv.benchmarks.command import app as bench_app
from tierkv.calibrate_command import calibrate
from tierkv.daemon.config import load_config
from tierkv.daemon.limits import show_bytes
from tierkv.daemon.statedir import read_holder, read_http
from tierkv.errors import ConfigError, OwnerUnavailable
from tierkv.handshake import default_state_dir
from tierkv.study.memdecay.command import app as study_app
from tierkv.terminal import plain_errors

HTTP_SECONDS = 5.0

WIDE = 200
"""Columns of a table that goes to a file or a pipe."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
config_app = typer.Typer(no_args_is_help=True, help="The configuration.")
app.add_typer(config_app, name="config")
app.add_typer(study_app, name="study")
app.add_typer(bench_app, name="bench")

StateDir = Annotated[Path | None, typer.Option(help="Of the daemon; default $TIERKV_STATE_DIR.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def status(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Whether the daemon is well, and how full its tiers are."""
    with plain_errors():
        now = fetch_status(state_dir)
        if as_json:
            return _print_json(now)
        stats = now["stats"]
        _print_rows(
            [
                ("version", f"{now['version']}, epoch {now['epoch']}, process {now['pid']}"),
                ("health", now["health"]["reason"] or "well"),
                ("ready", now["ready"]["reason"] or "takes sessions"),
                ("endpoint", now["endpoint"]),
                ("http", now["url"]),
                ("codec, policy", f"{now['codec']}, {now['policy']}"),
                *([("middle form", now["middle"])] if now["middle"] else []),
                *([("policy file", file)] if (file := now["config"]["policy_file"]) else []),
                *(("model", f"{model}: {how}") for model, how in now["calibrations"].items()),
                *(("digests", f"{model}: {', '.join(forms)}") for model, forms in now["digests"].items()),
                (
                    "sessions",
                    f"{stats['sessions']:.0f} of {stats['workers']:.0f} workers, {stats['tokens']:,.0f} tokens",
                ),
                *([] if now["device"] == "cpu" else [("device", now["device"])]),
                ("hbm", _filled(stats, "hbm")),
                ("host", _filled(stats, "host")),
                *(
                    (
                        f"pages {tier}",
                        f"{stats[f'pages_{tier}']:,.0f} ({show_bytes(int(stats[f'bytes_{tier}']))})",
                    )
                    for tier in ("hbm", *(["middle"] if now["middle"] else []), "quantized", "host")
                ),
                ("pages dropped", f"{stats['pages_dropped']:,.0f}"),
                *([("low-bit error", _loss(stats))] if stats["measured_pages"] else []),
            ]
        )


@app.command()
def stats(
    state_dir: StateDir = None,
    session: Annotated[int | None, typer.Option(help="One session's numbers instead.")] = None,
    as_json: Json = False,
) -> None:
    """The daemon's numbers, one a line."""
    with plain_errors():
        if session is None:
            values = fetch_status(state_dir)["stats"]
        else:
            import tierkv

            with tierkv.connect(state_dir) as client:
                values = client.stats(session)
        if as_json:
            return _print_json(values)
        _print_rows(
            [
                (name, f"{value:,.0f}" if value == int(value) else f"{value:,.3f}")
                for name, value in values.items()
            ]
        )


@app.command()
def sessions(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Every session: what it holds, and what recall did for it."""
    with plain_errors():
        import tierkv
        from tierkv.sessions_table import table

        with tierkv.connect(state_dir) as client:
            found = client.sessions()
        if as_json:
            return _print_json(msgspec.to_builtins(found))
        Console(width=None if sys.stdout.isatty() else WIDE).print(table(found))


@app.command()
def explain(
    session: Annotated[int, typer.Argument(help="Its id: `session.id` in the worker.")],
    page: Annotated[int | None, typer.Argument(help="Row in its page table, from 0.")] = None,
    token: Annotated[int | None, typer.Option(help="The page that holds this token instead.")] = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Why a page is where it is, and what would move it next. Reads only: no score changes by it."""
    with plain_errors():
        import tierkv
        from tierkv.explained import rows

        with tierkv.connect(state_dir) as client:
            told = client.explain(session, page, token=token)
        if as_json:
            return _print_json(_finite(msgspec.to_builtins(told)))
        _print_rows(rows(told))


@app.command()
def ping(
    state_dir: StateDir = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Round trips.")] = 100,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a daemon.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Measure round trips over the workers' channel, in microseconds."""
    with plain_errors():
        import tierkv

        with tierkv.connect(state_dir, timeout) as client:
            trips = sorted(client.ping() * 1e6 for _ in range(count))
            found = {
                "epoch": client.epoch,
                "count": count,
                "min_us": trips[0],
                "median_us": statistics.median(trips),
                "p99_us": trips[min(count - 1, round(0.99 * (count - 1)))],
                "max_us": trips[-1],
            }
        if as_json:
            return _print_json(found)
        _print_rows([(name, f"{value:,.0f}") for name, value in found.items()])


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Traces in OpenAI's message format, JSON or JSONL.")],
    trace: Annotated[
        list[int] | None, typer.Option(help="Only this one, counted from 0; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many traces.")] = None,
    budget: Annotated[
        float, typer.Option(min=0.01, help="HBM of a session, as part of its exact KV bytes.")
    ] = 0.2,
    model: Annotated[
        Path | None, typer.Option(help="A transformers model's folder; default SmolLM2-135M.")
    ] = None,
    recall: Annotated[str | None, typer.Option(help="direct, background, strict or off.")] = None,
    compare: Annotated[
        bool, typer.Option(help="Against a full cache: KL and top-1 of the last 64 tokens.")
    ] = True,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Run recorded conversations through the daemon as a worker would, and compare them with a full cache."""
    with plain_errors():
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                'replay needs transformers: pip install ".[transformers]" in a checkout of tierkv'
            )
        import tierkv
        from tierkv.study.traces import choose, load_traces

        chosen = choose(load_traces(file), trace or [], limit)
        with tierkv.connect(state_dir) as client:
            from tierkv.study.replay_report import run  # torch and transformers: seconds, so they come last

            report = run(client, chosen, budget=budget, folder=model, recall=recall, compare=compare)
        if as_json:
            _print_json(report.as_dict())
        else:
            report.print()
        if report.totals.errors:
            raise typer.Exit(1)


app.command()(calibrate)


@config_app.command()
def show(
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    running: Annotated[bool, typer.Option("--running", help="Of the running daemon.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Every setting, its value, and where it comes from."""
    with plain_errors():
        if running:
            now = fetch_status(state_dir)
            values, origins = now["config"], now["origins"]
        else:
            loaded = load_config({"state_dir": state_dir}, config)
            values, origins = loaded.config.model_dump(mode="json"), loaded.origins
        if as_json:
            return _print_json({key: {"value": values[key], "origin": origins[key]} for key in values})
        width = max(map(len, values))
        for key, value in values.items():
            print(f"{key:{width}}  {_show(key, value)}  ({origins[key]})")


def fetch_status(state_dir: Path | None) -> dict[str, Any]:
    """The running daemon's `/status`. Raises `OwnerUnavailable` with what to do."""
    folder = state_dir or default_state_dir()
    found = read_http(folder)
    if found is None:
        holder = read_holder(folder)
        why = f"process {holder.pid} is starting or restarting" if holder else "no daemon runs there"
        raise OwnerUnavailable(
            f"nothing answers at {folder}: {why}; start tierkv-daemon, or name its --state-dir"
        )
    try:
        with urllib.request.urlopen(f"{found.url}/status", timeout=HTTP_SECONDS) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise OwnerUnavailable(
            f"{found.url}/status of process {found.pid} does not answer ({error}); the daemon is restarting or dead"
        ) from None


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _finite(value: Any) -> Any:
    """Infinite numbers, which JSON lacks, as `inf` and `-inf`."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:{width}}  {value}")


def _loss(stats: dict[str, float]) -> str:
    keys, values = stats["quantization_error_keys"], stats["quantization_error_values"]
    return f"{keys:.1%} of keys, {values:.1%} of values ({stats['measured_pages']:,.0f} pages measured)"


def _filled(stats: dict[str, float], pool: str) -> str:
    used, size = int(stats[f"{pool}_used_bytes"]), int(stats[f"{pool}_capacity_bytes"])
    return f"{show_bytes(used)} of {show_bytes(size)}" + (f" ({used / size:.0%})" if size else "")


def _show(key: str, value: object) -> str:
    if key in ("hbm", "host") and isinstance(value, int):
        return f"{show_bytes(value)} ({value:,} bytes)"
    if key in ("policy_file", "calibration"):
        return str(value) if value else "none"
    return "the policy's own" if value is None else json.dumps(value)
