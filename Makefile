PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo check lint types pytest test test-faults docs pages gallery wheel clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "potluck needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing potluck and what it needs into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,flower,ray,export,metrics]'
	@touch $@

install: $(STAMP)  ## build .venv

demo: $(STAMP)  ## train eight unlike clients on the embedded data, print a table, write a report
	@$(BIN)/potluck demo

check: lint types  ## lint, formatting, imports between floors, types, documentation

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP)
	@$(BIN)/mypy
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide warnings from --strict, too

pytest: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: lint  ## all checks and tests, a process per core; types are checked beside the tests
	@$(MAKE) --no-print-directory -j2 pytest types

test-faults: $(STAMP)  ## federations of real processes on Flower and homes on Ray, with kills and refusals (two hours)
	@$(BIN)/python -m pytest tests/deploy tests/engine -m faults

docs: $(STAMP)  ## serve the documentation site on this machine
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pages: $(STAMP)  ## write docs/methods/ anew from docstrings, contracts and options, and the tutorial's notebook
	@$(BIN)/python tools/method_pages.py
	@$(BIN)/python tools/notebook.py

gallery: $(STAMP)  ## draw every kind of picture, and write docs/gallery.md
	@$(BIN)/python tools/gallery.py

wheel: $(STAMP)  ## build the wheel into dist/
	@$(BIN)/python -m build --wheel --outdir dist

clean:  ## remove .venv and everything built
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
