"""`tierkv calibrate`: observe a model once, for the codecs that are fitted from what was observed."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tierkv import folders
from tierkv.errors import ConfigError
from tierkv.outputs import check_writable
from tierkv.terminal import plain_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tierkv.quant.moments import About, KeyTransform, Moments

SMOLLM2 = "smollm2"


class Named(NamedTuple):
    name: str
    tokens: list[int]


def calibrate(
    model: Annotated[
        str, typer.Option(help="smollm2, or the folder of a transformers model and its tokenizer.")
    ] = SMOLLM2,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A UTF-8 file to observe it on; repeatable. By default texts that are here anyway."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of tau-airline, among the default texts; ../shared/data/tau_airline if there."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="As the model is served: auto (as it was saved), float32, bfloat16, float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="The file; by default where the daemon looks for it.")
    ] = None,
) -> None:
    """Observe a model's K/V and what errors of them cost its answers, for a daemon's codec to be fitted to (klt2).

    Two and a half minutes for SmolLM2-135M on two free cores. A daemon finds the file when it next fits the model.
    """
    with plain_errors():
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                'calibrate needs transformers: pip install ".[transformers]" in a checkout of tierkv'
            )
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads take no core
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"--dtype {dtype}: take auto, float32, bfloat16 or float16")
        if out is not None:
            check_writable(out)
        from tierkv import model_support
        from tierkv.quant.moments import save
        from tierkv.study.replay import load_model  # torch and transformers: seconds

        loaded, tokenizer = load_model(None if model == SMOLLM2 else Path(model), dtype)
        texts = _texts(loaded, tokenizer, text or [], data)
        try:
            loaded = loaded.to(device)
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # the latter from a torch that was built without the device
            raise ConfigError(f"--device {device}: {error}") from error
        file = out or default_file(model_support.model_id(loaded))
        check_writable(file)
        save(file, *observe_model(loaded, texts))
        print(f"written to {file}")


def observe_model(model: PreTrainedModel, texts: list[Named]) -> tuple[Moments, KeyTransform, About]:
    """Moments of the model on the texts, the state of digests, and what they are of; tells what it does."""
    from tierkv import model_support
    from tierkv.calibration import RECENT, SINKS, observe
    from tierkv.head_weights import head_weights
    from tierkv.prefetch.digest_settings import DEFAULT_BYTES
    from tierkv.prefetch.transform import KeySums, solve
    from tierkv.quant.moments import About
    from tierkv.study.memdecay.cli import progress

    geometry = model_support.geometry(model)
    tokens = sum(len(text.tokens) for text in texts)
    about = About(
        model_support.model_id(model), geometry.num_layers, geometry.num_kv_heads, geometry.head_dim,
        geometry.dtype, tuple(text.name for text in texts), tokens,
    )  # fmt: skip
    begun, pages = time.perf_counter(), list[KeySums]()
    with progress() as told:
        moments = observe(
            model,
            [text.tokens for text in texts],
            told=lambda number: told(number, len(texts), texts[number].name),
            pages=pages,
        )
    with progress() as told:
        keys = head_weights(
            model, [text.tokens for text in texts], solve(pages, moments.query_second), DEFAULT_BYTES, SINKS, RECENT,
            lambda number: told(number, len(texts), f"heads: {texts[number].name}"),
        )  # fmt: skip
    seconds, plural = time.perf_counter() - begun, "s" if len(texts) > 1 else ""
    print(
        f"{about.model_id}: {about.layers} layers, {about.kv_heads} KV heads of {about.head_dim}, {about.dtype}\n"
        f"{len(texts)} text{plural}, {tokens:,} tokens in {seconds:.0f} s"
    )
    return moments, keys, about


def default_file(model_id: str) -> Path:
    """In the folder that daemons look into. A model's name may be a path: only its end is kept."""
    name = "".join(
        c if c.isalnum() or c in "._@-" else "-" for c in model_id.rstrip("/").rpartition("/")[2]
    ).lstrip(".")
    return folders.calibrations() / f"{name or 'model'}.npz"


def _texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: list[Path], data: Path | None
) -> list[Named]:
    """Each with at most as many tokens as the benchmark's, and as the model takes."""
    from tierkv.benchmarks.quant.inputs import CALIBRATION, CONTEXT, find_data, read

    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = min(CONTEXT, most or CONTEXT)
    if not files:
        found = read(CALIBRATION, tokenizer, find_data(data), context)
        return [Named(text.title, text.tokens[: text.context]) for text in found]
    texts = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {file} cannot be read as UTF-8: {error}") from error
        tokens = tokenizer(content, add_special_tokens=False, verbose=False).input_ids
        texts.append(Named(file.name, tokens[:context]))
    return texts
