# mlxlite: `make run` serves the default model, `make test` tests everything; both set up what they need.
#
#   make run [MODEL=name] [PORT=8080] [ARGS="--flag value"]
#   make test | test-fast | test-clients | test-npm | test-web | soak | check | bench | setup | clean
#
# Linux on x86-64 without an NVIDIA driver installs MKL (655 MB), ten times the speed; NO_MKL=1 skips it.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin

# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# macOS needs no backend extra; Linux takes CUDA by driver version (13 needs driver 580), else the CPU build.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 | grep -E '^[0-9]+$$')
ifeq ($(shell uname -s),Darwin)
EXTRAS := grammar,web
else ifneq ($(DRIVER),)
EXTRAS := $(shell [ $(DRIVER) -ge 580 ] && echo cuda13 || echo cuda12),grammar,web
else ifeq ($(shell uname -m)$(NO_MKL),x86_64)
EXTRAS := cpu,mkl,grammar,web
else
EXTRAS := cpu,grammar,web
endif

# Python's bytecode is kept whatever the caller's environment says: tests start some hundred servers.
unexport PYTHONDONTWRITEBYTECODE

COMMA := ,
STAMP := $(VENV)/.set-up$(if $(EXTRAS),-$(subst $(COMMA),-,$(EXTRAS)))

.PHONY: setup setup-test run test test-fast test-clients test-npm test-web soak check bench clean

# A file stays on one worker: its fixtures are models and servers. Their order is tests/conftest.py's.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

setup: $(STAMP)
setup-test: $(STAMP)-test

$(VENV)/.made:
	@[ -n "$(PYTHON)" ] || { echo "mlxlite needs Python 3.11 or newer; none was found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# From 25.1 on pip resumes a broken download; a venv starts with the pip of its Python, often older.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1" || \
		echo "pip stays as it is: a download that breaks off will start over" >&2
	@touch $@

$(STAMP): $(VENV)/.made pyproject.toml
	@echo "Setting up $(VENV): about a minute, $(if $(findstring mkl,$(EXTRAS)),1.3 GB with MKL (655 MB; NO_MKL=1 skips it),0.7 GB)."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@

$(STAMP)-test: $(STAMP)
	@# Most of what these packages bring is never imported: what is, is compiled then.
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".[$(if $(EXTRAS),$(EXTRAS)$(COMMA))test]"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps instructor
	@touch $@

run: setup
	@$(if $(MODEL),$(BIN)/mlxlite get $(MODEL))
	@$(BIN)/mlxlite serve $(strip $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS))

test: setup-test
	$(BIN)/mlxlite get
	$(BIN)/python -m pytest -q $(PARALLEL)
	@$(MAKE) --no-print-directory test-web

# What needs neither seconds nor the real model, for the work in between.
test-fast: setup-test
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not real and not slow and not bench and not clients and not npm and not web"

# Real clients from PyPI against the live server (tests/clients); `make test` runs them too.
test-clients: setup-test
	$(BIN)/mlxlite get
	$(BIN)/python -m pytest -q $(PARALLEL) -m clients tests/clients

# Clients from npm, in a network with nothing but loopback where the system lets us make one. CI may
# install npm; elsewhere its absence is one line.
NPM := $(VENV)/npm
ALONE = $(shell unshare --map-root-user --net true 2>/dev/null && echo unshare --map-root-user --net)

$(NPM)/.made: tests/clients_npm/package.json
	@mkdir -p $(NPM)
	@cp $< $(NPM)
	@echo "Setting up $(NPM): the clients from npm, 1.1 GB."
	cd $(NPM) && npm install --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error
	@touch $@

test-npm: setup-test
	@command -v npm >/dev/null || { [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] && command -v apt-get && \
		apt-get update && apt-get install --yes --no-install-recommends npm; } >/dev/null 2>&1 || true
	@if command -v npm >/dev/null; then \
		$(MAKE) --no-print-directory $(NPM)/.made && \
		$(ALONE) $(BIN)/python -m pytest -q -m npm tests/clients_npm; \
	else \
		echo "not run: tests/clients_npm, the clients from npm (there is no npm on this machine)"; \
	fi

# The page in a real Chromium (tests/web); `make test` runs them too. CI may install it; elsewhere its
# absence is one line. Pictures of the pages: MLXLITE_WEB_SHOTS names their folder.
# The page's figures are measured after the rest, with no other browser beside.
FIGURES := tests/web/test_figures.py
FIND_CHROMIUM := $(BIN)/python -c 'import sys; from tests import browser; sys.exit(browser.find() is None)'

test-web: setup-test
	@$(FIND_CHROMIUM) || { [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] && command -v apt-get && \
		apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || true
	@if $(FIND_CHROMIUM); then \
		$(BIN)/mlxlite get && \
		$(BIN)/python -m pytest -q $(PARALLEL) -m "web and not bench" tests/web --ignore=$(FIGURES) && \
		$(BIN)/python -m pytest -q -m "web and not bench" $(FIGURES); \
	else \
		echo "not run: tests/web, the page in a browser (there is no Chromium on this machine)"; \
	fi

# Random traffic on a real server for 20 minutes (tests/soak.py); ARGS="--minutes 60 --seed 7".
soak: setup-test
	$(BIN)/python -m tests.soak $(ARGS)

check: setup-test
	$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: setup-test
	$(BIN)/mlxlite get
	$(BIN)/mlxlite bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find mlxlite tests -name __pycache__ -type d -prune -exec rm -rf {} +
