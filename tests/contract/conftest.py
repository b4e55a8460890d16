"""Every implementation of paged attention, one after another."""

from __future__ import annotations

import pytest

from tierkv import attention
from tierkv.attention.contract import PagedAttention


@pytest.fixture(scope="module", params=attention.NAMES)
def implementation(request: pytest.FixtureRequest) -> PagedAttention:
    return attention.get(request.param)
