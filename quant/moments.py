"""What a model's keys, values and queries are like, and what errors of them cost: second moments by layer and head, and
the file that keeps them.

`tierkv.calibration.observe` measures them on texts. A codec that takes moments (`Codec.takes_moments`) fits its
per-model state from them instead of from the first pages of a session.

A file is `.npz`, uncompressed and without pickle: one array a field of `Moments`, one, `pages_FIELD`, a field of
`KeyTransform`, and `about`, bytes of JSON that say which model and texts they are of. All are checked when it is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tierkv.errors import ConfigError
from tierkv.geometry import PAGE_TOKENS, Geometry

Floats = NDArray[np.float32]

VERSION = 3
"""Of the file. A file of another version is not read."""

REDO = "make it anew with tierkv calibrate"

_SQUARE = ("key_covariance", "value_second", "query_second", "value_metric", "key_fisher", "value_fisher")
_UNEVEN = 1e-4
"""How far a symmetric matrix may differ from its transpose, of its largest entry."""

_DAMAGE = (
    ValueError, KeyError, EOFError, RuntimeError, MemoryError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile,
    zlib.error, msgspec.MsgspecError,
)  # fmt: skip
"""What reading a file of other bytes can raise."""

_HASHED = re.compile(r".*@([0-9a-f]{16})", re.DOTALL)


class Moments(NamedTuple):
    """float32 of L layers, H KV heads and head_dim D. Keys and queries are as attention sees them (after RoPE).

    Attributes:
        key_mean: [L, H, D].
        key_covariance: [L, H, D, D], about `key_mean`.
        value_second: [L, H, D, D], `E[v v^T]`, not centered.
        query_second: [L, H, D, D], `E[q q^T]` over the queries of the head's group.
        value_metric: [L, H, D, D], what an error `e` of a value costs behind the attention: `e^T metric e`.
        key_fisher: [L, H, D, D], Fisher information of all low-bit keys of a cache: independent errors of them, each of
            second moment `C`, cost `trace(key_fisher C) / 2` nats of KL a generated token, to second order.
        value_fisher: [L, H, D, D], the same of values.
    """

    key_mean: Floats
    key_covariance: Floats
    value_second: Floats
    query_second: Floats
    value_metric: Floats
    key_fisher: Floats
    value_fisher: Floats


class KeyTransform(NamedTuple):
    """How a page's keys become coefficients that are uncorrelated, and ordered by what queries want of them: the state
    of digests (`tierkv.prefetch.transform`). float32, of pages of `page_tokens` tokens.
    """

    mean: Floats  # [L, H, D]
    analysis: Floats  # [L, H, D, D]: (key - mean) @ analysis are coefficients
    axes: Floats  # [L, H, D, D]: query @ axes takes coefficients
    variance: Floats  # [L, H, page_tokens, D], above 0
    weights: Floats  # [L, H], not negative: whose opinion counts (`tierkv.prefetch.opinions`)


_PAGES = "pages_"
"""Before the names of a `KeyTransform`'s arrays in a file."""


