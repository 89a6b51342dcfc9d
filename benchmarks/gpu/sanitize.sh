#!/usr/bin/env bash
# Runs every operator under compute-sanitizer, once for memory and once for races, both at a time:
#
#     benchmarks/gpu/sanitize.sh SANITIZER PYTHON FOLDER
#
# writes FOLDER/memcheck.log and FOLDER/racecheck.log. Status 1 when one of them reports something.
set -uo pipefail
usage="usage: benchmarks/gpu/sanitize.sh SANITIZER PYTHON FOLDER"
case "${1:-}" in -h | --help) echo "$usage" && exit ;; esac
[ $# -ge 3 ] || {
    echo "$usage" >&2
    exit 2
}
export PYTHONPATH="$(dirname "$0")/../..${PYTHONPATH:+:$PYTHONPATH}"
sanitizer=$1 python=$2 folder=$3 status=0
# Each tensor is an allocation of its own: inside one of torch's segments nothing past a tensor's end
# would be out of bounds.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
declare -A processes
for tool in memcheck racecheck; do
    "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -m benchmarks.gpu.operators \
        >"$folder/$tool.log" 2>&1 &
    processes[$tool]=$!
done
for tool in memcheck racecheck; do
    if wait "${processes[$tool]}"; then
        echo "$tool: nothing found"
    else
        status=1
        tail -n 20 "$folder/$tool.log"
        echo "$tool: failed"
    fi
done
exit "$status"
