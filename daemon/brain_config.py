"""What a brain is set to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierkv.daemon.policy import Policy, Thresholds
from tierkv.prefetch.digest_settings import DEFAULT_BYTES, DigestSetting
from tierkv.quant.moments import About


@dataclass(frozen=True)
class BrainConfig:
    """Sizes in bytes, watermarks as free fractions of HBM, bandwidth in bytes a second (0: unbounded).

    `middle` names the form between exact and low-bit (empty: none), which pages below `middle_below` may take (`None`:
    halfway from the threshold of low-bit to that of promotion).

    `policy` is a name, or the policy itself where its settings are not the defaults. `digest_share` is the fraction of
    HBM that digests of cold pages may take (0: none are made), `digest_layers` how many of a page's last layers they
    describe (0: all), `digest` their form, of which `digest_bytes` are those of a transform's record, and
    `digest_models` what calibrations for it are at hand (`prefetch.digest_forms`). `promotion_batch`: bytes that are
    read for promotions at a time (`moves.BATCHES` in flight). `retain_most` is how many seconds a hint may keep pages
    from leaving HBM. `predict`: silent sessions are taken for paused. `waste_limit` is the share that may be
    wasted of pages that take others' places (1: any).
    """

    hbm_bytes: int
    host_bytes: int
    epoch: int = 1
    codec: str = "k3v2"
    middle: str = ""
    middle_below: float | None = None
    policy: str | Policy = "memdecay"
    page_tokens: int = 16
    straddle: bool = False
    demotion: Literal["pressure", "eager"] = "pressure"
    backup: Literal["on_seal", "on_demote", "never"] = "on_seal"
    thresholds: Thresholds | None = None
    low_watermark: float = 0.05
    high_watermark: float = 0.10
    sink_tokens: int = 16
    recent_tokens: int = 64
    pins: tuple[tuple[str, str], ...] = (("system", "attendable"),)
    pin_quota: float = 0.5
    digest_share: float = 0.1
    digest_layers: int = 0
    digest: DigestSetting = "auto"
    digest_bytes: int = DEFAULT_BYTES
    digest_models: tuple[About, ...] = ()
    min_residency_steps: int = 8
    max_moves_in_flight: int = 32
    move_bandwidth: int = 0
    promotion_batch: int = 8 << 20
    waste_limit: float = 0.25
    retain_most: float = 600.0
    predict: bool = False
    log_events: int = 10_000
