#!/usr/bin/env bash
# Proves on one NVIDIA GPU what tests without one cannot, in ten minutes and one command:
#
#     benchmarks/gpu_check.sh OUT
#
# OUT gets a log and a line of JSON for each part, the results, and a profiler trace; a table comes
# last. A part that fails does not stop the others, and the exit status is then 1; what matters most
# comes first, and writes what it has before its time is over. The Python that runs is $PYTHON
# (default: python3); it needs torch with CUDA, numpy, pytest, hypothesis and the build's tools
# (cmake, ninja).
set -uo pipefail
if [ $# -ne 1 ]; then
    echo "usage: benchmarks/gpu_check.sh OUT" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
rm -f "$out/parts.jsonl"

# part NAME SECONDS COMMAND...: runs it under its own limit and notes how it ended.
part() {
    local name=$1 limit=$2 begin=$SECONDS status
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    tail -n 3 "$out/$name.log" | sed 's/^/   /'
    printf '{"part": "%s", "status": %d, "seconds": %d, "limit": %d}\n' \
        "$name" "$status" "$((SECONDS - begin))" "$limit" >>"$out/parts.jsonl"
    return "$status"
}

skip() {
    printf '{"part": "%s", "status": null, "reason": "%s"}\n' "$1" "$2" >>"$out/parts.jsonl"
}

part versions 20 "$python" benchmarks/gpu_facts.py --versions
# For the device that is here alone: that is what the time limit allows.
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
part build 75 env DILOCO_CUDA=ON DILOCO_CUDA_ARCHS="$arch" "$python" setup.py -q build_ext --inplace
part first_call 15 "$python" benchmarks/gpu_facts.py --first-call
if [ $? -eq 0 ]; then
    # Two ranks of NCCL on one GPU are refused unless they seem to be on two hosts. Nobody has shown
    # that they then work; where they do not, that alone stays unproven.
    part nccl_two_ranks 30 "$python" benchmarks/gpu_nccl_probe.py
    if [ $? -eq 0 ]; then ranks=2; else ranks=1; fi
    export DILOCO_TEST_NCCL_RANKS=$ranks NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
    part kernel_tests 80 "$python" benchmarks/gpu_tests.py --processes 12 \
        --logs "$out/kernel_tests" tests/test_ops_{encode,reduce,outer_step,bounds,examples}.py \
        tests/test_{async_operator,cuda_operators,triton_encode,triton_operators}.py
    part kernels 125 "$python" benchmarks/kernels_gpu.py --check --jobs 12 --json "$out/kernels.json"
    part engine_tests 90 "$python" benchmarks/gpu_tests.py --processes 3 \
        --logs "$out/engine_tests" tests/test_gpu_{engine,streams,sharded}.py
    part trace 30 "$python" benchmarks/gpu_trace.py --device cuda \
        --json "$out/trace.json" --trace "$out/trace-events.json"
    part trace_nccl 25 "$python" benchmarks/gpu_trace.py --device cuda --backend nccl \
        --replicas "$ranks" --json "$out/trace_nccl.json" --trace "$out/trace_nccl-events.json"
    part training 40 "$python" benchmarks/gpu_training.py --device cuda --json "$out/training.json"
    sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
    for tool in memcheck racecheck; do
        part "$tool" 35 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            "$python" benchmarks/gpu_operators.py
    done
else
    for name in nccl_two_ranks kernel_tests kernels engine_tests trace trace_nccl training memcheck racecheck; do
        skip "$name" "no CUDA device"
    done
fi
"$python" benchmarks/gpu_summary.py "$out" | tee "$out/summary.txt"
exit "${PIPESTATUS[0]}"
