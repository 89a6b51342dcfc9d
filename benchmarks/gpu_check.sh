#!/usr/bin/env bash
# The check of one NVIDIA GPU: benchmarks/gpu/check.sh says what it does.
exec "$(dirname "$0")/gpu/check.sh" "$@"
