# make demo | make test   do everything on a fresh machine: environment, build, run.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
SOURCES = setup.py CMakeLists.txt pyproject.toml $(shell find csrc -type f)

.PHONY: setup test demo bench bars lint format sanitize clean

setup: $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/python -c "import tomllib" 2>/dev/null || $(BIN)/pip install --quiet tomli
	$(BIN)/pip install --quiet $$($(BIN)/python .ci/requirements.py)
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" DILOCO_WERROR=ON $(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

test: setup
	$(BIN)/pytest

demo: setup
	$(BIN)/diloco-comm demo $(if $(QUICK),--quick) $(ARGS)

bench: setup
	$(BIN)/pytest benchmarks/ops_bench.py --benchmark-only

bars: setup
	$(BIN)/python benchmarks/bars.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

sanitize: setup
	bash .ci/sanitize

clean:
	rm -rf build dist *.egg-info diloco_comm/*.so $(VENV)/.built
