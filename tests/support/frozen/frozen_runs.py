"""Train one setting of the frozen table, and say every bit that its replicas end with.

The gradient of a step is an integer ramp over 64 and does not depend on the parameters, and the
learning rate is a power of two. So the inner steps are exact, and the outer steps are defined bit
by bit: what a replica ends with depends on no machine, number of threads or implementation. An
inner step of a parameter in bf16 or fp16 adds an exact product, and rounds once.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import cut_links
import devices
import torch
import torch.distributed as dist
from choice_groups import grouped
from exchange_helpers import folder_of, make_folders
from frozen_mutants import changed
from frozen_table import POLICIES, WIRES, Setting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from diloco_comm import DiLoCo, Elastic, Link, SyncError, connect_store
from diloco_comm.base.store_host import place_of_store
from diloco_comm.ops.digests import digest_of
from diloco_comm.training import presets

Bits = dict[str, Any]

H, NUM_STEPS, FINAL_STEPS = 4, 20, 15
# After a loss, until a round of the new group is applied with two rounds under way.
STEPS_AFTER_LOSS = 24
# The steps that something happens at: one that sends, and one between two sends.
FAULT_STEP, CHANGE_STEP = 2 * H, 2 * H + 2
TIMEOUT_S = 60.0
# Long enough for a process on a loaded machine to beat meanwhile.
SUSPECT_AFTER_S = 6.0
ALERT_S = 5.0
# Parts of a saved state, by a word in the keys that lead to their tensors.
STATE = ("outer", "buffers", "residual", "payloads", "flights", "owed", "corrected")


class Layer(nn.Module):
    """A tensor of 2^11 elements, and one of an odd number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(ramp((64, 32), number, 3))
        self.bias = nn.Parameter(ramp((777,), number, 5))


class Layers(nn.Module):
    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(6))
        self.register_buffer("mean", torch.zeros(9))
        for param, dtype in zip(self.parameters(), itertools.cycle(dtypes), strict=False):
            param.data = param.data.to(dtype)


def ramp(shape: Sequence[int], start: int, factor: int) -> Tensor:
    """Multiples of 1/64 from -1/4 to 1/4 that follow no simple order."""
    begin, count = 97 * start % 33, math.prod(shape)
    return _periods(factor)[begin : begin + count].reshape(tuple(shape)).clone()


@functools.cache
def _periods(factor: int) -> Tensor:
    return (torch.arange(4096) * factor % 33 - 16).float() / 64


def arguments_of(setting: Setting, replica: int) -> tuple[Callable[..., DiLoCo], dict[str, Any]]:
    """Return the class or preset of a row, and the arguments that say what is trained."""
    arguments = {"sync_every": H, "chunk_bytes": 2048, **POLICIES[setting.policy]}
    arguments |= WIRES[setting.wire]
    make: Any = getattr(presets, arguments.pop("preset", ""), DiLoCo)
    if arguments.get("weight") == "given":
        arguments["weight"] = 1.0 + replica
    if arguments.get("weight") == "measured":
        arguments["weight"] = lambda: 0.5 + replica
    if setting.happening == "reset":
        arguments["on_nonfinite"] = "reset"
    return make, {**arguments, "average_buffers": setting.happening == "buffers"}


