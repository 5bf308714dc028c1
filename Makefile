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
.PHONY: help build demo bench test test-slow lint format asan ubsan tsan fuzz fuzz-core fuzz-calls \
    soak cuda sanitize docs linkcheck sdist wheel package clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

# ---- the environment ----

$(VENV)/.env:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "setuptools>=77"
	$(PY) -m pip install --quiet "$(TORCH)" numpy
	@touch $@

$(BUILT): $(VENV)/.env pyproject.toml setup.py $(SOURCE)
	$(PY) -m pip install --quiet --no-build-isolation -e ".[test,dev,docs]"
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

SANITIZED := $(CFLAGS_CORE) -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all
FUZZER    := $(wildcard tests/c/fuzz_*)
# Streaming stores need large tensors elsewhere.
SMALL     := -DGDN_VERIFY_STREAM_BYTES=4096

build/test_core_%: tests/c/test_core.c $(SOURCE)
	@mkdir -p build
	$(CC) $(SANITIZED) -fsanitize=$* tests/c/test_core.c $(CORE) -o $@ -lm -lpthread

build/fuzz_replay_%: $(FUZZER) $(SOURCE)
	@mkdir -p build
	$(CC) $(SANITIZED) -fsanitize=$* $(SMALL) tests/c/fuzz_core.c tests/c/fuzz_main.c $(CORE) \
	    -o $@ -lm -lpthread

# The C tests and the fuzzer's corpus; the last name in the log is the input of a finding.
RUN_SANITIZED = ./build/test_core_$(1) && { ./build/fuzz_replay_$(1) tests/c/corpus \
    2> build/fuzz_replay_$(1).log || { tail -n 100 build/fuzz_replay_$(1).log; exit 1; }; }

asan: build/test_core_address build/fuzz_replay_address ## run the C tests under AddressSanitizer
	$(call RUN_SANITIZED,address)
ubsan: build/test_core_undefined build/fuzz_replay_undefined ## under UndefinedBehaviorSanitizer
	$(call RUN_SANITIZED,undefined)
tsan: build/test_core_thread ## under ThreadSanitizer
	./$<

# libFuzzer looks for calls that fault; it starts from the corpus and leaves what it finds in build.
FUZZ_SECONDS ?= 60
CLANG ?= $(firstword $(shell which clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14))

build/fuzz_core: $(FUZZER) $(SOURCE)
	@test -n "$(CLANG)" || { \
	    echo "make fuzz: needs clang and its libFuzzer (clang and libclang-rt-dev); or CLANG=.."; \
	    exit 1; }
	@mkdir -p build/corpus
	$(CLANG) $(SANITIZED) -O2 -fsanitize=fuzzer,address,undefined $(SMALL) -Wno-unknown-pragmas \
	    tests/c/fuzz_core.c $(CORE) -o $@ -lm -lpthread

fuzz-core: build/fuzz_core
	./$< -max_total_time=$(FUZZ_SECONDS) -max_len=400 -len_control=0 -print_final_stats=1 \
	    -artifact_prefix=build/ build/corpus tests/c/corpus

# Calls of any kind from Python, compared with the reference; this many of each property.
EXAMPLES ?= 4000

fuzz-calls: $(BUILT)
	GDN_VERIFY_EXAMPLES=$(EXAMPLES) $(PY) -m pytest tests/test_properties.py \
	    --hypothesis-show-statistics $(ARGS)

fuzz: fuzz-calls fuzz-core ## look for calls that fault, FUZZ_SECONDS and EXAMPLES; needs clang

soak: $(BUILT) ## a simulated serving loop; ARGS="--steps 1000000 --device cuda"
	$(PY) tests/soak.py $(ARGS)

# ---- CUDA without a GPU ----

cuda: $(VENV)/.env ## compile the CUDA build for every architecture; list registers and spills
	@mkdir -p build
	FORCE_CUDA=1 NVCC_APPEND_FLAGS=-Xptxas=-v \
	    $(PY) setup.py build_ext --force --build-lib build/cuda > build/cuda.log 2>&1 \
	    || { tail -n 40 build/cuda.log; exit 1; }
	@grep '^gdn-verify:' build/cuda.log
	@$(PY) .ci/ptxas.py build/cuda.log

# ---- CUDA on a GPU ----

# Torch's allocator would hide what lies outside a tensor.
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --tool

sanitize: $(BUILT) ## every launch configuration and option under compute-sanitizer's four tools
	$(SANITIZER) memcheck $(PY) tests/sanitize.py
	$(SANITIZER) racecheck $(PY) tests/sanitize.py
	$(SANITIZER) initcheck $(PY) tests/sanitize.py --fresh
	$(SANITIZER) synccheck $(PY) tests/sanitize.py

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
    $(wildcard tests/c/*.[ch] tests/cuda/*.cu tests/cuda/emulation/* benchmarks/*.cu examples/c/*.c)

# ---- documents ----

DOCS := $(PY) -m sphinx -W --keep-going -n -q -d build/doctrees

docs: $(BUILT) ## build/docs/index.html, with every internal link checked
	$(DOCS) -b html docs build/docs

linkcheck: $(BUILT) ## the external links of the documents too; needs a network
	$(DOCS) -b linkcheck docs build/linkcheck

# ---- packages ----

sdist: $(BUILT) ## dist/*.tar.gz
	$(PY) -m build --sdist

wheel: $(BUILT) ## dist/*.whl, for the torch and the CUDA toolkit of this machine
	$(PY) -m build --wheel --no-isolation

package: $(BUILT) ## install from an sdist in every way that users do
	.ci/package $(PY)

clean: ## remove what was built, not the environment
	rm -rf build dist *.egg-info gdn_verify/*.so gdn_verify/include $(BUILT)
