#!/usr/bin/env bash
# Proves on one NVIDIA GPU what tests without one cannot:
#
#     benchmarks/gpu_check.sh [--rehearse] OUT [A|B|C]
#
# in three parts, each at most nine minutes long and complete by itself; without a letter, in turn:
#
#     A  CUDA kernels: speed against the bars and torch.compile, Nsight Compute, their tests; five
#        ranks of NCCL. A machine that is lent for a quarter of an hour runs this part first
#     B  Triton's kernels: their tests; the table of all operators; offload; the frozen table's bits
#     C  the engine's tests, profiler traces, training, compute-sanitizer; more than 2^31 elements
#
# A step that fails or runs into its limit stops nothing. OUT has two files, new after every step:
# summary.txt, and all.tgz with logs, figures and traces; a part adds to what is there of another
# part. The exit status is 1 when a step failed or a figure misses its bar; the summary's end says
# which. The Python that runs is $PYTHON (default: python3); it needs torch with CUDA, numpy, pytest
# and hypothesis, and the extension, which benchmarks/gpu/build.sh builds in minutes; make gpu-build
# builds the extension on a machine without a GPU. Without CUDA's kernels in the extension Triton
# serves the operators, and what needs CUDA's kernels is left out.
#
# With --rehearse the same steps run without a GPU, on small sizes: kernels in CUDA are emulated,
# Triton's are interpreted, gloo stands for NCCL, and the profilers' programs run without a profiler.
# make gpu-rehearsal builds what a rehearsal needs. steps.txt has the limits and measured times of both.
set -uo pipefail
usage="usage: benchmarks/gpu_check.sh [--rehearse] OUT [A|B|C]"
usage() {
    echo "$usage" >&2
    exit 2
}
case "${1:-}" in -h | --help) echo "$usage" && sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
is_rehearsal=false
if [ "${1:-}" = --rehearse ]; then
    is_rehearsal=true
    shift
fi
[ $# -eq 1 ] || [ $# -eq 2 ] || usage
case "${2:-}" in A | B | C) parts=$2 ;; "") parts="A B C" ;; *) usage ;; esac
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
"$python" -c "" >/dev/null 2>&1 || {
    echo "PYTHON must be a Python that runs, got $python" >&2
    exit 2
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
work=$(mktemp -d) || exit 2
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
[ -f "$out/all.tgz" ] && tar -xzf "$out/all.tgz" -C "$work"

PART_SECONDS=540
$is_rehearsal && PART_SECONDS=1200
GRACE=2           # for a step that ignores the first signal
MOST_BYTES=$((15 << 20)) # of the archive; traces are left out of one that would be larger
begun=$SECONDS    # of the part

# Puts what is known so far where it is found.
publish() {
    "$python" -m benchmarks.gpu.summary "$work" >"$work/summary.txt" 2>&1
    local leave_out=() more
    for more in none '*.json.gz' '*.ncu-rep'; do
        leave_out+=("--exclude=$more")
        # Status 1 is a file that grew while tar read it: the log of a process that still writes.
        tar -cf "$out/.all.tgz" -I "gzip -1" -C "$work" "${leave_out[@]}" .
        [ $? -le 1 ] || return
        [ "$(stat -c %s "$out/.all.tgz")" -le "$MOST_BYTES" ] && break
    done
    mv "$out/.all.tgz" "$out/all.tgz"
    cp "$work/summary.txt" "$out/summary.txt"
}

# The part and the limit of each step, and the options that a rehearsal adds to its command.
declare -A part_of limits options
while read -r letter name there _ here _ more; do
    part_of[$name]=$letter
    limits[$name]=$there
    if $is_rehearsal; then
        limits[$name]=$here
        options[$name]=$more
    fi
done < <(grep -v '^#' benchmarks/gpu/steps.txt)

# note NAME STATUS SECONDS LIMIT REASON
note() {
    printf '{"part": "%s", "step": "%s", "status": %s, "seconds": %s, "limit": %s, "reason": "%s", "is_rehearsal": %s}\n' \
        "$part" "$@" "$is_rehearsal" >>"$work/steps.jsonl"
    publish
}

# step NAME COMMAND...: runs a command under the limit of that step and notes how the step ended.
step() {
    local name=$1 begin=$SECONDS status more
    local limit=${limits[$name]}
    read -ra more <<<"${options[$name]:-}"
    shift
    set -- "$@" "${more[@]}"
    local left=$((PART_SECONDS - GRACE - (SECONDS - begun)))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 1 ]; then
        skip "$name" "the part's time is over"
        return 1
    fi
    echo "== $part: $name (at most $limit s)"
    timeout --kill-after="$GRACE" "$limit" "$@" >"$work/$name.log" 2>&1
    status=$?
    tail -n 3 "$work/$name.log" | sed 's/^/   /'
    note "$name" "$status" $((SECONDS - begin)) "$limit" ""
    return "$status"
}

skip() {
    note "$1" null 0 0 "$2"
}

# The command that runs operators: on a device, or their emulation.
operate=("$python" -m)
$is_rehearsal && operate=("$python" -m benchmarks.gpu.rehearse)