class Member:
    """A replica of a row, and what it has seen."""

    def __init__(
        self,
        setting: Setting,
        replica: int,
        store: dist.Store | None,
        device: torch.device,
        impl: str = "",
        link: Link | str = "gloo",
    ) -> None:
        self.setting, self.replica, self.store, self.link = setting, replica, store, link
        self.device, self.impl = device, impl
        # How many workers this replica has, and the number of this worker among all workers.
        self.num_workers, self.rank = 1, replica
        self.rounds: list[str] = []
        self.payloads: list[str] = []
        self.steps: dict[int, int] = {}
        self.step = 0
        # Let each send wait until its round has ended, or has been under way for ``ALERT_S``.
        self.is_alert = False

    def share_replica(self) -> None:
        """Be one of two workers, which have a process group for themselves."""
        self.num_workers, worker = 2, self.rank % 2
        self.replica = self.rank // 2
        place = f"{self.setting.name} workers {self.replica}"
        store = dist.PrefixStore(place, self.store)
        dist.init_process_group("gloo", store=store, rank=worker, world_size=2)

    def attach(self, part: str = "run", **options: Any) -> None:
        """Make a model and attach it; ``part`` tells the groups of a row apart."""
        self.model = Layers(self.setting.dtypes).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1 / 16)
        make, arguments = arguments_of(self.setting, self.replica)
        if "config" in options:
            make, arguments = DiLoCo, {key: arguments[key] for key in arguments.keys() & {"weight"}}
        if self.store is not None and "membership" not in options:
            options["store"] = dist.PrefixStore(f"{self.setting.name} {part}", self.store)
            options["replica"] = self.replica
        if self.num_workers > 1:
            options["shard_group"] = dist.group.WORLD
        options |= {"timeout": TIMEOUT_S, "impl": self.impl, "link": self.link}
        if self.setting.happening == "offload" and self.device.type != "cpu":
            options["offload"] = "cpu"
        self.diloco = make(self.model, self.optimizer, **grouped({**arguments, **options}))
        self.diloco.on_sync(self._synced)
        self._record_payloads()

    def _synced(self, metrics: Any) -> None:
        fragment, kind = metrics.fragment, "" if metrics.is_applied else " skipped"
        kind += " reset" if metrics.is_reset else ""
        self.steps[fragment] = self.steps.get(fragment, 0) + metrics.is_applied
        place = f"{fragment}.{metrics.round}@{metrics.inner_step}"
        self.rounds.append(f"{place}:{metrics.sent_bytes}{kind}")

    def _record_payloads(self) -> None:
        """Take a digest of every payload as soon as it is encoded."""
        exchange = self.diloco.exchange
        start = exchange.start

        def start_and_record(buffers: Any, **arguments: Any) -> Any:
            work, header = start(buffers, **arguments), arguments["header"]
            used = [work.own.tensor[begin:end] for begin, end in work.layout.filled()]
            self.payloads.append(f"{header.fragment}.{header.round}:{short_digest(used)}")
            until = time.monotonic() + ALERT_S
            while self.is_alert and not exchange.is_idle and time.monotonic() < until:
                time.sleep(0.001)
            return work

        exchange.start = start_and_record  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------- the steps

    def train_to(self, last: int) -> None:
        while self.step < last:
            self.take_step()

    def take_step(self) -> None:
        self.step += 1
        fault = self.step in (FAULT_STEP, CHANGE_STEP) and self.setting.happening == "reset"
        is_sick = fault and self.replica == self.setting.world - 1
        for index, param in enumerate(self.model.parameters()):
            grad = ramp(param.shape, self.step + 5 * index, 7 + 4 * self.replica)
            param.grad = (grad * math.nan if is_sick else grad).to(param)
        self.model.mean.copy_(ramp((9,), self.step, 3 + self.replica))
        self.optimizer.step()

    def try_step(self) -> bool:
        """Take a step; return whether its exchange, or one under way, has not failed."""
        try:
            self.take_step()
        except SyncError:
            return False
        return True

    def settle(self, members: Iterable[int], place: str) -> None:
        """Wait until no round is under way on any of the members."""
        self.diloco.state_dict()
        self.tell(place)
        self.wait_for(members, place)

    def tell(self, place: str) -> None:
        assert self.store is not None
        self.store.set(f"{self.setting.name} {place} {self.rank}", "")

    @property
    def num_rounds_ahead(self) -> int:
        """Rounds that this replica can send without an answer: one of each part, or none."""
        overlap = POLICIES[self.setting.policy].get("overlap")
        return len(self.diloco.parts) if getattr(overlap, "rounds", 0) else 0

    def wait_for(self, members: Iterable[int], place: str) -> None:
        assert self.store is not None
        each = range(self.num_workers)
        ranks = [self.num_workers * member + worker for member in members for worker in each]
        self.store.wait([f"{self.setting.name} {place} {rank}" for rank in ranks])

    def resume(self) -> None:
        """Save everything, and go on with new objects from the saved arguments."""
        file, config = io.BytesIO(), self.diloco.config()
        state = {"model": self.model.state_dict(), "diloco": self.diloco.state_dict()}
        if self.device.type == "lagging":  # torch cannot load tensors of the stand-in
            state = tree_map_only(Tensor, Tensor.cpu, state)
        torch.save(state, file)
        self.diloco.close()
        self.attach("resumed", config=config, **self.group)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.diloco.load_state_dict(saved["diloco"])

    @property
    def group(self) -> dict[str, Any]:
        return {"num_replicas": self.setting.world}

    # ---------------------------------------------------------------------------------- the end

    def bits(self) -> Bits:
        """Say all that this replica has: the arguments, digests of tensors, and its rounds."""
        tensors = list(named_tensors(self.diloco.state_dict()))
        state = {
            part: hexadecimal(tensor for path, tensor in tensors if part in path)
            for part in STATE
            if any(part in path for path, _ in tensors)
        }
        buffers = [self.model.mean] if self.setting.happening == "buffers" else []
        return {
            "config": self.diloco.config(),
            "outer": self.diloco.outer_hash(),
            "local": hexadecimal([*self.model.parameters(), *buffers]),
            "state": state,
            "steps": {str(fragment): count for fragment, count in sorted(self.steps.items())},
            "rounds": self.rounds,
            "payloads": self.payloads,
        }


