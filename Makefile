# The same commands for people, hooks and continuous integration. Everything is installed into .venv, once; a second run finds it there.
#
#   make serve      install, fetch the embedded model, serve it as an OpenAI-compatible endpoint on http://127.0.0.1:8000
#   make test       install what tests need, run everything that needs no GPU
#   make check      the three-minute loop: lint, format, types, architecture, quick tests
#   make test-tools where apt is, as root: the browser and the Prometheus with which some tests look at the whole (they are skipped without)
#   make test-gpu   GPU tests with PYTHON as it is (installs nothing)
#   make lint | types | format | docs | docs-update | site | bench | clean
#
# On a Linux machine without an NVIDIA driver the CPU build of torch is installed. TORCH and TORCH_INDEX say which, from where.

VENV        ?= .venv
PYTHON      ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
                   $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH       ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
HOST        ?= 127.0.0.1
PORT        ?= 8000
JOBS        ?= 2
ARGS        ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PYTEST  := $(BIN)/python -m pytest
SOURCES := pagedcore kernels adapters
OTHERS  := $(wildcard tests bench examples docs/*.py deploy/observability/grafana)
QUICK   := not gpu and not model and not serve and not slow

# Rooms whose tests need no torch: run on the other Pythons too.
TORCH_FREE := $(wildcard tests/architecture tests/core tests/tenancy tests/observe tests/openai tests/compat tests/cli tests/console tests/tools)
FREE_NEEDS := tests/requirements-torch-free.txt

# One thread a process: the tests run in JOBS processes.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Each of these processes, and each that a test starts, would compile what it imports again, which doubles the time of an import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install serve test check lint format format-check types architecture docs docs-update site bench test-other-pythons test-gpu clean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(VENV)/.dev-installed

# --- environments -----------------------------------------------------------------------------------------------------

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "pagedcore needs Python 3.11, 3.12 or 3.13 with venv; none was found. Say which: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# No NVIDIA driver on Linux: a wheel that pip has at hand (find-links), else the CPU index, else what the default index has.
$(VENV)/.torch-installed: $(VENV)/.created
	@if $(BIN)/python -c 'import torch' >/dev/null 2>&1; then echo "torch is installed"; \
	elif [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then $(PIP) install 'torch>=2.9'; \
	elif $(PIP) install --quiet --no-index --no-deps '$(TORCH)' >/dev/null 2>&1; then echo "$(TORCH): took the wheel at hand"; \
	elif $(PIP) install --retries 0 --timeout 15 --index-url '$(TORCH_INDEX)' '$(TORCH)'; then :; \
	else echo "$(TORCH_INDEX) did not answer; taking $(TORCH) from the default index, which may bring CUDA libraries"; $(PIP) install '$(TORCH)'; fi
	@touch $@

$(VENV)/.serve-installed: pyproject.toml $(VENV)/.torch-installed
	$(PIP) install --quiet --editable '.[litserve]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml $(VENV)/.torch-installed
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.serve-installed

# --- commands ---------------------------------------------------------------------------------------------------------

serve: $(VENV)/.serve-installed
	@env -u OMP_NUM_THREADS $(BIN)/pagedcore serve --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.dev-installed lint-all test-other-pythons
	$(PYTEST) tests -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev-installed lint-all
	$(PYTEST) tests -m "$(QUICK)" -n $(JOBS) --dist loadfile --no-loadscope-reorder --hypothesis-profile check -q $(ARGS)

.PHONY: lint-all
lint-all: lint format-check types

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check $(SOURCES) $(OTHERS)

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix $(SOURCES) $(OTHERS)
	$(BIN)/ruff format $(SOURCES) $(OTHERS)

format-check: $(VENV)/.dev-installed
	$(BIN)/ruff format --check $(SOURCES) $(OTHERS)

types: $(VENV)/.dev-installed
	$(BIN)/mypy

architecture: $(VENV)/.dev-installed
	$(PYTEST) tests/architecture -q $(ARGS)

docs: $(VENV)/.dev-installed
	$(PYTEST) tests/docs -q $(ARGS)

docs-update: $(VENV)/.dev-installed
	$(BIN)/python docs/generate.py

site: $(VENV)/.dev-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.dev-installed
	@env -u OMP_NUM_THREADS $(BIN)/python -m bench $(ARGS)

# 3.12 and 3.13 where they can be had: on PATH (a pyenv shim may be there and fail), or under pyenv's folder.
test-other-pythons:
	@for version in 3.12 3.13; do \
	    found=; \
	    for python in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python; do \
	        if $$python -c "import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" >/dev/null 2>&1; then found=$$python; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then echo "Python $$version: not found, skipped"; continue; fi; \
	    $(MAKE) --no-print-directory test-torch-free FREE_PYTHON=$$found FREE_VENV=.venv-$$version || exit 1; \
	done

.PHONY: test-torch-free
test-torch-free: $(FREE_VENV)/.installed
	@echo "Torch-free tests with $$($(FREE_VENV)/bin/python --version)"
	$(FREE_VENV)/bin/python -m pytest $(TORCH_FREE) -m "$(QUICK) and not needs_torch" -n $(JOBS) -q

$(FREE_VENV)/.installed: $(FREE_NEEDS)
	$(FREE_PYTHON) -m venv $(FREE_VENV)
	$(FREE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $(FREE_NEEDS)
	@touch $@

.PHONY: test-tools
test-tools:
	@for package in chromium prometheus; do \
	    if command -v $$package >/dev/null; then echo "$$package is installed"; \
	    elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package >/dev/null || echo "$$package could not be installed"; \
	    else echo "$$package is not here: install it to run the tests that need it"; fi; done

# Installs nothing and needs no pytest plugin: for a machine whose Python has torch, triton and pytest.
test-gpu: export PYTHONPATH := .:kernels:adapters:tests$(if $(PYTHONPATH),:$(PYTHONPATH))
test-gpu:
	@files=$$(grep -rlE 'mark\.gpu\b' tests --include='test_*.py'); \
	if [ -z "$$files" ]; then echo "no test is marked gpu"; else $(PYTHON) -m pytest -c tests/gpu.ini --rootdir . -m gpu $$files $(ARGS); fi

clean:
	rm -rf $(VENV) .venv-3.12 .venv-3.13 build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find pagedcore kernels adapters tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
