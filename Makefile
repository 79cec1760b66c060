# Everything runs in .venv, which make creates itself. PYTHON names the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
SETUP  := pyproject.toml constraints.txt
# One thread unless told otherwise: torch's threads wait for each other by spinning, and on a shared machine two of them
# can be many times slower than one. Two test processes; a test of threads sets their number itself.
export OMP_NUM_THREADS ?= 1
PYTEST_ARGS ?= -n 2

.PHONY: help demo test lint format types docs examples bench bench-compare clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "nvalchemi needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What a user needs to run the demo, and on top of it what a developer needs.
$(VENV)/.runtime: $(SETUP) | $(BIN)/python
	@echo "installing nvalchemi with its command line and SevenNet into $(VENV): a few minutes"
	$(PIP) -e '.[cli,sevennet]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what the tests need"
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.runtime  ## relax real crystals, then a short NVT run; results in demo_output/
	$(BIN)/python examples/01_relax_crystals.py --output demo_output

test: $(VENV)/.dev  ## all tests, doctests and the code blocks of the documentation
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## rewrite the code to the format that lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## pyright, strict, on src
	$(BIN)/pyright

docs: $(VENV)/.dev  ## the site in docs/_build/html (warnings are errors); make test runs its code blocks
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html
	$(BIN)/python -m pytest -q tests/docs -k "not blocks_of_page"

examples: $(VENV)/.dev  ## run every numbered example
	$(BIN)/python examples/run_all.py

bench: $(VENV)/.dev  ## run the benchmarks
	$(BIN)/python benchmarks/run_all.py

bench-compare: $(VENV)/.dev  ## speed against another commit: make bench-compare BASE=HEAD~1
	$(BIN)/python benchmarks/compare.py $(BASE)

clean:  ## remove everything that make created
	rm -rf $(VENV) demo_output examples/output docs/_build .pytest_cache .ruff_cache .hypothesis build dist
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
