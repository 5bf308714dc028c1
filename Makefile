# Everything below works on a fresh machine with Python 3.10 or later and a C and C++ compiler; nvcc
# adds the CUDA backend. `make help` lists the targets.

PYTHON ?= python3
# Where the environment of the targets lies, and the torch that goes into it.
VENV   ?= .venv
TORCH  ?= torch>=2.10
# Options for the tests and the check: make test ARGS="-k options", make demo ARGS="--quick"
ARGS   ?=
CC     ?= cc

PY     := $(VENV)/bin/python
BUILT  := $(VENV)/.built
CORE   := $(wildcard csrc/*.c)
SOURCE := $(wildcard csrc/*)
# As setup.py has them, but strict.
CFLAGS_CORE := -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math
WARNINGS    := -Wall -Wextra -Wconversion -Wshadow -Wc++-compat -Werror

.DEFAULT_GOAL := help
.PHONY: help build demo bench test test-slow lint format asan ubsan tsan cuda sdist wheel package \
    clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

# ---- the environment ----

$(VENV)/.env:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "setuptools>=77"
	$(PY) -m pip install --quiet "$(TORCH)" numpy
	@touch $@

$(BUILT): $(VENV)/.env pyproject.toml setup.py $(SOURCE)
	$(PY) -m pip install --quiet --no-build-isolation -e ".[test,dev]"
	@touch $@

build: $(BUILT) ## make the environment and build the package in place (editable)

# ---- what it does ----

demo: $(BUILT) ## build, then check every (C, K) on real input and print the table
	$(PY) -m gdn_verify check $(ARGS)

bench: $(BUILT) ## build, then run the benchmark on the GPU; ARGS="--full --targets --json FILE"
	$(PY) benchmarks/bench_verify.py $(ARGS)

test: $(BUILT) ## build, then run the tests (those that need a GPU skip themselves without one)
	$(PY) -m pytest $(ARGS)

test-slow: $(BUILT) ## the exhaustive tests as well
	$(PY) -m pytest --slow $(ARGS)

# ---- the C core under sanitizers, without Python ----

build/test_core_%: tests/c/test_core.c $(SOURCE)
	@mkdir -p build
	$(CC) $(CFLAGS_CORE) -g -O1 -fno-omit-frame-pointer -fsanitize=$* -fno-sanitize-recover=all \
	    tests/c/test_core.c $(CORE) -o $@ -lm -lpthread

asan: build/test_core_address ## run the C tests under AddressSanitizer
	./$<
ubsan: build/test_core_undefined ## under UndefinedBehaviorSanitizer
	./$<
tsan: build/test_core_thread ## under ThreadSanitizer
	./$<

# ---- CUDA without a GPU ----

cuda: $(VENV)/.env ## compile the CUDA build for every architecture; list registers and spills
	@mkdir -p build
	FORCE_CUDA=1 NVCC_APPEND_FLAGS=-Xptxas=-v \
	    $(PY) setup.py build_ext --force --build-lib build/cuda > build/cuda.log 2>&1 \
	    || { tail -n 40 build/cuda.log; exit 1; }
	@grep '^gdn-verify:' build/cuda.log
	@$(PY) .ci/ptxas.py build/cuda.log

# ---- style ----

lint: $(BUILT) ## ruff, mypy, clang-format, and the C core without a warning
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CLANG_FORMATTED)
	@mkdir -p build
	for source in $(CORE) tests/c/test_core.c examples/c/example.c; do \
	    $(CC) $(CFLAGS_CORE) $(WARNINGS) -Icsrc -O3 -c $$source -o build/lint.o || exit 1; done

format: $(BUILT) ## format Python and C
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CLANG_FORMATTED)

CLANG_FORMATTED := $(filter %.c %.h %.cpp %.cu %.cuh,$(SOURCE)) \
    $(wildcard tests/c/*.c tests/cuda/*.cu benchmarks/*.cu examples/c/*.c)

# ---- packages ----

sdist: $(BUILT) ## dist/*.tar.gz
	$(PY) -m build --sdist

wheel: $(BUILT) ## dist/*.whl, for the torch and the CUDA toolkit of this machine
	$(PY) -m build --wheel --no-isolation

package: $(BUILT) ## install from an sdist in every way that users do
	.ci/package $(PY)

clean: ## remove what was built, not the environment
	rm -rf build dist *.egg-info gdn_verify/*.so $(BUILT)
