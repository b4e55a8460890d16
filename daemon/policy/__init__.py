"""Score policies: pure functions over per-token arrays, selectable by name.

memdecay       MemDecay (arXiv 2607.10582): decay by region, refreshed by attention
memdecay-lift  the same with attention as lift over the uniform level, and a slow memory
ema            moving average of attention times recency of access
h2o            H2O (arXiv 2306.14048): accumulated attention
streaming      StreamingLLM (arXiv 2309.17453): sinks and the latest tokens
random         chance, with sinks and the latest tokens
tova           TOVA (arXiv 2401.06104): the latest observation
snapkv         SnapKV (arXiv 2404.14469): a window of observations, pooled
full           everything alike
"""

from __future__ import annotations

from tierkv.daemon.policy.contract import Policy, Thresholds
from tierkv.daemon.policy.files import POLICIES, dumps, get, load
from tierkv.daemon.policy.tokens import Seen, TokenState

__all__ = ["POLICIES", "Policy", "Seen", "Thresholds", "TokenState", "dumps", "get", "load"]
