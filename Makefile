# Every target sets up what it needs: a virtual environment in .venv, made anew when pyproject.toml changes.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
# The version that the tests were run with; installing drivetrain itself accepts a range.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(shell (cat pyproject.toml; echo '$(TORCH)') | sha256sum | cut -c1-16)

.PHONY: help setup demo test test-fast lint docs bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(READY) ## make the environment

$(READY): | pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "no Python 3.11 or newer found; install one, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON); the first time, torch makes this take a few minutes"
	@[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

demo: $(READY) ## train a small policy with GRPO against the embedded backend (two minutes)
	@$(BIN)/drivetrain demo $(ARGS)

test: $(READY) ## run all tests
	@$(BIN)/python -m pytest $(ARGS)

test-fast: $(READY) ## run the tests but the slow ones
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(READY) ## ruff, mypy, pyright and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/pyright
	@$(BIN)/lint-imports

docs: $(READY) ## run the code blocks of the docs and follow their links
	@$(BIN)/python -m pytest tests/docs $(ARGS)

bench: $(READY) ## measure what drivetrain adds to the bare engine
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

clean: ## remove the environment and the caches
	@rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
