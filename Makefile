# make demo | make test   do everything on a fresh machine: environment, build, run.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
# The bytecode that an import writes saves two thirds of the time of each later import of torch.
unexport PYTHONDONTWRITEBYTECODE
# Warnings of a compiler that we have not met must not stop a user; CI sets this to ON.
export DILOCO_WERROR ?= OFF
CXX_SOURCES = $(shell find csrc tests/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES = setup.py CMakeLists.txt pyproject.toml $(shell find csrc -type f)

.PHONY: setup emulated cuda-tests test test-all coverage nightly cpptest cuda kernels gpu-build gpu-rehearsal demo bench bars soak-async soak-decoupled soak-elastic chaos lint docs package package-cuda format sanitize fuzz clean

# The environment, with the package built in place: a change of Python needs no new build.
setup: $(VENV)/.built

# Most of the many modules are never imported; those that are get compiled at their first import.
PIP_INSTALL = $(BIN)/pip install --quiet --no-compile

# The first packages suffice to compile, which takes the processors while pip installs the others. If the
# compiler fails, .built says why.
$(VENV)/.installed: .ci/requirements.txt .ci/requirements-no-deps.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --constraint .ci/requirements.txt $(TORCH) numpy cmake ninja setuptools
	{ PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python3 setup.py --quiet build_ext --build-lib build/lib \
		--build-temp build/editable-$$($(BIN)/python3 -c 'import sys; print(sys.implementation.cache_tag)') \
		>/dev/null 2>&1 || true; } & \
	$(PIP_INSTALL) -r .ci/requirements.txt \
	&& $(PIP_INSTALL) --no-deps -r .ci/requirements-no-deps.txt; status=$$?; wait; exit $$status
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

# In the folder where setup built the extension, whose object files these share.
BUILD = export PATH="$(abspath $(BIN)):$$PATH" && cd build/editable-* && cmake --build .

# What the first tier's tests of the CUDA operators need: their emulation, and with nvcc one file of kernels;
# and the explorer of the agreement.
emulated: setup
	$(BUILD) --target cuda_sample explore_agreement

# What the nightly ones need as well: with nvcc all kernels of sm_90.
cuda-tests: setup
	$(BUILD) --target cuda_tests explore_agreement

# Three files at a time on two cores, because half of the tests wait for processes.
PROCESSES ?= 3
PYTEST = $(BIN)/pytest --dist loadfile --no-loadscope-reorder --numprocesses $(PROCESSES) --durations 20

# The first tier of the tests: every promise once; see tests/support/processes/tiers.py.
test: setup emulated
	$(PYTEST) -m "not nightly"

# Both tiers of the tests; TESTS= chooses folders.
test-all: setup cuda-tests
	$(PYTEST) $(TESTS)

# Branch coverage of both tiers, by every process of the tests; a process that a test kills does not
# count. The data are in build/coverage.
coverage: setup cuda-tests
	rm -rf build/coverage && mkdir -p build/coverage/first build/coverage/nightly
	status=0; for tier in first nightly; do \
		test $$tier = first && marks="not nightly" || marks=nightly; \
		$(BIN)/coverage run --data-file=build/coverage/$$tier/data -m $(notdir $(PYTEST)) \
			-m "$$marks" $(ARGS) || status=$$?; \
		$(BIN)/coverage combine -q --keep --data-file=build/coverage/$$tier/data build/coverage/$$tier; \
		mv build/coverage/$$tier/data build/coverage/$$tier.sqlite; \
	done; \
	$(BIN)/coverage combine -q --keep --data-file=build/coverage/all.sqlite build/coverage/first.sqlite build/coverage/nightly.sqlite; \
	$(BIN)/python tests/support/quality/coverage_tiers.py && exit $$status

# All checks at full depth, in parts; those that have passed on this commit are not run again. ARGS
# for options: names of parts, --again.
nightly: setup
	$(BIN)/python .ci/nightly.py $(ARGS)

# The tests of the exchange engine in C++, without Python.
cpptest: setup
	$(BUILD) --target cpp_tests && ctest --output-on-failure --parallel 2

# What a peer may say to a link, by libFuzzer for ten minutes; this needs clang. New inputs are in
# build/fuzz/corpus. The inputs in tests/cpp/fuzz_link are met by `make cpptest`, too.
fuzz: setup
	cmake -G Ninja -S . -B build/fuzz -DCMAKE_CXX_COMPILER=$(or $(CLANG),clang++) \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -DDILOCO_SANITIZE=fuzzer,address,undefined
	cmake --build build/fuzz --target fuzz_link
	mkdir -p build/fuzz/corpus
	build/fuzz/fuzz_link -max_len=512 $(or $(ARGS),-max_total_time=600) build/fuzz/corpus tests/cpp/fuzz_link

# The CUDA kernels for every architecture that nvcc can, checked for spills.
cuda: cuda-tests
	$(BUILD) --target diloco_cuda_kernels
	$(BIN)/pytest tests/ops/test_cuda_build.py
	$(BIN)/python tests/support/devices/cuda_reports.py $(ARGS)

# Every specialisation of Triton's kernels for sm_80, sm_90 and gfx942: registers, spills, arithmetic.
kernels: setup
	$(BIN)/python tests/support/devices/triton_specialisations.py --select all --jobs $(or $(JOBS),2) $(ARGS)

# The extension with CUDA for a torch that has it, in a copy of the sources; it is loaded, the names of
# torch that we use are looked up, the GPU tests are collected. This needs nvcc and no GPU. The torch
# (5 GB) goes into a virtual environment of its own, once; its versions are those for which the check of a GPU is written.
# The interpreter of that torch's Triton (3.6) fails with numpy 2.4.
GPU_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/diloco_comm/gpu
GPU_TORCH ?= torch==2.11.0
GPU_ARCHS ?= 90
GPU_TREE = build/gpu-tree

$(GPU_VENV)/.installed:
	mkdir -p $(GPU_VENV)
	test $$(df --output=avail -k $(GPU_VENV) | tail -n 1) -gt 8000000
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --no-cache-dir $(GPU_TORCH) "setuptools>=77,<82" "numpy<2.4" cmake ninja pytest pytest-timeout hypothesis psutil pillow
	touch $@

gpu-build: $(GPU_VENV)/.installed
	mkdir -p $(GPU_TREE)
	git ls-files -z | xargs -0 cp --parents -dpu -t $(GPU_TREE)
	cd $(GPU_TREE) && export PYTHONPATH="$$PWD" && python=$(abspath $(GPU_VENV))/bin/python \
		&& benchmarks/gpu/build.sh $$python ON $(GPU_ARCHS) \
		&& $$python -m benchmarks.gpu.facts --versions --extension \
		&& $$python -m benchmarks.gpu.names \
		&& $$python -m pytest -q -m gpu --collect-only -p no:cacheprovider tests/ops tests/gpu

# The check of a GPU without one, in the tree that gpu-build made: every step on small sizes, with the kernels
# emulated or interpreted. PART=A, B or C for one part; the archive and the summary are in build/gpu-rehearsal.
gpu-rehearsal: gpu-build
	cmake --build $(GPU_TREE)/build/gpu-ON --target diloco_emulated
	PYTHON=$(abspath $(GPU_VENV))/bin/python $(GPU_TREE)/benchmarks/gpu_check.sh --rehearse build/gpu-rehearsal $(PART)

# Seven trainings compared on this machine; QUICK=1 for short ones, ARGS for options.
demo: setup
	$(BIN)/diloco-comm demo $(if $(QUICK),--quick) $(ARGS)

# Times of the operators on the processor.
bench: setup
	$(BIN)/pytest benchmarks/operators/ops_bench.py --benchmark-only

# Every bound on speed and traffic that the project sets itself, measured anew.
bars: setup
	$(BIN)/python -m benchmarks.bars

# Asynchronous training under faults, for three minutes; SECONDS= chooses.
soak-async: setup
	PYTHONPATH=$$(echo tests/support/* | tr ' ' :) $(BIN)/python tests/asynchronous/test_async_faults.py $(or $(ASYNC_SECONDS),$(SECONDS),180)

# Decoupled training under faults, for a quarter of an hour; SECONDS= and SEED= choose.
soak-decoupled: setup
	PYTHONPATH=$$(echo tests/support/* | tr ' ' :) $(BIN)/python tests/asynchronous/test_decoupled_soak.py \
		--seconds $(or $(SECONDS),900) --seed $(or $(SEED),0) $(ARGS)

# Elastic membership under faults, for a quarter of an hour; SECONDS= and SEED= choose.
soak-elastic: setup
	$(BIN)/python -m benchmarks.elastic.storms build/soak.jsonl --make soak --replicas 6 --every 20 \
		--seconds $(or $(SECONDS),900) --seed $(or $(SEED),0)
	$(BIN)/python -m benchmarks.elastic.storms build/soak.jsonl --replicas 6 --suspect-after 5 \
		--step 0.05 --sync-every 4 $(and $(RESULT),--json $(RESULT)) $(ARGS)

# Elastic membership under the faults that sixty seeds draw, a minute each, with two to eight replicas;
# SEEDS= and ARGS= choose. Seeds run side by side where there are many processors.
chaos: setup
	$(BIN)/python -m benchmarks.elastic.seeds build/chaos --seeds $(or $(SEEDS),60) $(ARGS)

# What a change must pass: style, types, imports between the rooms, rules of the house; changes nothing.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/house.py
	$(BIN)/python tests/support/quality/counts.py
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

# The documentation site, with the reference that is generated from the docstrings.
docs: setup
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/site

# The source package and the wheel, installed into an empty environment. What passed is recorded, so that
# .ci/run checks them only where a file that decides about them has changed.
package: setup
	.ci/package
	.ci/build-digest >.ci/package.sha256

# The same with the CUDA kernels of every architecture in the wheel. They are compiled once, for any torch
# and any Python; this needs nvcc.
package-cuda: setup
	$(BUILD) --target diloco_cuda_kernels
	cd build/editable-* && DILOCO_KERNELS="$$PWD/diloco_cuda" ../../.ci/package

# Bring all sources into the form that `make lint` wants.
format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# The tests in C++ under ThreadSanitizer and AddressSanitizer.
sanitize: setup
	bash .ci/sanitize

# Remove what was built; the environment stays.
clean:
	rm -rf build dist *.egg-info diloco_comm/*.so $(VENV)/.built
