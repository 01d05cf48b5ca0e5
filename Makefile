# make demo | install | test | slice | small | matrix | kernels | lint | docs | bench | plots | soak | test-neighbours: each makes the virtual environment it needs
# and installs into it, once. TORCH=torch==2.14.1 takes that PyTorch, in .venv-2.14.1, instead of the newest tested one that
# pip can have.
TORCH ?=
release := $(subst torch==,,$(TORCH))
VENV ?= .venv$(addprefix -,$(release))
# .ci/venv leaves this mark, with the release of PyTorch in the environment.
has := $(notdir $(wildcard $(VENV)/lib/python3*/site-packages/torch-*.dist-info))
installed := $(VENV)/.installed-$(firstword $(subst +, ,$(or $(release),$(patsubst torch-%.dist-info,%,$(has)))))
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
MUTANTS_ARGS ?=
MATRIX_ARGS ?=
KERNELS_ARGS ?=
bin := $(VENV)/bin
pytest = $(bin)/python -m pytest -n $(JOBS) --dist worksteal
listed = $(shell sed 's/ *\#.*//' .ci/$(1))

.PHONY: demo install test slice small matrix kernels lint docs bench plots soak mutants census test-neighbours
.NOTPARALLEL:
.DEFAULT_GOAL := test

# What continues an interrupted demo, for people who typed make.
given = $(foreach name,TORCH VENV,$(if $(filter command,$(origin $(name))),$(name)=$($(name))))
repeat = $(strip make demo $(given) DEMO_ARGS=)
demo: export NARROWCAST_DEMO = $(repeat)
demo: $(installed)-train
	@$(bin)/narrowcast demo $(DEMO_ARGS)

# The environment of the tests alone.
install: $(installed)-test

# Threads of the programs that tests start sleep when they wait: by default they spin, which is faster for one program alone
# (half of the demo's time) and slows down all where several share the cores.
test slice small: export OMP_WAIT_POLICY ?= PASSIVE
test slice small: export OMP_NUM_THREADS = 1
# One thread per worker: more would only fight over the cores. A worker that is done takes tests from the other's end,
# so that most files, and what their tests share, stay in one worker.
test: $(installed)-test
	$(pytest) $(PYTEST_ARGS)

# The tests that depend on the release of PyTorch: make slice TORCH=torch==2.11.0
slice: $(installed)-test
	$(pytest) $(call listed,slice) $(PYTEST_ARGS)

# A few tests of everything, for another Python: make small PYTHON=python3.13 VENV=.venv-3.13
small: $(installed)-test
	$(pytest) $(call listed,small) $(PYTEST_ARGS)

# The slice on every release of PyTorch that is supported, and the small one on every Python; MATRIX_ARGS=--write puts the
# table into docs/versions.md.
matrix:
	.ci/matrix $(MATRIX_ARGS)

# The code of docs/neighbours.md with the packages that it names, in an environment of its own, beside the other tests, and
# what make test skips: accelerate's FSDP2 on two ranks and its offloading, PEFT's adapters, and models of Transformers.
neighbours := .venv-neighbours
pinned := tests/neighbours/requirements.txt
test-neighbours: $(neighbours)/.installed
	@$(neighbours)/bin/python -m pip freeze | grep -iE "^($$(sed -n 's/==.*//p' $(pinned) | paste -sd'|'))=="
	$(neighbours)/bin/python -m pytest tests/neighbours tests/distributed/test_accelerate.py \
		tests/convert/test_weights_map.py tests/convert/test_peft.py tests/convert/test_huggingface.py \
		tests/serving/test_transformers.py $(PYTEST_ARGS)

$(neighbours)/.installed: pyproject.toml .ci/venv $(pinned)
	TORCH=$$(grep '^torch==' $(pinned)) .ci/venv $(neighbours) test
	$(neighbours)/bin/python -m pip install --requirement $(pinned)
	@touch $@

# The kernels, compiled for GPUs that are not here: KERNELS_ARGS="--most 1" takes one launch of each.
kernels: $(installed)-test
	PYTHONPATH=src $(bin)/python tests/kernels/cross_compile.py --table docs/gpus.md $(KERNELS_ARGS)

lint: $(installed)-lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/ruff format --check --line-length 88 docs/*.md
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/lint-imports

# The site, in site/: links that lead nowhere are errors.
docs: $(installed)-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict

bench: $(installed)-train
	for file in benchmarks/bench_*.py; do $(bin)/python $$file $(BENCH_ARGS) || exit 1; done

# An hour of random cases, or SOAK_ARGS="--minutes 5".
soak: $(installed)-test
	$(bin)/python -m tests.fuzz $(SOAK_ARGS)

# Two thousand small changes of the code, each of which its tests must notice: some core-hours. MUTANTS_ARGS="--jobs 8"
mutants: $(installed)-test
	$(bin)/python tools/mutants.py $(MUTANTS_ARGS)

# What the house has more than one of: calls of a layer, caches, lines.
census: $(installed)-test
	$(bin)/python tools/census.py

plots: $(installed)-train
	$(bin)/python benchmarks/plot.py
	$(bin)/python docs/pictures.py

$(installed)-%: pyproject.toml requirements.txt src/narrowcast/_version.py .ci/venv
	@.ci/venv $(VENV) $*
