# make demo    rank every head of the demo model (installs first, if needed)
# make test    run the tests
# make checks  format, lint, types, import directions

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test checks clean

demo: .venv/.installed
	$(BIN)/python experiments/rank_heads.py

test: .venv/.installed-dev
	$(BIN)/python -m pytest

checks: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n 0 tests/test_imports.py

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Reinstalled only when what is installed has changed.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing mhaprune into .venv (a minute or two) ..."
	$(INSTALL) -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Installing the development tools into .venv ..."
	$(INSTALL) -e '.[dev,gguf]'
	$(INSTALL) --no-deps sweeps==0.3.0 # for W&B's schema of sweeps; its dependencies are not needed
	@touch $@
