"""What is timed; how fast is for a quiet machine to say."""

from __future__ import annotations

from typing import ClassVar

import torch

from tierkv.benchmarks.quant import in_place, speed
from tierkv.benchmarks.quant.calibrate import Calibration, fit
from tierkv.benchmarks.quant.pages import to_pages
from tierkv.geometry import Geometry
from tierkv.quant.moments import standard
from tierkv.quant.rotated import K3V2


class Unread(K3V2):
    """Its code is one that attention does not know."""

    code: ClassVar[int] = 119


def test_attention_that_does_not_read_a_form_in_place_is_not_timed() -> None:
    geometry = Geometry(1, 2, 64, "bfloat16")
    seen = Calibration(
        geometry, list(to_pages(geometry, speed.window(geometry, quick=True))), standard(geometry)
    )
    state = fit(K3V2(), seen)
    figures = in_place.measure(K3V2(), state, geometry, 4, quick=True)
    assert figures is not None and figures["ours"] > 0 and figures["peer"] > 0
    assert in_place.measure(Unread(), state, geometry, 4, quick=True) is None


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with speed.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
