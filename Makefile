# Two commands matter: `make demo` and `make test`. Each does all its own set-up on a machine with
# python3 (3.11 or newer), pip, make and g++; a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
FUZZ_S ?= 60
# Made by pip with the extension, so that the C++ tests need not compile the core once more.
CPP_BUILD := build/dev

.PHONY: demo test quick check format lint types imports unit cpp sanitize fuzz aarch64 bench soak clean help

help:  ## this list
	@grep -hE '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## train a real model through our backend, beside Gloo
	$(BIN)/unisono train digits

test: check cpp unit  ## everything that CI runs

check: format lint types imports

format: $(READY)  ## is everything formatted?
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cc' 'csrc/*.h')

fix: $(READY)  ## format everything
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cc' 'csrc/*.h')

lint: $(READY)  ## ruff
	$(BIN)/ruff check .

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

imports: $(READY)  ## does every import go down the layers?
	$(BIN)/lint-imports

unit: $(READY)  ## unit, property, multi-process and example tests
	$(BIN)/pytest -q -m "not slow" --numprocesses $(JOBS) --dist loadfile

soak: $(READY)  ## the slow tests
	$(BIN)/pytest -q -m slow --timeout 1200

cpp: $(READY)  ## the C++ tests
	test -f $(CPP_BUILD)/CMakeCache.txt || $(BIN)/cmake -S . -B $(CPP_BUILD) -G Ninja -DUNISONO_TESTS=ON \
	  -DUNISONO_PYTHON=OFF -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD) --target cpp_tests -j $(JOBS)
	$(BIN)/ctest --test-dir $(CPP_BUILD) --output-on-failure
	@grep ^SKIPPED $(CPP_BUILD)/Testing/Temporary/LastTest.log || true

sanitize: $(READY)  ## the C++ tests under ThreadSanitizer, then Address- and UBSan
	for kind in thread address,undefined; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF \
	    -DUNISONO_SANITIZE=$$kind -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind --target cpp_tests -j $(JOBS) && \
	  $(BIN)/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; done

fuzz: $(READY)  ## let made-up bytes run through what peers and plans bring (clang; FUZZ_S seconds each)
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF -DUNISONO_FUZZ=ON \
	  -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build build/fuzz --target fuzzers -j $(JOBS)
	for what in frames messages plans; do mkdir -p build/fuzz/found/$$what && \
	  ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=512:detect_leaks=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  build/fuzz/csrc/fuzz/fuzz_$$what -max_total_time=$(FUZZ_S) -malloc_limit_mb=100000 -timeout=10 -max_len=2048 -len_control=0 \
	    -artifact_prefix=build/fuzz/ build/fuzz/found/$$what csrc/fuzz/corpus/$$what || exit 1; done

aarch64: $(READY)  ## the C++ tests for aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DUNISONO_TESTS=ON -DUNISONO_PYTHON=OFF \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	$(BIN)/cmake --build build/aarch64 --target cpp_tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/aarch64 --output-on-failure
	@grep ^SKIPPED build/aarch64/Testing/Temporary/LastTest.log || true

bench: $(READY)  ## the whole table of benchmarks/RESULTS.md (about an hour)
	$(BIN)/python benchmarks/sweep.py

# Debian's python3 may lack ensurepip; its pip can install into a bare environment all the same.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(READY): pyproject.toml CMakeLists.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" "numpy>=2" "ninja>=1.11" "cmake>=3.25"
	$(BIN)/python -m pip install --quiet --no-build-isolation -C build-dir=$(CPP_BUILD) \
	  -C cmake.define.UNISONO_TESTS=ON -e '.[train,plot,peers,dev]'
	touch $@

clean:  ## remove what was built
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
