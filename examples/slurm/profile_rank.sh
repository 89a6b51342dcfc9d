#!/bin/bash
# Run a command under nsys, one report for each rank:
#   srun examples/slurm/profile_rank.sh python train.py
#   torchrun --nproc-per-node 8 --no-python examples/slurm/profile_rank.sh python train.py
# DILOCO_PROFILE_RANKS=0,8 profiles these ranks alone; reports go to DILOCO_PROFILE_DIR (profiles).
set -euo pipefail

rank=${RANK:-${SLURM_PROCID:-0}}
ranks=${DILOCO_PROFILE_RANKS:-}
folder=${DILOCO_PROFILE_DIR:-profiles}
if [[ -n $ranks && ,$ranks, != *,$rank,* ]]; then
    exec "$@"
fi
if ! command -v nsys >/dev/null; then
    echo "profile_rank.sh: nsys is not installed, running rank $rank without it" >&2
    exec "$@"
fi
mkdir -p "$folder"
exec nsys profile --trace=cuda,nvtx,osrt --sample=none --force-overwrite=true \
    --output="$folder/rank-$rank" "$@"
