# Everything a person or a machine runs here. Each target makes its own virtual environment first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One torch thread per process; OpenMP threads that spin while they wait starve other processes.
export OMP_NUM_THREADS ?= 1
export GOMP_SPINCOUNT ?= 0

# All tests: by as many workers as there are cores (WORKERS=0: one after the other), see
# tests/conftest.py.
WORKERS ?= logical
AT_ONCE := --numprocesses $(WORKERS) --no-loadscope-reorder

.PHONY: help install demo test check style types imports format clean

help:
	@echo "make demo     three nodes on this machine train one model together (NODES=3 MINUTES=5)"
	@echo "make test     all tests (TESTS=tests/unit for some)"
	@echo "make check    style, types, import rules"
	@echo "make format   rewrite the sources as 'make style' wants them"
	@echo "make install  the command $(BIN)/p2pdiloco"

# torch comes first and alone, so that whichever build of it was chosen (CPU or CUDA) stays.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2pdiloco needs Python 3.11 or newer, found %s; make PYTHON=python3.12 names another one" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt torch==2.13.0
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet --constraint constraints.txt --group dev
	@touch $@

install: $(VENV)/installed

demo: $(VENV)/installed
	$(BIN)/p2pdiloco demo $(if $(NODES),--nodes $(NODES)) $(if $(MINUTES),--minutes $(MINUTES))

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(or $(TESTS),$(AT_ONCE))

check: style types imports

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy
	$(BIN)/mypy tests

imports: $(VENV)/installed-dev
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
