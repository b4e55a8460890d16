"""Calibration files of models (`tierkv calibrate` writes them), and states of codecs that are fitted from them.

Files are looked for when a codec's state is fitted, so that one written meanwhile is found. Nothing that is wrong with
a file keeps a model from being served: it is logged, and the state comes from the model's pages instead.

The state of digests is read when the daemon starts: what a digest holds does not change while it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierkv.errors import ConfigError
from tierkv.geometry import Geometry
from tierkv.prefetch.digest_forms import describes
from tierkv.prefetch.transform_digests import flat_state
from tierkv.quant import moments
from tierkv.quant.contract import Codec, Floats
from tierkv.quant.moments import About

log = logging.getLogger(__name__)

UNCALIBRATED = "not calibrated: run tierkv calibrate"


class Calibrations:
    """Used by the mover's thread; `fits` may be read by any.

    Args:
        place: a file, or a folder of files `*.npz`; None for no calibrations. It need not exist.
        digests: whether any digest has a state; else none is read.
    """

    def __init__(self, place: Path | None, digests: bool = False) -> None:
        self._place = place
        self._keys = list(self._read_keys()) if digests else []
        self.fits: dict[str, str] = {}
        """By model, what the latest state of a codec that takes moments was fitted from."""

    def fit(self, codec: Codec, model_id: str, geometry: Geometry) -> Floats | None:
        """The state from the model's latest calibration, `None` where there is none that can be used."""
        for file in self._files():
            try:
                if not self._is_of(file, model_id, geometry):
                    continue
                state = codec.fit_moments(geometry, moments.load(file)[0])
                if not np.isfinite(state).all():
                    raise ConfigError(f"the state of {codec.name} from {file} is not finite; {moments.REDO}")
            except (ConfigError, ValueError) as error:
                log.warning("a calibration is left out: %s", error)
                continue
            self.fits[model_id] = f"calibrated ({file})"
            log.info("model %s is %s", model_id, self.fits[model_id])
            return state
        self.fits[model_id] = UNCALIBRATED
        log.warning("model %s is %s", model_id, UNCALIBRATED)
        return None

    @property
    def digest_models(self) -> tuple[About, ...]:
        """Models and geometries that have a `digest_state`."""
        return tuple(about for _, about in self._keys)

    def digest_state(self, model_id: str, geometry: Geometry) -> Floats:
        """Of the latest calibration of the model, as `prefetch.transform_digests` reads it.

        Raises:
            ValueError: there is none.
        """
        for keys, about in self._keys:
            if describes(about, model_id, geometry):
                return flat_state(keys)
        raise ValueError(f"no calibration of {model_id!r} says how its digests are made")

    def _read_keys(self) -> Iterator[tuple[moments.KeyTransform, About]]:
        """The latest first."""
        for file in self._files():
            try:
                keys, about = moments.load_keys(file)
            except ConfigError as error:
                log.warning("a calibration is left out: %s", error)
                continue
            log.info("%s says how digests of %s are made", file, about.model_id)
            yield keys, about

    def _files(self) -> list[Path]:
        if self._place is None:
            return []
        try:
            if not self._place.exists():
                return []
            if self._place.is_file():
                return [self._place]
            return sorted(self._place.glob("*.npz"), key=_written, reverse=True)
        except OSError as error:
            log.warning("calibrations cannot be looked for: %s", error)
            return []

    def _is_of(self, file: Path, model_id: str, geometry: Geometry) -> bool:
        about = moments.read_about(file)
        if not about.is_of(model_id):
            return False
        if not about.fits(geometry):
            wanted = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
            raise ConfigError(
                f"{file} is of {model_id} with (layers, KV heads, head_dim) {about.shape}, and its pages have "
                f"{wanted}; {moments.REDO}"
            )
        return True


def check(place: Path) -> None:
    """Raises `ConfigError` where the place was named and is not there, or is a file that is no calibration."""
    try:
        exists, is_file = place.exists(), place.is_file()
    except OSError as error:
        raise ConfigError(
            f"calibration = {place} cannot be looked into: {error}; let the daemon's user read it"
        ) from error
    if not exists:
        raise ConfigError(f"calibration = {place} does not exist; name a file or folder of tierkv calibrate")
    if is_file:
        moments.read_about(place)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
