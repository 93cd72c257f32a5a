# make demo   install, then a short chat and one scripted agent session, with its reuse table
# make test   install, then lint, types, import rules and tests
# make e2e    every real harness against a local server (make e2e-core: Claude Code and Codex, as CI does)
# Also: lint, deep (tests too long for CI), wheel (build it and look inside), families (write docs/families.md),
# harnesses (write docs/harnesses.md from what e2e measured), clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed first where there is no GPU: the plain requirement would bring gigabytes of CUDA libraries.
# `==2.13.0` also matches the local version 2.13.0+cpu, which pip prefers wherever one of its indexes offers it.
TORCH_CPU ?= torch==2.13.0
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard engine/native/*.cpp engine/native/*.h)
CLIENTS := .e2e
NPM_INSTALL := npm install --no-package-lock --no-audit --no-fund --loglevel error

.PHONY: demo test e2e e2e-core harnesses lint deep wheel families clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo
	$(BIN)/ft demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not deep and not e2e"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

e2e: $(VENV)/installed-dev $(CLIENTS)/installed $(CLIENTS)/installed-more
	$(BIN)/python -m pytest -m e2e tests/e2e

e2e-core: $(VENV)/installed-dev $(CLIENTS)/installed
	$(BIN)/python -m pytest -m "e2e and not wide" tests/e2e

harnesses: $(VENV)/installed-dev
	$(BIN)/python -m tests.e2e.report

deep: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m deep --timeout 0

wheel: $(VENV)/python
	rm -rf dist
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir dist .
	$(BIN)/python tests/wheel_contents.py dist/*.whl

families: $(VENV)/installed-dev
	$(BIN)/python -m tests.parsers.families_page

clean:
	rm -rf $(VENV) $(CLIENTS) build dist

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "A C++17 compiler is needed (Debian, Ubuntu: apt install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/torch: $(VENV)/python
	@command -v nvidia-smi >/dev/null || { echo "Installing $(TORCH_CPU) for the CPU"; $(PIP) "$(TORCH_CPU)"; }
	@touch $@

$(VENV)/installed-demo: $(VENV)/torch $(BUILD_INPUTS)
	@echo "Building and installing (a few minutes)"
	@$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/torch $(BUILD_INPUTS)
	@echo "Building and installing, with development tools (a few minutes)"
	@$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/installed-demo

$(CLIENTS)/installed: tests/e2e/package.json
	@command -v npm >/dev/null || { echo "npm is needed to install the clients (Debian, Ubuntu: apt install npm)"; exit 1; }
	mkdir -p $(CLIENTS)
	cp tests/e2e/package.json $(CLIENTS)/package.json
	cd $(CLIENTS) && $(NPM_INSTALL)
	@touch $@

# openclaw refuses to be installed under an older Node than 24; the Python clients have requirements that ours exclude.
$(CLIENTS)/installed-more: tests/e2e/clients/more.json tests/e2e/clients/node24.json $(CLIENTS)/installed
	mkdir -p $(CLIENTS)/more $(CLIENTS)/openclaw
	cp tests/e2e/clients/more.json $(CLIENTS)/more/package.json
	cp tests/e2e/clients/node24.json $(CLIENTS)/openclaw/package.json
	cd $(CLIENTS)/more && $(NPM_INSTALL)
	cd $(CLIENTS)/openclaw && $(NPM_INSTALL)
	cd $(CLIENTS)/openclaw && PATH="$$PWD/node_modules/.bin:$$PATH" $(NPM_INSTALL) openclaw@2026.9.6
	$(PYTHON) -m venv $(CLIENTS)/aider
	$(CLIENTS)/aider/bin/python -m pip install -qq --disable-pip-version-check aider-chat==0.86.2
	$(PYTHON) -m venv $(CLIENTS)/mini
	$(CLIENTS)/mini/bin/python -m pip install -qq --disable-pip-version-check mini-swe-agent==2.4.6
	@touch $@
