#!/usr/bin/env bash
# Builds the extension in place, into diloco_comm/, for the torch of the given Python:
#
#     benchmarks/gpu/build.sh PYTHON ON|OFF [ARCHS]
#
# ON has CUDA kernels, for the architectures ARCHS (such as "90") or all that nvcc knows; OFF has none.
# CMake alone is called, so that no version of setuptools can be in the way.
set -euo pipefail
usage="usage: benchmarks/gpu/build.sh PYTHON ON|OFF [ARCHS]"
case "${1:-}" in -h | --help) echo "$usage" && exit ;; esac
[ $# -ge 2 ] || {
    echo "$usage" >&2
    exit 2
}
python=$(command -v "$1") || {
    echo "PYTHON must be a Python that runs, got $1" >&2
    exit 2
}
cuda=$2 archs=${3:-}
cd "$(dirname "$0")/../.."
PATH="$(dirname "$python"):$PATH"
build=build/gpu-$cuda
# A folder configured for another Python or another torch would be taken as it is.
rm -f "$build/CMakeCache.txt"
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/diloco_comm" -DDILOCO_WERROR=OFF \
    -DDILOCO_CUDA="$cuda" -DDILOCO_CUDA_ARCHS="$archs"
cmake --build "$build" --target _C
