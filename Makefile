# Everything works from a clean clone with nothing but Python 3.11 or later: each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
# Pinned, because an open range may take a build with gigabytes of GPU libraries. Any torch >= 2.11 works.
TORCH ?= torch==2.13.0
# Test processes side by side; each starts up to six ranks of its own. 0: all tests in one.
WORKERS ?= 2
BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node
DEMO := examples/disaggregated_generate.py

.PHONY: setup test demo lint format bench doctor clean

setup: $(VENV)/.ready

$(VENV)/.ready: setup.py requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]' -r requirements-dev.txt
	touch $@

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(PYTEST_ARGS)

demo: setup
	$(RUN) 2 $(DEMO) --model llama --prefill 1 --decode 1
	$(RUN) 3 $(DEMO) --model llama --prefill 2 --decode 1
	$(RUN) 3 $(DEMO) --model qwen3 --prefill 1 --decode 2
	$(RUN) 4 $(DEMO) --model deepseek_v3 --prefill 2 --decode 2
	$(RUN) 3 $(DEMO) --model llama --prefill 2 --decode 1 --path staged
	$(RUN) 2 $(DEMO) --model llama --prefill 1 --decode 1 --corrupt
	$(RUN) 2 examples/multi_turn.py
	$(RUN) 2 examples/model_families.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m torchkv.bench $(BENCH_ARGS)

doctor: setup
	$(BIN)/python -m torchkv.doctor

clean:
	rm -rf $(VENV) build dist backends/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
