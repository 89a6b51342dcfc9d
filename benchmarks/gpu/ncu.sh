#!/usr/bin/env bash
# Profiles one call of each operator with Nsight Compute, on 256 MiB of fp32:
#
#     benchmarks/gpu/ncu.sh PYTHON IMPL FOLDER OPERATOR...
#
# writes FOLDER/counters.ncu-rep, and all counters to FOLDER/counters.csv, below a line of commit and
# versions; prints its pages. The clocks stay as they are.
set -euo pipefail
usage="usage: benchmarks/gpu/ncu.sh PYTHON IMPL FOLDER OPERATOR..."
case "${1:-}" in -h | --help) echo "$usage" && exit ;; esac
[ $# -ge 4 ] || {
    echo "$usage" >&2
    exit 2
}
export PYTHONPATH="$(dirname "$0")/../..${PYTHONPATH:+:$PYTHONPATH}"
python=$1 impl=$2 report=$3/counters
shift 3
ncu --clock-control none --set full --profile-from-start off --force-overwrite --export "$report" \
    "$python" -m benchmarks.gpu.profile --impl "$impl" "$@"
{
    echo "# $("$python" -m benchmarks.gpu.facts --versions)"
    ncu --import "$report.ncu-rep" --page raw --csv
} >"$report.csv"
ncu --import "$report.ncu-rep" --page details
