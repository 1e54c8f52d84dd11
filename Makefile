# Every target makes the environment first if it is missing or out of date.
# Options of the program behind a target go into ARGS: make run ARGS="--recipe small"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-all faults cluster-test bench lint docs dist images

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: $(STAMP)  ## the whole pipeline on this machine (ARGS: see `kubedet run --help`)
	@$(BIN)/kubedet run $(ARGS)

# Three at a time on two cores: nearly half of their time the quick ones wait, for a server or a process.
test: $(STAMP)  ## what every change needs (ARGS: pytest's, e.g. ARGS="-m 'not slow'")
	@$(BIN)/python -m pytest -n 3 --dist worksteal --durations=50 --durations-min=5 $(ARGS)

test-all: $(STAMP)  ## also benchmarks, browsers, the wheel, the site and more fuzzing (ARGS="-m extra": only these)
	@KUBEDET_FUZZ=$${KUBEDET_FUZZ:-4} $(BIN)/python -m pytest -n 3 --dist worksteal --all $(ARGS)

faults: $(STAMP)  ## inject faults into every stage, and write build/faults.md (a few minutes)
	@$(BIN)/python -m pytest tests/faults -m faults -n 2 $(ARGS); status=$$?; cat build/faults.md; exit $$status

cluster-test: $(STAMP)  ## the tests on the cluster of KUBECONFIG: see tests/cluster/README.md
	@$(BIN)/python -m pytest tests/cluster -n 2 $(ARGS)

bench: $(STAMP)  ## every benchmark for a CPU, in under 15 minutes (ARGS: some of them, by name)
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(STAMP)  ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, in build/docs/site
	@$(BIN)/python docs/site/pages.py build/docs >/dev/null
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file build/docs/mkdocs.yml
	@echo "to read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs/site"

dist: $(STAMP)  ## the wheel and the source distribution, in dist/
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@ls dist/*

images:  ## build the container images (needs docker)
	@images/build.sh $(ARGS)

# The stamp is written last: an installation that was cut short is not taken for whole.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; set PYTHON: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module; install it (Debian: apt-get install python3-venv)" >&2; exit 2; }
	@echo "making the environment in $(VENV) (about 8 GB, a few minutes) ..."
	@rm -f $(STAMP)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,signing,registry,docs,dev]'
	@touch $(STAMP)
