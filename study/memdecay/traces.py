"""Attention traces: what each token of a context got from recorded queries, so that scores are studied without a model.

A trace is one safetensors file: `tokens` int32, `regions` int8, `blocks` int32 (a block's first token), `stages` int32
(tokens up to which each stage reaches), `queries` int32 (positions of the recorded queries, ascending) and `mass`
float16: of query q the q + 1 masses of the tokens up to and including itself, one after another, averaged over layers
and heads; of a trace by head the same for each of the `heads` (layer, head), [heads, ...].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.regions import Region

FORMAT = "tierkv-attention-trace-1"


@dataclass(frozen=True)
class Trace:
    name: str
    model: str
    tokens: NDArray[np.int32]
    regions: NDArray[np.int8]
    blocks: NDArray[np.int32]
    stages: NDArray[np.int32]
    queries: NDArray[np.int32]
    mass: NDArray[np.float16]  # [sum of (q + 1)], or [heads, the same]

    def __post_init__(self) -> None:
        if len(self.regions) != len(self.tokens) or self.mass.shape[-1] != int((self.queries + 1).sum()):
            raise ConfigError(
                f"trace {self.name}: {len(self.tokens)} tokens, {len(self.regions)} regions, {self.mass.shape[-1]} "
                f"masses for {len(self.queries)} queries do not fit together; record it again"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Each recorded query's position, and the mass `[..., position + 1]` of each token up to it."""
        ends = np.cumsum(self.queries.astype(np.int64) + 1)
        for query, end in zip(self.queries.tolist(), ends.tolist(), strict=True):
            yield query, self.mass[..., end - query - 1 : end].astype(np.float32)

    def save(self, file: Path) -> None:
        from safetensors.numpy import save_file

        arrays = {name: getattr(self, name) for name in _ARRAYS}
        meta = {"format": FORMAT, "name": self.name, "model": self.model}
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".part")
        save_file(arrays, fresh, {"tierkv": json.dumps(meta)})
        fresh.rename(file)


_ARRAYS = {
    "tokens": np.int32, "regions": np.int8, "blocks": np.int32, "stages": np.int32, "queries": np.int32,
    "mass": np.float16,
}  # fmt: skip


def load_trace(file: Path) -> Trace:
    """Raises `ConfigError` where the file is not a whole trace."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as stored:
            meta = json.loads((stored.metadata() or {}).get("tierkv", "{}"))
            if not isinstance(meta, dict) or meta.get("format") != FORMAT:
                raise ConfigError(f"{file} is not an attention trace ({FORMAT}); record it again")
            arrays = {name: stored.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as an attention trace: {error}; record it again") from error
    wrong = _wrong(meta, arrays)
    if wrong:
        raise ConfigError(f"{file} is no whole attention trace: {wrong}; record it again")
    return Trace(meta["name"], meta["model"], **arrays)


def _wrong(meta: dict[str, object], arrays: dict[str, NDArray[np.generic]]) -> str:
    """What of a file's content cannot be; empty if nothing is."""
    for name in ("name", "model"):
        if not isinstance(meta.get(name), str):
            return f"its {name} is {meta.get(name)!r}"
    for name, array in arrays.items():
        if array.dtype != _ARRAYS[name] or array.ndim not in ((1, 2) if name == "mass" else (1,)):
            return f"{name} is {array.dtype} of {array.ndim} dimensions"
    tokens = len(arrays["tokens"])
    bounds = {
        "regions": (0, len(Region)),
        "blocks": (0, tokens),
        "stages": (1, tokens + 1),
        "queries": (0, tokens),
    }
    for name, (least, stop) in bounds.items():
        values = arrays[name].astype(np.int64)
        if not len(values) or values.min() < least or values.max() >= stop:
            return f"{name} are not from {least} to {stop - 1}"
        if name != "regions" and (np.diff(values) <= 0).any():
            return f"{name} do not ascend"
    if not np.isfinite(arrays["mass"].astype(np.float16)).all():
        return "not every mass is a number"
    return ""
