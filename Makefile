# make demo: measure layouts of a small Llama on this machine.  make test: everything the tests need, then the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The project's folder in a .pth file: the finder that is written otherwise costs every Python process as much again as its start.
EDITABLE := --config-settings editable_mode=compat --editable

.PHONY: demo test chaos check install install-dev clean

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

# With one GPU, or one core and none, the demo measures one of its two cells.
demo: install
	@slots=$$(nvidia-smi --list-gpus 2>/dev/null | wc -l); [ "$$slots" -gt 0 ] || slots=$$(nproc); \
	cell=$$([ "$$slots" -ge 2 ] || echo gpus=1); \
	echo "sweep run sweeps/quickstart.yaml $$cell"; $(BIN)/sweep run sweeps/quickstart.yaml $$cell

# The bytecode of tests and package is kept, whatever is usual here: hundreds of processes would compile it anew.
test: install-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder

# Kills everything that may be killed, 5,000 times, within an hour; one line of JSON says what that cost.
chaos: install-dev
	$(BIN)/python -m benchmarks.chaos

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
