# `make help` lists the commands. They need only python3 (3.11 or newer, with venv) and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Tests start a hundred processes, so Python keeps its byte code whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# Many tests wait for a network, so there are more test processes than cores.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder
PARALLEL := $(MAKE) --no-print-directory --jobs=2 --output-sync=line

.PHONY: help demo check test test-all lint unit tests docs bench clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 12

demo: .venv/.installed ## train under attack with RPEL and with plain averaging, and draw the figure of the README
	$(BIN)/python examples/quickstart.py

check: .venv/.installed-dev ## style, types, layers and the tests that start no processes: under 2 minutes
	@$(PARALLEL) lint unit

test: .venv/.installed-dev ## everything that needs only the [dev] packages: under 10 minutes
	@$(PARALLEL) lint tests

test-all: lint ## everything, with the packages of every integration: allow an hour
	$(PIP) -q -e '.[dev,cluster,docs]' nox
	$(PYTEST) -m ""
	$(BIN)/nox

lint: .venv/.installed-dev
	$(BIN)/ruff check && $(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_tests.py && $(BIN)/python tools/size.py --check

tests: .venv/.installed-dev
	$(PYTEST)

unit: .venv/.installed-dev
	$(PYTEST) -n 2 -m "not integration and not full"

docs: .venv/.installed-docs ## build the site into site/: every page is executed, warnings are errors
	rm -rf site jupyter_execute
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/sphinx-build -W --keep-going -q docs site
	@rm -rf jupyter_execute && echo "open site/index.html"

bench: .venv/.installed ## ratios against rivals and against the machine, each script in one run
	$(PIP) -q --no-deps byzfl==0.0.11
	for name in planning rules round local_steps rivals start; do $(BIN)/python benchmarks/$$name.py || exit 1; done

# pip shows its progress bars here: the first installation takes a few minutes. The stamps make a second run start at once.
.venv/.installed .venv/.installed-dev .venv/.installed-docs: .venv/.installed%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rpel needs Python 3.11 or newer: try make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "install your system's python3-venv package"; exit 1; }
	$(PIP) --no-compile -e '.$(patsubst -%,[%],$*)'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
	@touch .venv/.installed $@

clean: ## remove everything that these commands made
	rm -rf .venv .nox build dist demo site .docs-cache docs/_generated rpel.cdx.json .mypy_cache .ruff_cache .hypothesis
