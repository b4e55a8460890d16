"""Every implementation of paged attention, one after another."""

from __future__ import annotations

import pytest

from tierkv import attention
from tierkv.attention import cpu, prefill
from tierkv.attention.contract import PagedAttention

LONG = (
    "for_any_rows", "joins_many_blocks", "of_many_normal_keys", "more_query_heads",
    "of_every_dtype", "over_packed_pages", "of_every_form",
)  # fmt: skip
"""Tests of very many or very long calls, and those of each codec in a form that other tests have each codec in, too."""

LONG_PARAMETERS = (
    "float16",
    "-8-",
    "-8]",
    "[8-",
    "-20-",
    "-20]",
    "[20-",
    "128",
    "256",
    "-300",
    "-80]",
    "k3v2-96",
)
"""That make a long test of a short one, or are like others that stay."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton's interpreter takes milliseconds for a program of a kernel, so `triton` runs the shorter tests only, and
    those of cold pages, in which every call is four, count as slow.

    What is left out here, `tests/tierkv/test_triton_decode.py` has with fewer pages and heads.
    """
    chosen, left = [], []
    for item in items:
        name, _, parameters = item.name.partition("[")
        long = any(part in name for part in LONG)
        long |= "written" not in name and any(part in f"[{parameters}" for part in LONG_PARAMETERS)
        if "triton" in parameters and "cold" in item.path.name:
            item.add_marker(pytest.mark.slow)
        (left if "triton" in parameters and long else chosen).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


@pytest.fixture(scope="module", params=attention.NAMES)
def implementation(request: pytest.FixtureRequest) -> PagedAttention:
    if request.param != "triton":
        return attention.get(request.param)
    from tests.contract.on_device import OnDevice

    return OnDevice()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill reads 256 earlier tokens at a time."""
    for module in (cpu, prefill):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 256)