def named_tensors(value: Any, path: str = "") -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a nested state, and the keys that lead to each, in order of the keys."""
    if isinstance(value, Tensor):
        yield path, value
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from named_tensors(value[key], f"{path}/{key}")


def short_digest(tensors: Iterable[Tensor]) -> str:
    """Return eight digits that tell one payload from another."""
    content = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def hexadecimal(tensors: Iterable[Tensor]) -> str:
    return f"{digest_of([tensor.detach().cpu().contiguous() for tensor in tensors]):016x}"


# -------------------------------------------------------------------------------------- the events


def run_entry(
    name: str,
    device: torch.device,
    impl: str,
    *,
    replica: int,
    store: dist.Store | None,
    link: Link | str = "gloo",
) -> Bits | None:
    """Train one replica of a row; None of a replica that does not see the end.

    Args:
        device: Device of the model.
        impl: Implementation of the operators.
        store: Where the replicas of the row meet.
        link: How payloads travel, see ``DiLoCo``.
    """
    setting = Setting.parse(name)
    member = Member(setting, replica, store, device, impl, link)
    return RUNS.get(setting.happening.partition("-")[0], run_plain)(member)


def run_plain(member: Member) -> Bits:
    event = member.setting.happening
    member.attach(**member.group)
    if event == "resume":
        member.train_to(CHANGE_STEP)
        member.resume()
    with closing(member.diloco):
        member.train_to(FINAL_STEPS if event in ("final", "ended") else NUM_STEPS)
        if event in ("final", "ended"):
            member.diloco.flush(final=event == "ended")
        return member.bits()


def run_keys(member: Member) -> Bits:
    """Replica 0 makes a folder of keys for each replica; all links are keyed."""
    assert member.store is not None
    place = f"{member.setting.name} keys"
    with ExitStack() as stack:
        if member.replica == 0:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_folders(root, member.setting.world)
            member.store.set(place, str(root))
        folder = folder_of(member.store.get(place).decode(), member.replica)
        member.link = Link("tcp", listen="127.0.0.1:0", keys=folder)
        bits = run_plain(member)
        # The folders stay until the replicas have ended.
        member.tell("ended")
        member.wait_for(range(member.setting.world), "ended")
        return bits


def run_join(member: Member) -> Bits:
    """The last replica comes to the others, whose rounds under way have all been agreed on."""
    everyone = range(member.setting.world)
    founders = everyone[:-1]
    if member.replica in founders:
        member.attach(members=founders)
        member.train_to(CHANGE_STEP)
        member.settle(founders, "join")
        member.diloco.change_group(everyone)
    else:
        member.attach(members=everyone, init="join")
        member.step = member.diloco.inner_step
    with closing(member.diloco):
        member.train_to(NUM_STEPS)
        return member.bits()


def run_kill(member: Member) -> Bits | None:
    """The engine of the last replica fails before it tells anyone of a round."""
    return lose_last(member, partial(inject, member, action="fail", stage="header"))


def run_death(member: Member) -> Bits | None:
    """The process of the last replica is killed, or both processes of its workers."""
    # The survivors are named, so it does not matter how long each waits for reports of the others.
    os.environ["DILOCO_COMM_REPORT_S"] = "1.0"
    place = member.setting.happening.partition("-")[2]
    if place in ("workers", "elastic"):
        member.share_replica()
        return lose_workers(member) if place == "workers" else replace_workers(member)
    if place == "after":
        return lose_last(member, lambda: None, dies=True)
    stage, told = {"header": ("header", 0), "told": ("header", 1), "vote": ("vote", 1)}[place]
    kill = partial(inject, member, action="kill", stage=stage, num_peers=told)
    return lose_last(member, kill)


def inject(member: Member, **fault: Any) -> None:
    member.diloco.exchange.inject_fault(**fault)


def lose_last(member: Member, fault: Callable[[], None], *, dies: bool = False) -> Bits | None:
    """Train until the last replica is lost; the others change the group when they notice it.

    No round is under way when the fault is prepared, and each replica waits for the end of the
    round with the fault. Where rounds overlap with steps, the others have sent all rounds
    of a step before the fault happens. So all of them notice the fault at the same step. A process
    that dies does so when the others have sent their next round of each part.

    A replica that has the vote of the last one goes on, and finds the others' connections closed:
    it notices that before it sends anything else.
    """
    everyone = range(member.setting.world)
    survivors, is_last = everyone[:-1], member.replica == everyone[-1]
    member.attach(**member.group)
    with closing(member.diloco):
        member.train_to(FAULT_STEP - 1)
        member.settle(everyone, "before")
        if is_last:
            fault()
            if any(part.in_flight for part in member.diloco.parts):
                member.wait_for(survivors, "sent")
        due = math.inf
        while member.step < STEPS_AFTER_LOSS:
            has_failed = not member.try_step()
            if member.step == FAULT_STEP:
                member.tell("sent")
                member.settle(everyone if dies else (), "after")
                due = len(member.payloads) + member.num_rounds_ahead
                if is_last and dies:
                    member.wait_for(survivors, "ahead")
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_last:
                    return None
                member.is_alert = not dies
            if dies and len(member.payloads) >= due:
                member.tell("ahead")
            if has_failed:
                member.is_alert = False
                member.diloco.change_group(survivors)
                member.step = member.diloco.inner_step
        return member.bits()


def lose_workers(member: Member) -> Bits | None:
    """Both workers of the last replica die before they send their headers."""
    survivors = range(member.setting.world - 1)

    def die() -> None:
        if any(part.in_flight for part in member.diloco.parts):
            member.wait_for(survivors, "sent")
        os.kill(os.getpid(), signal.SIGKILL)

    return lose_last(member, die)


def replace_workers(member: Member) -> Bits:
    """The workers of the last replica of an elastic group die; two processes take their place.

    The others do not train without such a replica. They go on with it from the step whose round has
    failed.
    """
    world, store = member.setting.world, member.store
    assert store is not None
    is_new = member.replica == world
    if is_new:
        member.replica = world - 1
        member.wait_for(range(world), "before")
    # The beats use a connection of their own.
    _, address = place_of_store(store)
    assert address is not None
    registry = dist.TCPStore(*address, is_master=False)
    membership = Elastic(
        dist.PrefixStore(f"{member.setting.name} registry", registry),
        run="frozen",
        replica=member.replica,
        min_replicas=world,
        suspect_after=SUSPECT_AFTER_S,
    )
    member.attach(membership=membership)
    with closing(member.diloco):
        member.step = member.diloco.inner_step
        if not is_new:
            member.train_to(FAULT_STEP - 1)
            member.settle(range(world), "before")
            if member.replica == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        member.train_to(NUM_STEPS)
        return member.bits()


def run_workers(member: Member) -> Bits:
    """Two workers share a replica; the default group has all workers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "worker"))
    member.store, member.replica = None, mesh["replica"].get_local_rank()
    member.attach(mesh=mesh["replica"], shard_group=mesh["worker"])
    with closing(member.diloco):
        member.train_to(NUM_STEPS)
        return member.bits()


