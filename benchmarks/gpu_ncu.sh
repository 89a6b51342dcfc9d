#!/usr/bin/env bash
# Profiles one call of an operator with Nsight Compute, on 256 MiB of fp32:
#
#     benchmarks/gpu_ncu.sh PYTHON OPERATOR IMPL FOLDER
#
# writes FOLDER/ncu_OPERATOR.ncu-rep and prints its pages. The clocks stay as they are.
set -euo pipefail
python=$1 operator=$2 impl=$3 report=$4/ncu_$2
ncu --clock-control none --set full --profile-from-start off --force-overwrite --export "$report" \
    "$python" "$(dirname "$0")/gpu_profile.py" --impl "$impl" "$operator"
ncu --import "$report.ncu-rep" --page details
