# `make help` lists what can be made.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-all check format bench damage fuzz reliability audit zoo mutants gpu-test clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## train a small decoder on this machine, from plan to report
	$(BIN)/mw train examples/laptop.toml

test: $(STAMP) ## run the tests but the long ones: about ten minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP) ## run the long tests: every case of every proof
	$(BIN)/python -m pytest -m slow

check: $(STAMP) ## lint, check the format and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## run the benchmarks behind the numbers in the README
	$(BIN)/python -m benchmarks.run

damage: $(STAMP) ## damaged files of every kind that mw reads
	$(BIN)/python -m benchmarks.damage

reliability: $(STAMP) ## failures of every kind provoked and counted: rows without a full result (hours)
	$(BIN)/python -m benchmarks.reliability

audit: $(STAMP) ## known vulnerabilities of what is installed (asks a database over the network), licences, pip check
	$(BIN)/pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --skip-editable --progress-spinner off
	$(BIN)/python -m pytest tests/house/test_dependencies.py

MINUTES ?= 10
SEED ?= 0

fuzz: $(STAMP) ## random plans against a plain torch loop: MINUTES=10, or SEED=123 for one of them
	$(BIN)/python -m benchmarks.fuzz --minutes $(MINUTES) --seed $(SEED)

zoo: $(STAMP) ## architectures of other libraries x plans against a plain torch loop
	$(BIN)/python -m benchmarks.zoo

mutants: $(STAMP) ## put faults into the package one at a time: does mw check notice each of them?
	$(BIN)/python -m benchmarks.mutants

gpu-test: $(STAMP) ## on the GPU at hand: sharded pieces, plans of several ranks that share it, CUDA tests
	$(BIN)/python -m benchmarks.gpu test

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
