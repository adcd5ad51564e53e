# The main targets are `make demo` and `make test`. They install everything else that they need. The
# machine needs python3 (3.11 or newer), pip, make and g++. Later runs skip the installation.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
FUZZ_S ?= 60
TORCH_VERSIONS ?= "==2.9.0" "==2.13.*" ">=2.9"
# pip builds the extension in this folder, so that the C++ tests do not compile the core again.
CPP_BUILD := build/dev
CPP_FILES = $(shell find csrc -name '*.cc' -o -name '*.h')

.PHONY: demo test check format fix lint types imports unit optional cpp sanitize fuzz aarch64 torch-versions bench \
  integrations test-integrations soak wheels test-wheels test-labs site clean help

help:  ## list all targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## train a model with unisono and with gloo, and compare
	$(BIN)/unisono train digits

test: check cpp unit  ## run all checks and all tests except the slow tests

check: format lint types imports

format: $(READY)  ## check the formatting
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

fix: $(READY)  ## format all files
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

lint: $(READY)  ## run ruff
	$(BIN)/ruff check .

types: $(READY)  ## run mypy --strict
	$(BIN)/mypy

imports: $(READY)  ## check the import contracts of pyproject.toml
	$(BIN)/lint-imports

unit: $(READY)  ## run all Python tests except the slow tests
	$(BIN)/pytest -q -m "not slow" --numprocesses $(JOBS) --dist worksteal

optional: $(READY)  ## run the tests that use what a machine may lack (iperf3, chromium, transformers, ...)
	$(BIN)/pytest -q -m "not slow and (lab or program or optional)" --numprocesses $(JOBS) --dist worksteal

soak: $(READY)  ## run the slow Python tests
	$(BIN)/pytest -q -m slow --timeout 1200

cpp: $(READY)  ## build and run the C++ tests
	test -f $(CPP_BUILD)/CMakeCache.txt || $(BIN)/cmake -S . -B $(CPP_BUILD) -G Ninja -DUNISONO_TESTS=ON \
	  -DUNISONO_PYTHON=OFF -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD) --target cpp_tests -j $(JOBS)
	$(BIN)/ctest --test-dir $(CPP_BUILD) --output-on-failure
	@grep ^SKIPPED $(CPP_BUILD)/Testing/Temporary/LastTest.log || true

sanitize: $(READY)  ## run the C++ tests under ThreadSanitizer, then Address- and UBSan
	for kind in thread address,undefined; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF \
	    -DUNISONO_SANITIZE=$$kind -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind --target cpp_tests -j $(JOBS) && \
	  $(BIN)/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; done

fuzz: $(READY)  ## fuzz the readers of frames, messages and plans (clang; FUZZ_S seconds each)
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF -DUNISONO_FUZZ=ON \
	  -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build build/fuzz --target fuzzers -j $(JOBS)
	for what in frames messages plans; do mkdir -p build/fuzz/found/$$what && \
	  ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=512:detect_leaks=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  build/fuzz/csrc/fuzz/fuzz_$$what -max_total_time=$(FUZZ_S) -malloc_limit_mb=100000 -timeout=10 -max_len=2048 -len_control=0 \
	    -artifact_prefix=build/fuzz/ build/fuzz/found/$$what csrc/fuzz/corpus/$$what || exit 1; done

aarch64: $(READY)  ## run the C++ tests for aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build build/aarch64 --target cpp_tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/aarch64 --output-on-failure
	@grep ^SKIPPED build/aarch64/Testing/Temporary/LastTest.log || true

torch-versions: $(READY)  ## run the torch tests on other versions of torch (TORCH_VERSIONS; 6 to 7 GB each)
	$(BIN)/python tests/torch_versions.py $(TORCH_VERSIONS)

bench: $(READY)  ## measure the tables of benchmarks/RESULTS.md on one host (about an hour)
	$(BIN)/python benchmarks/sweep.py

CORES_RANKS ?= 2,4,8,16
CORES_SIZES ?= 8,4K,64K,1M,16M,64M
CORES_FOLDER ?= benchmarks/results/cores
bench-cores: $(READY)  ## measure beside all MPIs and Gloo where each rank has a core (8 minutes; CORES_RANKS)
	$(BIN)/python benchmarks/sweep.py --ranks $(CORES_RANKS) --peers openmpi,mpich,impi,gloo --bind --sizes $(CORES_SIZES) \
	  --rounds 3 --row-budget 1.5 --folder $(CORES_FOLDER) --page $(CORES_FOLDER)/RESULTS-cores.md

integrations: $(READY)  ## train with real frameworks over gloo and unisono (FRAMEWORKS=accelerate: only some)
	$(BIN)/python benchmarks/integrations/run.py $(FRAMEWORKS)

test-integrations: $(READY)  ## run the tests of the frameworks in their environments (FRAMEWORKS=torchft: only some)
	$(BIN)/python benchmarks/integrations/run.py --test $(FRAMEWORKS)

test-labs: $(READY)  ## install the extra `learn` into a new environment, and run all labs there
	$(BIN)/python tests/course/fresh_install.py

site: $(BIN)/.site  ## build the site of documentation and course into build/site, in English and Chinese
	$(BIN)/python docs/site/build.py build/site

$(BIN)/.site: $(READY) pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group site
	touch $@

wheels: | $(BIN)/python  ## build the sdist and the wheels for x86-64 and aarch64 into dist/, and audit them
	$(BIN)/python -m pip install --quiet -r wheels/requirements.txt
	$(BIN)/python wheels/build.py

test-wheels: $(READY)  ## test the wheels in dist/, the one for aarch64 under qemu (Debian: qemu-user)
	test -x build/arm64/python || wheels/arm64_python.sh build/arm64
	$(BIN)/pytest -q tests/test_wheels.py

# Debian's python3 may lack ensurepip. Its pip can still install into an environment without pip.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(READY): pyproject.toml CMakeLists.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.11" "nanobind>=2.4" "numpy>=2" "ninja>=1.11" "cmake>=3.25"
	$(BIN)/python -m pip install --quiet --no-build-isolation -C build-dir=$(CPP_BUILD) \
	  -C cmake.define.UNISONO_TESTS=ON -e '.[train,plot,peers,dev]'
# At each import, scikit-build-core rebuilds the core with the `cmake` of the PATH. A machine may have none.
# Tests rebuild it once: a rebuild without changes takes longer than all else that an import does.
	sed -i -e 's|\["cmake", "--build"|["$(CURDIR)/$(BIN)/cmake", "--build"|' \
	  -e 's|^\( *\)"cmake",$$|\1"$(CURDIR)/$(BIN)/cmake",|' \
	  -e 's|if self.rebuild_flag and|& "CORE_IS_BUILT" not in os.environ and|' \
	  $(VENV)/lib/python3*/site-packages/_editable_skbc_unisono.py
	touch $@

clean:  ## remove all build outputs
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
