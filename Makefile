# make demo: measure layouts of a small Llama on this machine.
# make test: install everything the tests need, then run all tests but those that take long.
# make test-all: run those too, as CI does.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Puts the project's folder into a .pth file. The finder that setuptools writes otherwise doubles
# the start time of every Python process.
EDITABLE := --config-settings editable_mode=compat --editable

# Environments: the recipe of accelerate runs in that of transformers. The oldest transformers that is
# tried has one of its own.
RECIPES := transformers transformers-oldest fsdp2 deepspeed litgpt torchtitan

.PHONY: demo test test-all chaos compat mutants recipes check install install-dev clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the packages, torch among them: this may take some minutes ..."
	@$(PIP) $(EDITABLE) '.[train,gpu]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the packages for tests ..."
	@$(PIP) $(EDITABLE) '.[dev]'
	@touch $@ $(VENV)/.installed

# With one GPU, or with one core and no GPU, the demo measures one of its two cells.
demo: install
	@slots=$$(nvidia-smi --list-gpus 2>/dev/null | wc -l); [ "$$slots" -gt 0 ] || slots=$$(nproc); \
	cell=$$([ "$$slots" -ge 2 ] || echo gpus=1); \
	echo "sweep run sweeps/quickstart.yaml $$cell"; $(BIN)/sweep run sweeps/quickstart.yaml $$cell

# Keep the bytecode of tests and package: hundreds of processes would compile it again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# Without what takes long (the marker says which) and without hosts of network namespaces, which only
# root may make; a quarter of the examples of each property.
test: install-dev
	$(PYTEST) -n 4 -m 'not (recipes or long or cluster)' --hypothesis-profile few

# More of these tests wait, so more files run at a time.
test-all: install-dev
	$(PYTEST) -n 6 -m 'not recipes'

# Kill everything that may be killed, 5,000 times within an hour; prints one line of JSON.
chaos: install-dev
	$(BIN)/python -m benchmarks.chaos

# Run sweeps on each minor version of Ray in the range of pyproject.toml; takes 20 minutes.
compat: install-dev
	$(BIN)/python -m tests.compat.ray_versions

# Change the core in 50 random places, one by one, and count the changes that its tests notice; takes
# 20 minutes.
mutants: install-dev
	$(BIN)/python -m benchmarks.mutants

# Make an environment for each framework that trains on a CPU, and run its recipe for real: two ranks,
# some minutes. Packages that are built (DeepSpeed) find torch in the environment.
recipes: install-dev $(RECIPES:%=.venv-recipes/%/.installed)
	$(BIN)/python -m pytest -m recipes tests/recipes

.venv-recipes/%/.installed: tests/recipes/%.txt
	@echo "Installing $* into .venv-recipes/$* ..."
	@$(PYTHON) -m venv .venv-recipes/$*
	@.venv-recipes/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools wheel ninja
	@.venv-recipes/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r $<
	@touch $@

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-recipes .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
