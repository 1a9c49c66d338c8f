# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine: `make demo` and `make test`. They set up $(VENV) by themselves.
# `make test-gpu` and `make bench-gpu` install nothing and use $(PYTHON).

VENV   ?= .venv
PYTHON ?= python3
DEMO   ?= demo
PY     := $(abspath $(VENV))/bin/python
# one stamp for each state of pyproject.toml and place of the checkout, so that a moved or changed one installs again
STAMP  := $(VENV)/.installed-$(shell printf '%s' "$(CURDIR) $$(cksum < pyproject.toml)" | cksum | cut -d' ' -f1)

export MGPU_TEST_DATA ?= $(abspath ../shared/data)

.PHONY: help demo test test-slow bench lint format build test-gpu bench-gpu sanitize clean

help:
	@echo "make demo       make a small city, train on it, evaluate, export: about 10 minutes on 2 cores; STEPS=1000: quicker"
	@echo "make test       the fast test suite: under 15 minutes on 2 cores"
	@echo "make test-slow  training on real photographs"
	@echo "make bench      benchmarks of this machine's CPU; writes JSON to .bench/"
	@echo "make lint       ruff, mypy, clang-format, SPDX lines"
	@echo "make build      compile the native module ahead of the first use"
	@echo "make test-gpu   tests marked gpu, with \$$PYTHON, nothing installed"
	@echo "make sanitize   memcheck and racecheck of the stages and of the tests marked sanitize, on a GPU"
	@echo "make bench-gpu  benchmarks on the GPU, with \$$PYTHON, nothing installed"

$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): 8 GiB, 5 to 20 minutes, silent until done"
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	rm -f $(VENV)/.installed-*
	touch $@

build: $(STAMP)
	$(VENV)/bin/mgpu-splat-build

demo: build
	$(PY) -m ns_mgpu_splat.demo --output $(DEMO) $(if $(STEPS),--steps $(STEPS))

test: build
	$(PY) tests/run_suite.py

test-slow: build
	$(PY) tests/run_suite.py --slow

bench: build
	$(PY) benchmarks/run_all.py

lint: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/check_sources.py

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find cuda -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs $(VENV)/bin/clang-format -i

test-gpu:
	$(PYTHON) tests/run_suite.py --gpu

bench-gpu:
	$(PYTHON) benchmarks/run_all.py --gpu

sanitize:
	PYTHON="$(PYTHON)" bash tests/sanitize.sh

clean:
	rm -rf $(DEMO) .bench build dist .pytest_cache .ruff_cache .mypy_cache
