"""The table of `tierkv bench quant`."""

from __future__ import annotations

import msgspec

from tests.benchmarks.quant.records import record_of, show


def test_in_100_columns_no_cell_is_broken() -> None:
    found = msgspec.structs.replace(
        record_of("quanto-channel", 12.25, 1.021, facts=24),
        kl_ratio_low=7.35, kl_ratio_high=13.10, dnll_low=-0.123, dnll_high=0.111, attention_ms=155.69, attention_ratio=10.81, encode_gbps=10.86,
    )  # fmt: skip
    text = show([found], width=100)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    for cell in (
        "quanto-channel",
        "12.25",
        "1.021..1.021",
        "7.35..13.10",
        "-0.123..0.111",
        "0/1",
        "24/24",
        "155.69 (10.81)",
        "10.86 (0.10)",
    ):
        assert cell in text, cell
