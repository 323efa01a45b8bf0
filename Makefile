# Two commands: `make demo` and `make test`. Both need only python3 (3.11 or newer, with venv) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench clean

demo: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

test: lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Ratios against ByzFL and against the machine, each script in one run. ByzFL without what only its training needs.
bench: $(VENV)/.installed
	$(PIP) --no-deps byzfl==0.0.11
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/round.py
	$(BIN)/python benchmarks/local_steps.py

# The stamps make a second run start at once; a changed dependency list installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rpel into $(VENV) (a few minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rpel and its test tools into $(VENV) (a few minutes the first time)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("rpel needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": try make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not make a virtual environment: install your system's python3-venv package"; exit 1; }

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache .hypothesis