class About(msgspec.Struct, frozen=True):
    """What moments are of. `dtype` is the model's while it was observed, `tokens` are those of all texts, `page_tokens`
    those of a page of the `KeyTransform`.
    """

    model_id: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    texts: tuple[str, ...]
    tokens: int
    page_tokens: int = PAGE_TOKENS

    def is_of(self, model_id: str) -> bool:
        """Whether it is the same model. In `name@hash` the name is only where it was loaded from."""
        mine, other = _HASHED.fullmatch(self.model_id), _HASHED.fullmatch(model_id)
        return self.model_id == model_id if mine is None or other is None else mine[1] == other[1]

    def fits(self, geometry: Geometry) -> bool:
        """Whether pages of this shape hold what was observed; their dtype and length do not matter."""
        return self.shape == (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(L, H, D)` of the moments."""
        return self.layers, self.kv_heads, self.head_dim


def check(moments: Moments) -> tuple[int, int, int]:
    """The moments' `(L, H, D)`.

    Raises:
        ConfigError: a field has another shape or dtype, is not finite, or a square one is not symmetric.
    """
    if moments.key_mean.ndim != 3:
        raise ConfigError(f"key_mean has the shape {moments.key_mean.shape}; it must be [layers, heads, dim]")
    layers, heads, dim = moments.key_mean.shape
    for name, values in moments._asdict().items():
        wanted = (layers, heads, dim) if name == "key_mean" else (layers, heads, dim, dim)
        if values.shape != wanted or values.dtype != np.float32:
            raise ConfigError(
                f"{name} is {values.dtype} of shape {values.shape}; it must be float32 of shape {wanted}"
            )
        if not np.isfinite(values).all():
            raise ConfigError(f"{name} holds NaN or infinity")
        if name in _SQUARE:
            uneven = np.abs(values - values.swapaxes(-1, -2)).max(initial=0)
            if uneven > _UNEVEN * np.abs(values).max(initial=0):
                raise ConfigError(f"{name} is not symmetric: it differs from its transpose by {uneven:.3g}")
    return layers, heads, dim


def standard(geometry: Geometry) -> Moments:
    """Of independent standard normal keys, values and queries, whose errors all cost the same."""
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    unit = np.broadcast_to(np.eye(geometry.head_dim, dtype=np.float32), (*shape, geometry.head_dim))
    return Moments(np.zeros(shape, np.float32), *(unit.copy() for _ in _SQUARE))


def check_keys(keys: KeyTransform, about: About) -> None:
    """Raises ConfigError: a field is not finite or not of the shape and dtype that `about` says, a variance is 0,
    or a weight is negative.
    """
    head = (about.layers, about.kv_heads)
    square = (*head, about.head_dim, about.head_dim)
    wanted = ((*head, about.head_dim), square, square, (*head, about.page_tokens, about.head_dim), head)
    for name, values, shape in zip(keys._fields, keys, wanted, strict=True):
        if values.shape != shape or values.dtype != np.float32:
            raise ConfigError(
                f"{_PAGES}{name} is {values.dtype} of shape {values.shape}; it must be float32 of shape {shape}"
            )
        if not np.isfinite(values).all():
            raise ConfigError(f"{_PAGES}{name} holds NaN or infinity")
    if (keys.variance <= 0).any():
        raise ConfigError(f"{_PAGES}variance is not above 0 everywhere")
    if (keys.weights < 0).any():
        raise ConfigError(f"{_PAGES}weights holds one below 0")


def plain_keys(geometry: Geometry) -> KeyTransform:
    """Of independent standard normal keys and queries, whose heads count the same."""
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    unit = np.broadcast_to(np.eye(geometry.head_dim, dtype=np.float32), (*shape, geometry.head_dim))
    variance = np.ones((*shape[:2], geometry.page_tokens, geometry.head_dim), np.float32)
    weights = np.ones(shape[:2], np.float32)
    return KeyTransform(np.zeros(shape, np.float32), unit.copy(), unit.copy(), variance, weights)


def save(path: Path, moments: Moments, keys: KeyTransform, about: About) -> None:
    """Write the file whole or not at all; its folder is made.

    Raises:
        ConfigError: moments or keys are not what `about` says, or the file cannot be written.
    """
    _check_shape(moments, about)
    check_keys(keys, about)
    arrays = moments._asdict() | {_PAGES + name: values for name, values in keys._asdict().items()}
    said = msgspec.json.encode({"version": VERSION, **msgspec.structs.asdict(about)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                np.savez(stream, about=np.frombuffer(said, np.uint8), **arrays)
            os.chmod(fresh, 0o644)
            os.replace(fresh, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
    except OSError as error:
        raise ConfigError(f"cannot write the calibration {path}: {error}; name another file") from error


def load(path: Path) -> tuple[Moments, About]:
    """Raises `ConfigError`, which names the file, where it is missing, damaged, or not a calibration."""
    about, arrays = _read(path, Moments._fields)
    moments = Moments(**arrays)
    try:
        _check_shape(moments, about)
    except ConfigError as error:
        raise ConfigError(f"the calibration {path} cannot be used: {error}; {REDO}") from None
    return moments, about


def load_keys(path: Path) -> tuple[KeyTransform, About]:
    """Raises as `load`."""
    about, arrays = _read(path, tuple(_PAGES + name for name in KeyTransform._fields))
    keys = KeyTransform(*arrays.values())
    try:
        check_keys(keys, about)
    except ConfigError as error:
        raise ConfigError(f"the calibration {path} cannot be used: {error}; {REDO}") from None
    return keys, about


def read_about(path: Path) -> About:
    """Only what the file says of itself. Raises as `load`."""
    return _read(path, ())[0]


def _check_shape(moments: Moments, about: About) -> None:
    if (shape := check(moments)) != about.shape:
        raise ConfigError(f"its moments are of (layers, heads, dim) {shape}, and it says {about.shape}")


def _read(path: Path, names: tuple[str, ...]) -> tuple[About, dict[str, Floats]]:
    try:
        with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
            said = msgspec.json.decode(_array(file, "about").tobytes(), type=dict[str, object])
            if (version := said.pop("version", None)) != VERSION:
                raise ConfigError(
                    f"the calibration {path} has version {version}, and this tierkv reads {VERSION}; {REDO}"
                )
            return msgspec.convert(said, About), {name: _array(file, name) for name in names}
    except OSError as error:
        raise ConfigError(f"the calibration {path} cannot be read: {error}; {REDO}") from error
    except _DAMAGE as error:
        raise ConfigError(f"{path} is not a whole calibration: {error}; {REDO}") from error


def _array(file: np.lib.npyio.NpzFile, name: str) -> NDArray[Any]:
    """Raises ValueError where the member is none: numpy hands its bytes out then."""
    found = file[name]
    if not isinstance(found, np.ndarray):
        raise ValueError(f"{name} is no array")
    return found
