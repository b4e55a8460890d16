"""Claims about what a step says of cold pages."""

from __future__ import annotations

import numpy as np

from tierkv import attention, quant
from tierkv.attention.contract import PoolView
from tierkv.cold_look import ColdLook, Looks
from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.rows import ColdRows
from tierkv.table import Kind
from tierkv.tally import Tally

PAGE = Geometry(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", page_tokens=4)


def test_an_audit_of_a_query_that_is_not_finite_is_still_a_number() -> None:
    """The daemon refuses others, and a refused observation makes the session's next step raise."""
    row = ColdRows(
        np.array([7, 8]), np.array([0, 576]), np.array([0, 2048]), np.full(2, Kind.EXACT, np.int8),
        np.array([4, 4], np.int32), np.array([0, 4]), np.zeros(2, np.bool_),
    )  # fmt: skip
    host = PoolView(
        np.zeros(4096, np.uint8), PAGE, quant.get("k3v2"), np.zeros(0, np.float32), DEVIATION.of(PAGE, 1)
    )
    look = ColdLook([row], [0], host, host, Looks(estimates=True, audit=True), Tally(attention.get("cpu")))
    assert isinstance(look.seen.estimates, np.ndarray)
    look.seen.estimates[:] = np.nan, 0.25
    audit = look.audit(0, 12, np.array([1.0], np.float32), np.array([Kind.EXACT], np.int8), layers=1)
    assert audit is not None
    assert audit.estimated == 0.25
