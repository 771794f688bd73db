# Sets up longstraw_jax in a virtual environment of its own, and runs it there. Needs Python >= 3.11 and nothing else.
#   make demo PYTHON=/usr/bin/python3.12     another Python
#   make test ARGS="tests/models -x"         arguments for the command behind the target
#   make test WORKERS=1                      in one process; files of tests are dealt to that many

VENV := .venv
ARGS ?=
WORKERS ?= 2
PYTHON ?= python3
# Tried in turn where `python3` is too old; a Python that was asked for by name has no substitute.
ifeq ($(origin PYTHON),file)
FALLBACKS := python3.12 python3.11 python3.13 python3.14
endif

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench clean FORCE

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' Makefile

venv: $(VENV)/.test  ## the whole environment, tests' dependencies included, in .venv

demo: $(VENV)/.base  ## one GRPO step from capture to update on this machine, nothing to prepare
	$(VENV)/bin/longstraw demo $(ARGS)

test: $(VENV)/.test  ## the test suite
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/.lint  ## ruff over the whole tree
	$(VENV)/bin/python -m ruff check $(ARGS) .

bench: $(VENV)/.test  ## a step against the conventional one in PyTorch, into benchmarks/results
	$(VENV)/bin/python benchmarks/full_sequence.py $(ARGS)

clean:  ## removes .venv and everything that builds and tests left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment, filled in steps; a step is due again when pyproject.toml is newer than its stamp.
# `.whole` holds the environment's own path from the end of one install to the start of the next. So an environment whose
# install was cut short, or that was moved, or whose Python is gone, is not whole: it is made anew rather than mended.
is_whole = test "`cat $(VENV)/.whole 2>/dev/null`" = "`pwd -P`" && $(VENV)/bin/python -c '' 2>/dev/null
ifneq ($(shell $(is_whole) && echo yes),yes)
$(VENV)/.base $(VENV)/.test $(VENV)/.lint: FORCE
endif
FORCE:

define install
@rm -f $(VENV)/.whole
$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.$(EXTRAS)'
@pwd -P > $(VENV)/.whole
@touch $@
endef

$(VENV)/.base: EXTRAS :=
$(VENV)/.base: pyproject.toml Makefile
	@if $(is_whole); then exit 0; fi; \
	found=; \
	for candidate in '$(PYTHON)' $(FALLBACKS); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    version=`'$(PYTHON)' --version 2>&1 | head -n 1`; \
	    echo "longstraw_jax needs Python 3.11 or newer, and '$(PYTHON)' says: $$version" >&2; \
	    echo "Install one, or name it: make venv PYTHON=/path/to/python3.12" >&2; \
	    exit 2; \
	fi; \
	echo "Making $(VENV) with $$found, $$("$$found" --version)"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV)
	$(install)

$(VENV)/.test: EXTRAS := [test,text,plot,plan]
$(VENV)/.test: $(VENV)/.base
	$(install)

$(VENV)/.lint: EXTRAS := [lint]
$(VENV)/.lint: $(VENV)/.base
	$(install)
