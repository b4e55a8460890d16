"""The forms that are compared: every codec of `tierkv.quant`, and its peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tierkv import quant
from tierkv.benchmarks.quant import hf_peers, peers
from tierkv.benchmarks.quant.calibrate import Calibration, fit
from tierkv.benchmarks.quant.held import Held, Pages
from tierkv.benchmarks.quant.pages import TORCH
from tierkv.errors import ConfigError
from tierkv.geometry import Geometry

BASELINE = "kivi-g32"
"""The peer that ratios are taken to: always measured."""

PEERS = (BASELINE, *hf_peers.SETTINGS)


class Form(NamedTuple):
    name: str
    peer: bool
    hold: Callable[[torch.Tensor], Held]
    group: int
    """It packs a multiple of so many tokens."""
    note: str = ""


class Skipped(NamedTuple):
    name: str
    why: str


def choose(names: Sequence[str]) -> tuple[str, ...]:
    """The forms to measure; all where none is named. Raises `ConfigError` for a name that is none."""
    known = (*quant.NAMES, *PEERS)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no codec or peer {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(name for name in known if not names or name in names or name == BASELINE)


def build(names: Sequence[str], seen: Calibration) -> tuple[list[Form], list[Skipped]]:
    """Forms for the geometry that was calibrated on, each tried once (which also compiles it), and those that cannot
    run here.
    """
    forms: list[Form] = []
    skipped: list[Skipped] = []
    for name in names:
        try:
            form = _form(name, seen)
            _try(form, seen.geometry)
            forms.append(form)
        except ConfigError as error:
            skipped.append(Skipped(name, str(error)))
    return forms, skipped


def _form(name: str, seen: Calibration) -> Form:
    if name == BASELINE:
        note = "KIVI, arXiv 2402.02750: groups of 32, float16 scale and zero"
        return Form(name, True, peers.Kivi, peers.GROUP, note)
    if setting := hf_peers.SETTINGS.get(name):
        if importlib.util.find_spec(hf_peers.PACKAGE[setting.backend]) is None:
            raise ConfigError('not installed: pip install ".[bench]" in a checkout of tierkv')
        note = (
            f"transformers' QuantizedCache, groups of {hf_peers.GROUP}, axes {setting.axis_key} (keys) and "
            f"{setting.axis_value} (values), scale and zero in the model's dtype"
        )
        return Form(name, True, partial(hf_peers.Cache, setting), hf_peers.GROUP, note)
    codec = quant.get(name)
    hold = partial(Pages, codec, seen.geometry, fit(codec, seen))
    return Form(name, False, hold, seen.geometry.page_tokens)


def _try(form: Form, geometry: Geometry) -> None:
    layers, _, heads, _, dim = geometry.shape
    generator = torch.Generator().manual_seed(0)
    held = form.hold(torch.randn(layers, 2, heads, 64, dim, generator=generator).to(TORCH[geometry.dtype]))
    held.encode()
    held.decode()
