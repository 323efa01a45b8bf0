# `make demo` to see it, `make check` while working, `make test` before a change lands, `make test-all` before a release.
# All need only python3 (3.11 or newer, with venv) and make; what else they use they install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip would compile twelve thousand files one after the other; some of them are meant for other versions of Python.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
# Byte code is kept whatever the environment says: the tests start a hundred processes.
export PYTHONDONTWRITEBYTECODE :=

# Two cores and many tests that wait for a network: more processes than cores. Files stay whole, so that what a file sets up
# is set up once, and those that wait are begun first.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder
BESIDE := $(MAKE) --no-print-directory --jobs=2

.PHONY: demo check test test-all lint unit tests docs bench sbom clean

demo: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

# Style, types, layers and the tests that start no processes: the checkers beside the tests, under 2 minutes on 2 cores.
check: $(VENV)/.installed-dev
	@$(BESIDE) --output-sync=target lint unit

# One real test for each capability, with what .[dev] installs and 1,000 fault schedules: under 10 minutes on 2 cores.
test: $(VENV)/.installed-dev
	@$(BESIDE) --output-sync=line lint tests

# Everything: 10,000 fault schedules, whole matrices, and all that needs further packages. Allow an hour.
test-all: lint $(VENV)/.installed-all $(VENV)-trainers/.installed $(VENV)-trackers/.installed $(VENV)-flower/.installed $(VENV)-opacus/.installed
	$(PYTEST) -m ""
	$(VENV)-trainers/bin/python -m pytest -q -m "" -W ignore tests/integrations/test_trainers.py tests/promises/test_hugging_face.py
	$(VENV)-trackers/bin/python -m pytest -q -m "" -W ignore tests/integrations/test_trackers.py
	$(VENV)-flower/bin/python -m pytest -q -m "" -W ignore tests/integrations/test_flower.py
	$(VENV)-opacus/bin/python -m pytest -q -m "" -W ignore tests/integrations/test_opacus.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_tests.py
	$(BIN)/python tools/size.py --check

tests: $(VENV)/.installed-dev
	$(PYTEST)

unit: $(VENV)/.installed-dev
	$(PYTEST) -n 2 -m "not integration and not full"

# The site, into site/: every page is executed, warnings and dead links are errors. What pages print is kept in .docs-cache
# until rpel's code or the page's changes: 220 CPU-seconds with nothing kept, 13 with everything.
docs: $(VENV)/.installed-docs
	@echo "building the site: a few minutes where pages are executed, well under one where only words changed"
	rm -rf site jupyter_execute
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/sphinx-build -W --keep-going -q docs site
	@rm -rf jupyter_execute
	@echo "open site/index.html"

# Ratios against ByzFL and against the machine, each script in one run. ByzFL without what only its training needs.
bench: $(VENV)/.installed
	$(PIP) --no-deps byzfl==0.0.11
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/round.py
	$(BIN)/python benchmarks/local_steps.py
	$(BIN)/python benchmarks/rivals.py
	$(BIN)/python benchmarks/start.py

# What a deployment contains, as CycloneDX JSON: components, versions, licences, hashes, and what depends on what.
sbom: $(VENV)/.installed
	$(BIN)/python tools/deployment.py sbom > rpel.cdx.json
	@echo "wrote rpel.cdx.json"

# The stamps make a second run start at once; a changed dependency list installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rpel into $(VENV) (a few minutes the first time)"
	$(PIP) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rpel and its test tools into $(VENV) (a few minutes the first time)"
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-all: pyproject.toml constraints.txt $(VENV)/.installed-dev
	@echo "installing what only some tests need (Ray, documentation) into $(VENV)"
	$(PIP) -e '.[dev,cluster,docs]'
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rpel and what builds its site into $(VENV)"
	$(PIP) -e '.[docs]'
	@$(COMPILE)
	@touch $@

# Libraries that want other versions than constraints.txt pins have an environment of their own.
$(VENV)-trainers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-trainers
	$(VENV)-trainers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' \
		transformers peft accelerate lightning datasets
	@touch $@

$(VENV)-trackers/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-trackers
	$(VENV)-trackers/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==2.13.0 \
		mlflow wandb pytest hypothesis pytest-xdist
	@touch $@

$(VENV)-flower/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-flower
	$(VENV)-flower/bin/python -m pip install --quiet --disable-pip-version-check -e . torch==2.13.0 \
		'flwr[simulation]==1.41.0' pytest hypothesis pytest-xdist
	@touch $@

$(VENV)-opacus/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-opacus
	$(VENV)-opacus/bin/python -m pip install --quiet --disable-pip-version-check -e '.[privacy]' torch==2.13.0 \
		opacus==1.6.0 pytest hypothesis pytest-xdist
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("rpel needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": try make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not make a virtual environment: install your system's python3-venv package"; exit 1; }

clean:
	rm -rf $(VENV) $(VENV)-trainers $(VENV)-trackers $(VENV)-flower $(VENV)-opacus build dist demo site .docs-cache docs/_generated rpel.cdx.json .mypy_cache .ruff_cache .hypothesis