# prepare: a Python with torch, the extension, and a device that answers, or status 1.
prepare() {
    step machine "$python" -m benchmarks.gpu.facts --versions --extension --first-call
    # The first import of torch on a machine reads gigabytes from its disk; one that took too long
    # says nothing about the extension.
    [ $? -ne 1 ] || return
    impl=cuda
    if grep -q '"impls": \["triton"\]' "$work/machine.log"; then
        impl=triton
        skip cuda_kernels "the extension has none: Triton serves all operators"
    fi
}

# Ranks of NCCL on one GPU are refused unless they seem to be on several hosts. Where they are refused
# all the same, that alone stays unproven.
probe_nccl() {
    # Three ranks have two phases; five are the fewest whose owners encode a mean on another wire.
    local ranks=5
    replicas=2
    step nccl_ranks "$python" -m benchmarks.gpu.nccl_probe --ranks "$ranks" || ranks=1 replicas=1
    export DILOCO_TEST_NCCL_RANKS=$ranks NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
}

# sources of the operators' tests
operators=(tests/ops/test_ops_{encode,reduce,outer_step,bounds,examples,windows,digest,digest_errors}.py
    tests/ops/test_{async_operator,cuda_operators,cuda_whole_tiles,triton_encode,triton_operators}.py
    tests/ops/test_{rotated,triton_rotated,sparse,sparse_examples,triton_sparse,cuda_sparse}.py)

profiled=(encode reduce outer_step decode)

part_A() {
    prepare || return
    step bars "${operate[@]}" benchmarks.operators.kernels_gpu --check --impl "$impl" \
        --wires int8,int4,int2r,topk64 --json "$work/bars.json"
    if $is_rehearsal; then
        step counters "${operate[@]}" benchmarks.gpu.profile "${profiled[@]}" --impl "$impl"
    elif command -v ncu >/dev/null; then
        step counters benchmarks/gpu/ncu.sh "$python" "$impl" "$work" "${profiled[@]}"
    else
        skip ncu "ncu is not on PATH"
    fi
    probe_nccl
    step streams "$python" -m benchmarks.gpu.run_tests --processes 2 \
        --logs "$work/streams" tests/gpu/test_gpu_streams.py
    step trace_nccl "$python" -m benchmarks.gpu.trace --device cuda --backend nccl \
        --replicas "$replicas" --least_hidden 95 --json "$work/trace_nccl.json" --trace "$work/trace_nccl-events.json.gz"
    if [ "$impl" = cuda ]; then
        step cuda_tests "$python" -m benchmarks.gpu.run_tests --processes 12 --select "not triton" \
            --logs "$work/cuda_tests" "${operators[@]}"
    fi
}

part_B() {
    prepare || return
    step triton_tests "$python" -m benchmarks.gpu.run_tests --processes 14 --select triton \
        --logs "$work/triton_tests" "${operators[@]}"
    step kernels "${operate[@]}" benchmarks.operators.kernels_gpu --check --jobs 14 --no-compile \
        --json "$work/kernels.json"
    step offload "$python" -m benchmarks.gpu.offload
    step forked_call "$python" -m benchmarks.gpu.facts --forked-call
    step frozen "$python" -m benchmarks.gpu.run_tests --processes 2 \
        --logs "$work/frozen" tests/gpu/test_gpu_frozen.py
}

part_C() {
    prepare || return
    probe_nccl
    step engine_tests "$python" -m benchmarks.gpu.run_tests --processes 3 \
        --logs "$work/engine_tests" tests/gpu/test_gpu_{engine,sharded,order}.py
    step trace "$python" -m benchmarks.gpu.trace --device cuda --least_hidden 95 \
        --json "$work/trace.json" --trace "$work/trace-events.json.gz"
    step training "$python" -m benchmarks.gpu.training --device cuda --json "$work/training.json"
    step large "${operate[@]}" benchmarks.gpu.large
    # After all that is timed: these tests stop and kill processes which have the device busy.
    step group_tests "$python" -m benchmarks.gpu.run_tests --processes 3 \
        --logs "$work/group_tests" tests/gpu/test_gpu_{group,graphs,nonfinite,stopped}.py \
        tests/integrations/test_integrations_ddp_hook.py
    if $is_rehearsal; then
        step sanitizers "$python" -m benchmarks.gpu.operators
        return
    fi
    sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
    step sanitizers benchmarks/gpu/sanitize.sh "$sanitizer" "$python" "$work"
}

# A rehearsal and a run on a GPU do not share an archive.
other=true
$is_rehearsal && other=false
if [ -f "$work/steps.jsonl" ] && grep -q "\"is_rehearsal\": $other" "$work/steps.jsonl"; then
    echo "$out has the archive of a $($other && echo rehearsal || echo "run on a GPU"): give another folder" >&2
    exit 2
fi
# Figures and steps of an earlier run of the same part are not this run's.
for part in $parts; do
    [ -f "$work/steps.jsonl" ] && sed -i "/^{\"part\": \"$part\"/d" "$work/steps.jsonl"
    for name in "${!part_of[@]}"; do
        [ "${part_of[$name]}" != "$part" ] || rm -f "$work/$name.json" "$work/$name.log"
    done
done
if command -v nvidia-smi >/dev/null; then
    query=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active
    nvidia-smi --query-gpu="$query" --format=csv -lms 500 >"$work/clocks.csv" &
fi
for part in $parts; do
    begun=$SECONDS
    "part_$part"
done
echo
"$python" -m benchmarks.gpu.summary "$work"
exit $?
