#!/bin/bash
# rebuilds this tree's native module
set -e
cd /work/wt/shrinkh
[ -f build/own/CMakeCache.txt ] || .venv/bin/cmake -S . -B build/own -G Ninja -DCMAKE_BUILD_TYPE=Release -DUNISONO_TESTS=ON -DPython_EXECUTABLE=/work/wt/shrinkh/.venv/bin/python -DCMAKE_MAKE_PROGRAM=/work/main/.venv/bin/ninja -Dnanobind_DIR=$(/work/main/.venv/bin/python -m nanobind --cmake_dir) >/dev/null
.venv/bin/cmake --build build/own -j 2 --target "${1:-_native}"
cp build/own/_native*.so src/unisono/ 2>/dev/null || find build/own -name '_native*.so' -exec cp {} src/unisono/ \;
