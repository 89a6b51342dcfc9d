#!/usr/bin/env bash
# Profiles one call of each operator with Nsight Compute, on 256 MiB of fp32:
#
#     benchmarks/gpu/ncu.sh PYTHON NAME IMPL FOLDER OPERATOR...
#
# writes FOLDER/ncu_NAME.ncu-rep and prints its pages. The clocks stay as they are.
set -euo pipefail
export PYTHONPATH="$(dirname "$0")/../..${PYTHONPATH:+:$PYTHONPATH}"
python=$1 impl=$3 report=$4/ncu_$2
shift 4
ncu --clock-control none --set full --profile-from-start off --force-overwrite --export "$report" \
    "$python" -m benchmarks.gpu.profile --impl "$impl" "$@"
ncu --import "$report.ncu-rep" --page details
