"""torchft's DiLoCo (github.com/meta-pytorch/torchft) behind the interface of against_torchft.py.

Nothing here is imported unless that benchmark runs, and torchft is no dependency of the package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support import common

PACKAGE, VERSION = "torchft-nightly", "2026.10.26"
INSTALL = (
    f"pip install --no-deps --target DIR {PACKAGE}=={VERSION} && "
    "pip install --target DIR opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, "
    "then PYTHONPATH=DIR"
)


def missing() -> str | None:
    """Say why torchft cannot be measured here; None when it can."""
    for module in ("torchft", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"{module} is not installed: {INSTALL}"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = "another package"
    return None if version == VERSION else f"torchft is {version}, compared is {VERSION}: {INSTALL}"


def make_manager(
    timeout: timedelta, lighthouse: str, replica: int, **options: Any
) -> tuple[Any, dist.TCPStore]:
    """Return the manager of a replica of one worker, and the store that the worker hosts."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    # A replica is a job of its own, with a store of its own.
    port = common.free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        use_async_quorum=False,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        # All replicas build the same weights from the seed.
        init_sync=False,
        **options,
    )
    return manager, store


class Peer:
    """One torchft DiLoCo over the ranks of the default group, each a replica of one worker.

    Rank 0 runs the lighthouse. Every fragment has an outer optimizer of its own: one for all
    fragments would step each of them with stale gradients of the others.

    Args:
        fragments: Modules that are exchanged together, in the order of their turns.
        optimizer: The inner optimizer; its hooks are not registered, `step` is called by hand.
        sync_every: Inner steps between two sends of the same fragment.
        delay: Inner steps between a send and its apply.
        use_buckets: One all-reduce a fragment instead of one a parameter.
    """

    def __init__(
        self,
        fragments: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        delay: int,
        lr: float,
        momentum: float,
        use_buckets: bool,
    ) -> None:
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        rank, world = dist.get_rank(), dist.get_world_size()
        self._lighthouse: Any = None
        address = [""]
        if rank == 0:
            # The default tick of 100 ms would be most of a round's time.
            self._lighthouse = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=world, quorum_tick_ms=1
            )
            port = self._lighthouse.address().rsplit(":", 1)[1]
            address = [f"http://127.0.0.1:{port}"]
        dist.broadcast_object_list(address, 0)
        self.manager, self._store = make_manager(
            timedelta(seconds=60),
            address[0],
            rank,
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=world,
        )
        self._coordination_s = 0.0
        self._time_coordination()
        outer = [
            torch.optim.SGD(f.parameters(), lr=lr, momentum=momentum, nesterov=True)
            for f in fragments
        ]
        self.fragments = fragments
        self._diloco = DiLoCo(
            self.manager,
            list(fragments),
            optimizer,
            outer,
            sync_every=sync_every,
            use_bucketization=use_buckets,
            fragment_sync_delay=delay,
        )
        self._optimizer = optimizer

    def step(self) -> None:
        """What torchft's hook does after an inner step."""
        self._diloco._step_post_hook(self._optimizer, (), {})

    def parts(self) -> dict[str, float]:
        """Seconds of quorum and commit so far."""
        return {"coordination": self._coordination_s}

    @property
    def num_syncs(self) -> int:
        """Outer steps that were committed."""
        return self.manager.current_step()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the model, and the local ones back."""
        saved = [[p.detach().clone() for p in f.parameters()] for f in self.fragments]
        with torch.no_grad():
            for fragment in self._diloco._fragments:
                fragment.restore_parameters()
            yield
            for module, tensors in zip(self.fragments, saved, strict=True):
                for parameter, tensor in zip(module.parameters(), tensors, strict=True):
                    parameter.copy_(tensor)

    def close(self) -> None:
        """Stop the manager; rank 0's lighthouse ends when all have."""
        self.manager.shutdown(wait=False)
        dist.barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def _time_coordination(self) -> None:
        """Count the seconds of quorum and commit, which are torchft's fault tolerance."""

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._coordination_s += time.perf_counter() - begin

            return wrapper

        self.manager.start_quorum = timed(self.manager.start_quorum)
        self.manager.should_commit = timed(self.manager.should_commit)
