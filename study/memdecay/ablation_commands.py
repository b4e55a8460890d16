"""`tierkv study ablate`, `variants`, `labels` and `overhead`: what each choice gives, and what scoring costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tierkv.study.memdecay.cli import (
    TRACES,
    Json,
    Out,
    Split,
    Traces,
    progress,
    require,
    show,
    stamped,
    write,
)
from tierkv.terminal import plain_errors

if TYPE_CHECKING:
    from tierkv.study.memdecay.survival import Pair, Told

Of = Annotated[Split, typer.Option(help="Scenarios: to report on, or to develop and tune on.")]


def ablate(
    traces: Traces = TRACES,
    split: Of = Split.report,
    half_lives: Annotated[
        Path | None,
        typer.Option(help="A policy file (lifetimes writes some): its half-lives are one more setting."),
    ] = None,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Which facts survive eviction with one setting of a policy changed, or with other pages, pins or observations."""
    with plain_errors():
        from tierkv.study.memdecay import ablate as study

        _survival(
            "ablate",
            lambda pairs, told: study.run(pairs, half_lives, told),
            study.render,
            traces,
            split,
            out,
            as_json,
        )


def variants(
    traces: Traces = TRACES,
    split: Of = Split.report,
    by_layer: Annotated[
        bool,
        typer.Option(
            help="Instead: choose layers and heads, from traces of all heads (record --every 1 --window 8)."
        ),
    ] = False,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """Ideas beyond the paper beside memdecay-lift, and a verdict on each."""
    with plain_errors():
        from tierkv.study.memdecay import variants as study
        from tierkv.study.memdecay import variants_tables

        if by_layer:
            from tierkv.study.model import load_config

            require(out)
            layers = load_config().num_hidden_layers
            _survival(
                "variants-layers", lambda pairs, told: study.run_weighted(pairs, layers, told),
                variants_tables.render, traces, split, out, as_json, 1, "--every 1 --window 8",
            )  # fmt: skip
        else:
            _survival("variants", study.run, variants_tables.render, traces, split, out, as_json)


def labels(
    traces: Traces = TRACES, split: Of = Split.report, out: Out = Path("out"), as_json: Json = False
) -> None:
    """What wrong region labels cost."""
    with plain_errors():
        from tierkv.study.memdecay import labels as study

        _survival("labels", study.run, study.render, traces, split, out, as_json)


def overhead(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of steps, at each length of the context.")] = 24,
    out: Out = Path("out"),
    as_json: Json = False,
) -> None:
    """A scored decode step beside an unscored one, tierkv's way and the paper's, and what a decision takes."""
    with plain_errors():
        require(out)
        from tierkv.study.memdecay import overhead as study
        from tierkv.study.memdecay.scenarios import build, load_scenarios
        from tierkv.study.model import load_smollm2

        with progress() as told:
            model, tokenizer = load_smollm2()
            episode = build(load_scenarios("dev")[0], 0, "long", tokenizer)
            found = study.run(model, episode, pairs=pairs, told=told)
        write(out / "overhead.json", stamped(found))
        show(as_json, found, lambda: study.render(found))


def _survival(
    name: str,
    study: Callable[[list[Pair], Told], msgspec.Struct],
    render: Callable[[Any], object],
    traces: Path,
    split: Split,
    out: Path,
    as_json: bool,
    every: int = 0,
    options: str = "",
) -> None:
    """Run a study on the folder's traces, and write and show what it found. every, options: see `load_pairs`."""
    require(out)
    from tierkv.study.memdecay.collect import load_pairs
    from tierkv.study.model import load_tokenizer

    known = list(load_pairs(traces, split.value, load_tokenizer(), every, options))
    with progress() as told:
        found = study(known, told)
    write(out / f"{name}-{split}.json", stamped(found))
    show(as_json, found, lambda: render(found))
