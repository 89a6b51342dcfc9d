"""Call operators once each between the profiler's start and stop, for Nsight Compute.

python -m benchmarks.gpu.profile encode outer_step reduce decode [--impl cuda] [--device cpu]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import torch

from benchmarks.operators.kernels_gpu_cases import Data, cases
from benchmarks.support import common

OPERATORS = ("encode", "outer_step", "reduce", "decode")


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="+", choices=OPERATORS, metavar="OPERATOR")
    parser.add_argument("--impl", default="")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--size", type=common.parse_size, default=256 << 20)
    args = parser.parse_args()
    common.check_device(parser, args.device)
    common.parse_impls(parser, args.impl, args.device)
    is_gpu = args.device == "cuda"
    # The int8 case on one tensor is the first of its operator.
    known = cases(Data(args.size, args.device), ["int8"])
    for operator in args.operators:
        case = next(case for case in known if case.operator.split()[0] == operator)
        case.run(args.impl)
        if is_gpu:
            torch.cuda.synchronize()
        with torch.cuda.profiler.profile() if is_gpu else nullcontext():
            case.run(args.impl)
            if is_gpu:
                torch.cuda.synchronize()
        print(f"{case.operator}: {case.traffic_bytes:g} bytes an element")
    return 0


if __name__ == "__main__":
    sys.exit(main())