RUNS: dict[str, Callable[[Member], Bits | None]] = {
    "join": run_join,
    "kill": run_kill,
    "death": run_death,
    "keys": run_keys,
    "workers": run_workers,
}


def replica_of(setting: Setting, rank: int, world: int) -> int | None:
    """Return the part of a worker in a row; the last worker has the rows of one replica."""
    if setting.has_workers:
        return rank
    replica = rank - (world - 1 if setting.world == 1 else 0)
    return replica if 0 <= replica < setting.world else None


def run_entries(
    rank: int,
    world: int,
    address: tuple[str, int] | str,
    run: str,
    entries: Sequence[tuple[str, str]],
    device: str = "cpu",
    library: str = "",
    num_threads: int = 1,
    mutant: str = "",
    link: Link | str = "gloo",
    homes: Sequence[str] = (),
) -> list[Bits | str | None]:
    """Train rows one after the other, each with an implementation.

    Args:
        address: The store's: host and port of a ``TCPStore``, or the text of ``diloco-comm store``.
        run: Tells apart the runs that share a store.
        device: Name of the device of all models, see ``devices.use``.
        library: File of the stand-in device.
        link: How payloads travel, see ``DiLoCo``.
        homes: The network namespace of each worker; empty: all stay where they are.

    Returns:
        For each row its bits, the text of an error, or None where this worker has no part.
    """
    if homes:
        cut_links.enter(homes[rank])
    store: dist.Store
    if isinstance(address, str):
        store = connect_store(address, timeout=TIMEOUT_S)
    else:
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    own_store = dist.PrefixStore(run, store)
    torch.set_num_threads(num_threads)
    place = devices.use(device, library)
    found: list[Bits | str | None] = []
    for name, impl in entries:
        replica = replica_of(Setting.parse(name), rank, world)
        if replica is None:
            found.append(None)
            continue
        try:
            with changed(mutant):
                more = {"replica": replica, "store": own_store, "link": link}
                found.append(run_entry(name, place, impl, **more))
        except Exception:
            found.append(traceback.format_exc(limit=-3))
    torch.set_num_threads(1)
    return found
