# Every target does its own set-up: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
QUICK  := tests/test_architecture.py tests/cluster tests/workload tests/planning tests/predict/operators \
          tests/predict/replay tests/codec/test_codec.py tests/codec/test_packing.py tests/codec/test_reference.py tests/api

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick soak gpu check docs format bench native clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(STAMP)  ## virtual environment with trimtab and its tools, in .venv

# Python sources need no reinstall (the install is editable); the kernels and the requirements do.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "trimtab needs Python 3.10 or newer; try: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m trimtab.codec.native
	touch $@

demo: $(STAMP)  ## an uneven cluster on this machine, in about two minutes
	$(BIN)/trimtab demo

# Tests that look at times have the machine to themselves.
ALONE := tests/api/test_loader_speeds.py tests/api/test_loader_throttled.py tests/bench/scenarios/test_chaos.py \
         tests/emulate/test_links.py tests/emulate/test_speed.py tests/faults tests/test_import.py

# What failed runs once more, one test at a time: a busy machine can make a test of real processes late, a bug fails again.
again = { echo "Once more, one at a time:"; $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(1); }

test: $(STAMP)  ## the test suite; ARGS='-k codec' for a part
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ALONE:%=--ignore=%) || $(call again,$(ALONE:%=--ignore=%))
	$(BIN)/python -m pytest $(ALONE) || $(call again,$(ALONE))
endif

quick: $(STAMP)  ## the inner loop, at most 90 seconds: decisions, codec and errors, no process groups
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal -m 'not ranks and not soak' \
		$(ALONE:%=--ignore=%) $(QUICK) $(ARGS)

soak: $(STAMP)  ## long fuzzing, faults and training, which the test suite has in short
	$(BIN)/python -m pytest -m soak --timeout 1800 $(ARGS)

gpu: $(STAMP)  ## the tests that need a GPU; JSON=file keeps their outcomes and figures
	$(BIN)/python -m tests.gpu $(or $(JSON),build/gpu.json) $(ARGS)

check: $(STAMP)  ## ruff, mypy strict, the boundaries between folders, and a table of file sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet --noconftest tests/test_architecture.py
	$(BIN)/python tools/file_sizes.py

docs: $(VENV)/.docs  ## the site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## every bench that runs on this machine
	$(BIN)/trimtab bench all

native:  ## build the C++ kernels into the source tree, without installing
	cmake -S . -B build/native
	cmake --build build/native --parallel

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f src/trimtab/codec/libtrimtab.so
	rm -rf .cmake CMakeFiles .ninja_deps .ninja_log .skbuild-info.json
	rm -f CMakeCache.txt CMakeInit.txt build.ninja cmake_install.cmake
