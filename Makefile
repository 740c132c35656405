# make demo    train a real model on this machine, from nothing (about ten minutes)
# make test    style, types and tests
# make install only the environment (.venv)
# make lint    style, types, and known vulnerabilities of what is locked
# make lock    resolve the requirements of pyproject.toml again into locks/cpu.txt
# make clean   remove the environment and caches (runs/ stays)

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# the first interpreter that is new enough; `make PYTHON=/path/to/python` to choose another
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$name"; break; }; \
	done)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP): locks/cpu.txt pyproject.toml tools/install.py tools/install_checks.py tools/install_run.py
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed (looked for python3, python3.13," \
		"python3.12, python3.11); name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" tools/install.py --venv "$(VENV)" --lock locks/cpu.txt
	@touch $@

demo: $(STAMP)
	@$(BIN)/streamrl fetch-model smollm2-135m
	@$(BIN)/streamrl launch --cluster cluster_configs/local.yaml --run experiments/runs/demo.yaml

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/audit.py locks/cpu.txt

# start processes of their own on every core, or compare numbers that another load would change: one at a time
ALONE := tests/end_to_end tests/chaos/test_chaos_live.py tests/generation/test_calibrate.py \
	tests/launch/test_ray_autoscaling.py tests/training/test_losses_against_trl.py

# start one vLLM engine after the other, with low priority: in the time that those above leave
BESIDE := tests/generation/test_engine.py tests/generation/test_parallel_engine.py

test: lint
	$(BIN)/python -m pytest -n 2 $(ALONE:%=--ignore=%) $(BESIDE:%=--ignore=%)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ALONE) $(BESIDE)

# a pip of its own: old ones download every package in order to resolve
lock:
	@"$(PYTHON)" -m venv build/lock-venv
	@build/lock-venv/bin/python -m pip install --quiet --upgrade pip packaging 2>/dev/null
	@build/lock-venv/bin/python tools/lock.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
