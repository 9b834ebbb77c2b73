# The words of this file: setup demo test lint bench fuzz gpu-check fault-runs faults predictions planned docs clean. Each says
# what it does while it does it.
PYTHON ?= python3
# What to install where the active environment has no torch >= 2.8. On a machine without a GPU the CPU build is smaller:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# More arguments for pytest, and which tests: `make test TESTS=tests/commands`, `make test MARKS=slow`.
TESTS ?= tests
MARKS ?= not slow and not frameworks
ARGS ?=
# How many recordings `make fuzz` tries.
COUNT ?= 100000

VENV := .venv
BIN := $(VENV)/bin
SAY := @printf '\n==> %s\n'
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test lint bench fuzz gpu-check fault-runs faults predictions planned docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a pipeline with a slow stage planted in it, and find that stage"
	@echo "make test    run the tests ($(MARKS))"
	@echo "make faults | predictions | planned    are verdicts, what-if answers and plans right? Tables, from real jobs"
	@echo "make setup | lint | bench | fuzz | fault-runs | gpu-check | docs | clean"

setup: $(VENV)/.ready

$(VENV)/.ready: setup.cfg setup.py
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" VENV="$(VENV)" sh .ci/setup
	@touch $@

demo: setup
	$(SAY) "Training a 4-stage pipeline whose stage 2 takes twice as long, under ppdiag run"
	@rm -rf demo-run
	@$(BIN)/ppdiag run -o demo-run --html demo-run/report.html -- \
	  $(BIN)/python -m torch.distributed.run --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint localhost:0 \
	  tests/jobs/sleeping_pipeline.py --microbatches 8 --steps 12 --stage-factor 2:2
	$(SAY) "The report is demo-run/report.html: open it in a browser"

test: setup
	$(SAY) "Running $(TESTS), those marked: $(MARKS)"
	@$(BIN)/python -m pytest $(TESTS) -m "$(MARKS)" $(ARGS)

lint: setup
	$(SAY) "ruff: rules, then format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(SAY) "mypy: types"
	@$(BIN)/mypy
	$(SAY) "import-linter: who may import whom"
	@$(BIN)/lint-imports

bench: setup
	@for script in $(filter-out benchmarks/gpu_check.py,$(wildcard benchmarks/*.py)); do printf '\n==> %s\n' "$$script"; $(BIN)/python "$$script" || exit 1; done

gpu-check:
	$(SAY) "Checking the recorder on one GPU, with the torch of $(PYTHON)"
	@$(PYTHON) benchmarks/gpu_check.py $(ARGS)

# COUNT bad recordings of all sources together (make fuzz COUNT=1000000: half an hour on two idle cores).
fuzz: setup
	$(SAY) "Feeding $(COUNT) bad recordings to every source"
	@$(BIN)/python -m tests.fuzz.run --count $(COUNT) $(ARGS)

# All faults, each with FAULT_SEEDS seeds (3, some 250 jobs); 15 minutes on two cores.
fault-runs: setup
	$(SAY) "Jobs in which the recorder fails: their results must be those of the jobs alone"
	@$(BIN)/python -m pytest tests/e2e/test_faults.py $(ARGS)

# 195 faults planted in real jobs; 30 minutes on two idle cores. The next two: 5 and 3 minutes. All go on where they were
# stopped; ARGS=--again runs every job anew.
faults: setup
	$(SAY) "Planting faults in jobs, and judging the verdicts on them"
	@$(BIN)/python -m benchmarks.matrix.verdicts $(ARGS)

predictions: setup
	$(SAY) "Predicting changes of jobs, making them, and comparing"
	@$(BIN)/python -m benchmarks.matrix.predictions $(ARGS)

planned: setup
	$(SAY) "Running planned layouts as jobs whose ops sleep"
	@$(BIN)/python -m benchmarks.matrix.planned $(ARGS)

docs: setup
	$(SAY) "Building the pages in docs/_build/html"
	@$(BIN)/python -m pip install --quiet "sphinx>=7" "myst-parser>=3"
	@$(BIN)/python -m sphinx -n -W -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build dist demo-run fault-matrix predicted-jobs planned-jobs docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
