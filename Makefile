# Everything here sets itself up: the first target that needs the virtual environment makes it.
#   make kernels ARCH=sm_110a     compile every top-level spec (but smoke) into build/kernels/sm_110a
#   make test                     the whole test suite
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
SHELL := /bin/bash

VENV    ?= .venv
PYTHON  ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
BASE_PYTHON ?= python3
ARCH    ?=
SPEC    ?=
OUT     ?= build/kernels
BUNDLE  ?= build/kernels
DIST    ?= dist
JOBS    ?=
PYTEST_ARGS ?=
TOOLS   ?= memcheck racecheck synccheck initcheck
TOOL_SECONDS ?= 600

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
comma := ,
ARCHS := $(subst $(comma), ,$(ARCH))
ARCH_FLAGS  = $(foreach a,$(ARCHS),--arch $(a))
BUILD_FLAGS = $(ARCH_FLAGS) $(foreach s,$(SPEC),--spec $(s)) --out $(OUT) $(if $(JOBS),--jobs $(JOBS))

.PHONY: help kernels demo test lint format type contract wheel gpu-test sanitize proof bench bench-append bench-planning bench-clusters bench-splits tune bench-host bench-build clean distclean install need-arch

help:  ## Show this list
	@echo "Targets (variables: ARCH, SPEC, OUT, JOBS, BUNDLE, DIST, PYTEST_ARGS, PYTHON):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r t d; do printf '  %-12s %s\n' "$$t" "$$d"; done

# The stamp depends on what decides the environment's content, and is only made when all of it succeeded.
$(STAMP): pyproject.toml constraints.txt
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"cubinery needs Python 3.11 or newer; $(BASE_PYTHON) is {v[0]}.{v[1]}: set BASE_PYTHON=python3.x")'
	@test -x $(PY) || $(BASE_PYTHON) -m venv $(VENV) || { \
	  echo "cannot make $(VENV): on Debian or Ubuntu install python3-venv, or set BASE_PYTHON" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing the pinned tools into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[build,dev,bench]'
	@touch $@

install: $(STAMP)  ## Make .venv with everything that building and testing need

need-arch:
	@test -n "$(strip $(ARCH))" || { \
	  echo "ARCH is not set: name one or more of" \
	    $$(sed -n 's/^ *_arch("\([a-z0-9_]*\)".*/\1/p' src/cubinery/runtime/arch.py) \
	    "- for example: make $(firstword $(MAKECMDGOALS)) ARCH=sm_110a" >&2; exit 2; }

kernels: need-arch $(STAMP)  ## Compile the specs for ARCH=... (one or several) into build/kernels/<arch>
	@$(PY) build_kernels.py build $(BUILD_FLAGS)

# setuptools leaves build/lib behind and would pack what lies there, so it starts and ends without; the fixed time makes
# the wheel's bytes depend on its content alone.
wheel: need-arch $(STAMP)  ## Pack build/kernels/<arch> of ARCH=... and cubinery itself as wheels into dist/
	@$(PY) build_kernels.py wheel $(ARCH_FLAGS) --bundle $(BUNDLE) --out $(DIST)
	@rm -rf build/lib build/bdist.*
	@SOURCE_DATE_EPOCH=315532800 $(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  -w $(DIST) .
	@rm -rf build/lib build/bdist.*
	@ls -l $(DIST)/cubinery-*.whl

test: $(STAMP)  ## Run every test that needs no GPU (a GPU's are skipped where there is none)
	@$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(STAMP)  ## Let ruff fix and format what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

type: $(STAMP)  ## mypy, strict
	@$(PY) -m mypy

contract: $(STAMP)  ## import-linter: imports point down
	@$(VENV)/bin/lint-imports --no-logo

demo: $(STAMP)  ## Build a small sm_110a bundle and run it, here on the simulator if no GPU fits (ARCH=... for another)
	@$(PY) build_kernels.py build $(or $(ARCH_FLAGS),--arch sm_110a) --spec kernel_specs/demo/paged_decode.yaml --out build/demo
	@PYTHONPATH=src OPENBLAS_NUM_THREADS=1 $(PY) examples/demo.py build/demo

# The next two run on a machine with a GPU, a prebuilt bundle and no compiler: no set-up, any Python with the
# run-time dependencies and pytest.
gpu-test:  ## Run the GPU tests against BUNDLE=... (needs no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

sanitize:  ## Run compute-sanitizer's four tools (TOOLS=...) over the kernels of BUNDLE=... (needs a GPU, no compiler)
	@failed=0; for tool in $(TOOLS); do \
	  echo "compute-sanitizer --tool $$tool"; \
	  PYTHONPATH=src timeout $(TOOL_SECONDS) compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 9 \
	    $(PYTHON) tests/gpu/sanitize.py $(BUNDLE) $(SANITIZE_ARGS); code=$$?; \
	  if [ $$code = 124 ]; then echo "$$tool did not end within $(TOOL_SECONDS) s"; failed=1; \
	  elif [ $$code != 0 ]; then echo "$$tool failed"; failed=1; fi; \
	done; exit $$failed

# build/proof-sim: python -m proof.build, see docs/results/blackwell.md. What its results hold is not run again.
proof: $(STAMP)  ## Run the written edge cases on the simulator over every decode of BUNDLE=... that keeps its PTX
	@PYTHONPATH=src:tests $(PY) -m proof --bundle $(BUNDLE) --results $(BUNDLE)-results.jsonl --summary - \
	  $(if $(JOBS),--jobs $(JOBS)) $(PROOF_ARGS)

bench:  ## Measure BUNDLE=... on this machine's GPU and draw the roofline (needs no compiler)
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks $(BENCH_ARGS)

bench-append:  ## Measure the cache writers of BUNDLE=... against the copy rate (needs a GPU and no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks.append $(BENCH_ARGS)

bench-planning:  ## Measure planning on the device with BUNDLE=... (needs a GPU and no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks.planning $(BENCH_ARGS)

bench-clusters:  ## Measure BUNDLE=... in clusters of every size beside plans without them (needs a GPU and no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks.clusters $(BENCH_ARGS)

bench-splits:  ## Measure the plans of BUNDLE=... beside plans of other splits (needs a GPU and no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks.splits $(BENCH_ARGS)

tune:  ## Measure which kernels of BUNDLE=... are the fastest, as a selector table for the next build (needs a GPU)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks.tune $(BENCH_ARGS)

bench-host:  ## Measure only the host time of the runtime with BUNDLE=... (needs a GPU and no compiler)
	PYTHONPATH=src CUBINERY_BUNDLE=$(abspath $(BUNDLE)) $(PYTHON) -m benchmarks --only host $(BENCH_ARGS)

bench-build: need-arch $(STAMP)  ## Measure how well a build for ARCH=... uses this machine (needs no GPU)
	@$(PY) -m benchmarks.build $(ARCH_FLAGS) $(foreach s,$(SPEC),--spec $(s)) $(if $(JOBS),--jobs $(JOBS)) $(BENCH_ARGS)

clean:  ## Remove what builds and tools wrote; keeps .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find aot runtime tests benchmarks examples src -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)
