"""Try NCCL ranks on one GPU: each takes a NCCL_HOSTID of its own, as if on its own host.

    python -m benchmarks.gpu.nccl_probe [--ranks 5] [--backend gloo]

Ends with status 0 when an all_to_all and an all_gather of all ranks gave the right bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.support import common
from diloco_comm_tools.common import workers


def probe(backend: str) -> None:
    # A rank whose launcher was ended by a time limit would hold the device.
    workers.die_with_launcher()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = f"diloco-{rank}"
    options = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=20)}
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(0)
        device, options["device_id"] = "cuda", 0
    dist.init_process_group(backend, **options)
    given = torch.arange(world * 1024, device=device) + 10_000 * rank
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    expected = [torch.arange(1024) + 1024 * rank + 10_000 * peer for peer in range(world)]
    assert torch.equal(taken.cpu(), torch.cat(expected))
    rows = torch.empty(world * 1024, dtype=given.dtype, device=device)
    dist.all_gather_into_tensor(rows, given[:1024])
    assert rows.view(world, 1024)[:, 0].tolist() == [10_000 * peer for peer in range(world)]
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="nccl", help="nccl (default), or gloo without a GPU")
    parser.add_argument("--ranks", type=common.parse_count, default=2, help="processes (2)")
    args = parser.parse_args()
    if args.backend == "nccl":
        common.check_device(parser, "cuda")
    if common.is_worker():
        probe(args.backend)
        return 0
    env = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
    # Ranks of gloo take turns on the two cores of a rehearsal.
    seconds = 20.0 if args.backend == "nccl" else 60.0
    try:
        common.run_workers(common.same_command(), args.ranks, env=env, timeout_s=seconds)
    except RuntimeError as error:
        print(f"{args.ranks} ranks of {args.backend}: refused ({error})")
        return 1
    print(f"{args.ranks} ranks of {args.backend}: they work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
