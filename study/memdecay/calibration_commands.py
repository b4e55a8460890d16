"""`tierkv study record`, `lifetimes` and `ema`: attention traces, and what is fitted to them without the model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tierkv.study.memdecay.cli import (
    TRACES,
    Json,
    Out,
    TierName,
    Traces,
    progress,
    require,
    show,
    stamped,
    write,
)
from tierkv.study.memdecay.scenarios import Tier
from tierkv.terminal import plain_errors


class Scenarios(StrEnum):
    all = "all"
    dev = "dev"
    report = "report"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


def record(
    out: Annotated[Path, typer.Option(help="Folder for the traces.")] = TRACES,
    split: Annotated[Scenarios, typer.Option(help="Which scenarios.")] = Scenarios.all,
    tier: Annotated[list[TierName] | None, typer.Option(help="Of which length; both by default.")] = None,
    variant: Annotated[
        list[int] | None, typer.Option(min=0, max=2, help="Which variants; all by default.")
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(help="Instead of scenarios: conversations in OpenAI's format, JSON or JSONL."),
    ] = None,
    trace: Annotated[
        list[int] | None, typer.Option(min=0, help="Of that file: which, counted from 0; all by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a chat: at most so many are read.")] = 8192,
    every: Annotated[
        int, typer.Option(min=0, help="Each n-th (layer, head) by itself; 0: the average of all.")
    ] = 0,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="The last so many queries of each stage; by default 48, of a chat 16."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the model.")] = Dtype.float32,
) -> None:
    """Read contexts once and keep the attention that each token got, as traces that the other commands read. What is
    there already is not recorded again.
    """
    with plain_errors():
        require(out)
        import torch

        from tierkv.study.memdecay import collect
        from tierkv.study.model import load_smollm2
        from tierkv.study.traces import choose, load_traces

        chats = [one for _, one in choose(load_traces(chat), trace or (), None)] if chat else []
        tiers: list[Tier] = [one.value for one in tier or TierName]
        with progress() as told:
            model, tokenizer = load_smollm2(getattr(torch, dtype.value))
            recorded = collect.run(
                out,
                model,
                tokenizer,
                split.value,
                tiers,
                variant or (0, 1, 2),
                chats,
                tokens,
                every,
                window,
                told,
            )
        typer.echo(f"{out}: {len(recorded.new)} traces recorded, {len(recorded.kept)} were there")


def lifetimes(
    traces: Traces = TRACES,
    precision: Annotated[
        Path | None,
        typer.Option(
            help="Traces of the same episodes in bfloat16: compare the rates instead of fitting them."
        ),
    ] = None,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Fit how fast attention on each region fades: half-lives, intervals, figures, and policy files for the daemon."""
    with plain_errors():
        require(out)
        from tierkv.study.memdecay import lifetime_figures, lifetime_tables
        from tierkv.study.memdecay import lifetimes as study
        from tierkv.study.memdecay import precision as audit
        from tierkv.study.memdecay.collect import load_folder

        if precision is not None:
            compared = audit.run(load_folder(traces), load_folder(precision, options="--dtype bfloat16"))
            write(out / "lifetimes-precision.json", stamped(compared))
            show(as_json, compared, lambda: audit.render(compared))
            return
        found = study.run(load_folder(traces))
        write(out / "lifetimes.json", stamped(found))
        for name, text in found.policies.items():
            (out / f"lifetimes-{name}").write_text(text)
        lifetime_figures.draw_measured(found, out / "lifetimes.png")
        lifetime_figures.draw_curves(found, out / "lifetimes-curves.png")
        show(as_json, found, lambda: lifetime_tables.render(found))


def ema(
    traces: Traces = TRACES,
    ahead: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How far the attention to come lies ahead; 1 and 48 by default."),
    ] = None,
    alpha: Annotated[
        list[float] | None, typer.Option(help="One to try; repeatable. By default .02 to .95.")
    ] = None,
    beta: Annotated[
        list[float] | None, typer.Option(help="One to try; repeatable. By default .0001 to 1.")
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Hot set, a share of the tokens; .05, .1, .25 by default."),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the files that are written, without their ending.")] = "ema",
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Sweep the ema policy's alpha and beta by what share of the attention to come falls on its hot set (the tokens
    that it scores best). Needs traces by head (tierkv study record --every 10).
    """
    with plain_errors():
        require(out)
        from rich.console import Group

        from tierkv.study.memdecay import ema_sweep as study
        from tierkv.study.memdecay import lifetime_figures
        from tierkv.study.memdecay.collect import load_folder

        reports = [
            study.run(
                load_folder(traces, by_head=True, options="--every 10"), alpha or study.ALPHAS, beta or study.BETAS,
                share or study.SHARES, ahead=steps,
            )
            for steps in ahead or (1, 48)
        ]  # fmt: skip
        write(out / f"{name}.json", [stamped(one) for one in reports])
        lifetime_figures.draw_sweep(reports, out / f"{name}.png")
        show(as_json, reports, lambda: Group(*map(study.render, reports)))
