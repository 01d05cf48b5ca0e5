# make demo | test | lint | docs | bench | plots | soak: each makes the virtual environment it needs and installs into it, once.
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
bin := $(VENV)/bin

.PHONY: demo test lint docs bench plots soak census
.NOTPARALLEL:
.DEFAULT_GOAL := test

demo: $(VENV)/.installed-train
	$(bin)/narrowcast demo $(DEMO_ARGS)

# Threads of the programs that tests start sleep when they wait: by default they spin, which is faster for one program alone
# (half of the demo's time) and slows down all where several share the cores.
test: export OMP_WAIT_POLICY ?= PASSIVE
# One thread per worker: more would only fight over the cores. A worker that is done takes tests from the other's end,
# so that most files, and what their tests share, stay in one worker.
test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/lint-imports

# The site, in site/: links that lead nowhere are errors.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict

bench: $(VENV)/.installed-train
	for file in benchmarks/bench_*.py; do $(bin)/python $$file $(BENCH_ARGS) || exit 1; done

# An hour of random cases, or SOAK_ARGS="--minutes 5".
soak: $(VENV)/.installed-test
	$(bin)/python -m tests.soak $(SOAK_ARGS)

# What the house has more than one of: calls of a layer, caches, lines.
census: $(VENV)/.installed-test
	$(bin)/python tools/census.py

plots: $(VENV)/.installed-train
	$(bin)/python benchmarks/plot.py

$(VENV)/.installed-%: pyproject.toml .ci/venv
	.ci/venv $(VENV) $*
	@touch $@
