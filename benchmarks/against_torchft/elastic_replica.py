"""One replica of the elastic comparison: the same loop under torchft's DiLoCo or under ours.

    python -m benchmarks.against_torchft.elastic_replica SETTINGS

SETTINGS is JSON text, see ``Place``. The process writes a line for each inner step, commit and
join into its log, until the file ``stop`` appears beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.against_torchft.peer import make_manager
from diloco_comm_tools.common.workers import die_with_launcher
from diloco_comm_tools.demo.data import Batches, load_corpus, validation_windows
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig, byte_loss

NUM_REPLICAS = 3
OUTER_LR, OUTER_MOMENTUM, INNER_LR = 0.7, 0.8, 1e-3


@dataclass(frozen=True)
class Place:
    """What a process is told.

    Attributes:
        side: "torchft" or "diloco".
        replica: Its number.
        process: Of all processes of this side; the seed of its data.
        coordinator: Address of the lighthouse or of the registry.
        log: File for its lines.
        suspect_s: Seconds without a sign of life after which a replica counts as dead.
    """

    side: str
    replica: int
    process: int
    coordinator: str
    log: str
    sync_every: int
    step_s: float
    suspect_s: float
    width: int
    layers: int


# Writes a line: what happened, and numbers that say more.
Note = Callable[..., None]


class Side(Protocol):
    """What synchronises the model."""

    def step(self) -> None:
        """Do what follows an inner step."""

    def outer_parameters(self) -> Any: ...

    def close(self) -> None: ...


class Ours:
    """DiLoCo with ``membership=Elastic(...)``."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place, note: Note
    ) -> None:
        from diloco_comm import DiLoCo, Elastic, Nesterov

        def tell(happening: Any) -> None:
            name = type(happening).__name__
            if name == "ViewChanged":
                note("view", members=len(happening.members), copied=happening.copied_bytes)
            elif name == "JoinProgress":
                note("joining", received=happening.received_bytes)

        self._diloco = DiLoCo(
            model,
            optimizer,
            sync_every=place.sync_every,
            wire="fp32",
            outer=Nesterov(OUTER_LR, OUTER_MOMENTUM),
            attach=False,
            peers=Elastic(
                place.coordinator,
                run="compare",
                replica=place.replica,
                min_replicas=2,
                suspect_after=place.suspect_s,
                on_event=tell,
            ),
        )
        self._diloco.on_sync(lambda metrics: note("commit") if metrics.is_applied else None)
        self.step, self.outer_parameters = self._diloco.step, self._diloco.outer_parameters
        # As a process that ends: the others go on.
        self.close = self._diloco.close


class Theirs:
    """torchft's DiLoCo, used as its own trainer for tests uses it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place, note: Note
    ) -> None:
        from torchft.local_sgd import DiLoCo

        timeout = timedelta(seconds=2 * place.suspect_s)
        self._model, self._note = model, note

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["inner_optim"])

        self._manager, self._store = make_manager(
            timeout,
            place.coordinator,
            place.replica,
            load_state_dict=load,
            state_dict=lambda: {
                "model": model.state_dict(),
                "inner_optim": optimizer.state_dict(),
            },
            min_replica_size=2,
            quorum_timeout=timedelta(seconds=60),
            connect_timeout=timeout,
            quorum_retries=10,
        )
        outer = torch.optim.SGD(model.parameters(), OUTER_LR, OUTER_MOMENTUM, nesterov=True)
        # One fragment; a list of outer optimizers, one for each fragment.
        self._diloco = DiLoCo(
            self._manager, [model], optimizer, [outer], sync_every=place.sync_every
        )
        self._optimizer, self._is_healing = optimizer, False
        self._watch_heals()
        self._diloco._step_pre_hook(optimizer, (), {})

    def _watch_heals(self) -> None:
        transport = self._manager._checkpoint_transport
        receive = transport.recv_checkpoint

        def received(*args: Any, **kwargs: Any) -> Any:
            state = receive(*args, **kwargs)
            self._is_healing = True
            self._note("joining", received=num_bytes(state))
            return state

        transport.recv_checkpoint = received

    def step(self) -> None:
        before = self._manager.current_step()
        self._diloco._step_post_hook(self._optimizer, (), {})
        if self._manager.current_step() > before:
            members = self._manager.num_participants()
            # Who was given the state in this round has shared nothing of its own.
            self._note("healed" if self._is_healing else "commit", members=members)
            self._is_healing = False
        elif self._diloco._local_step == 0:
            self._note("discarded")
        self._diloco._step_pre_hook(self._optimizer, (), {})

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        with torch.no_grad():
            for fragment in self._diloco._fragments:
                fragment.restore_parameters()
        yield

    def close(self) -> None:
        self._diloco._step_post_hook = lambda *_: None
        self._manager.shutdown(wait=False)


def num_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(num_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(num_bytes(value) for value in state)
    return 0


def main() -> int:
    die_with_launcher()
    place = Place(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    log = open(place.log, "a", buffering=1)

    def note(kind: str, **numbers: Any) -> None:
        log.write(json.dumps({"at": time.monotonic(), "kind": kind, **numbers}) + "\n")

    config = ModelConfig(width=place.width, num_layers=place.layers)
    corpus = load_corpus(None, NUM_REPLICAS)
    batches = Batches(corpus.shards[place.replica], 8, config.context, seed=place.process)
    windows = validation_windows(corpus.validation, 256, config.context)
    model = ByteTransformer(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), INNER_LR, betas=(0.9, 0.95), fused=True)
    # The first pass allocates memory and starts threads: no other replica shall wait for that.
    byte_loss(model, *batches.next()).backward()
    note("begins", parameters=sum(parameter.numel() for parameter in model.parameters()))
    side: Side = {"torchft": Theirs, "diloco": Ours}[place.side](model, optimizer, place, note)
    stop = Path(place.log).with_name("stop")
    while not stop.exists():
        began = time.monotonic()
        optimizer.zero_grad()
        byte_loss(model, *batches.next()).backward()
        optimizer.step()
        note("step")
        side.step()
        time.sleep(max(0.0, place.step_s - (time.monotonic() - began)))
    with side.outer_parameters(), torch.no_grad():
        note("end", loss=float(byte_loss(model, windows[:, :-1], windows[:, 1:])))
    side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
