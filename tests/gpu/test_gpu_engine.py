"""The engine on a device gives the same bits as in host memory, and never makes the host wait."""

from __future__ import annotations

from typing import Any

import device_training
import devices
import pytest
import torch
import torch.distributed as dist
from device_training import METHODS, NAMES, Replica, train
from devices import DEVICES
from problems import equal
from torch.utils._pytree import tree_map

import diloco_comm
from diloco_comm import ops
from diloco_comm.base.errors import SyncError
from diloco_comm.base.memory import current
from diloco_comm.ops import offload
from diloco_comm.ops.wire import Layout, WireFormat


def against_host(rank: int, world: int, device: str, library: str, names: list[str]) -> list[str]:
    """Train with each method on both; the names of those that differ."""
    here = devices.use(device, library)
    wrong = []
    for name in names:
        arguments = METHODS[name]
        expected = train(rank, torch.device("cpu"), 13, **arguments)
        # Gaps are computed from norms that the host reads: that of the step before the last.
        given = train(rank, here, 13, checks=name != "co2", **arguments)
        wrong += [] if equal(expected, given) else [name]
    return wrong


@pytest.mark.nightly("up to 8 s each; they differ in the method", but=["1-lagging", "5-lagging"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_methods_equal_those_in_host_memory(device: str, world: int, replicas, stand_in) -> None:
    assert replicas(world).run(against_host, device, stand_in, NAMES[world]) == [[]] * world


def resumed(rank: int, world: int, device: str, library: str, name: str) -> list[bool]:
    """Save with rounds under way, on the device or in host memory, and go on on the device."""
    here = devices.use(device, library)
    results = []
    for there in (here, torch.device("cpu")):
        through = Replica(rank, here, **METHODS[name])
        through.steps(0, 12)
        first = Replica(rank, there, **METHODS[name])
        first.steps(0, 6)
        both = [first.diloco.state_dict(), first.model.state_dict()]
        outer, local = tree_map(lambda x: x.cpu().clone() if torch.is_tensor(x) else x, both)
        first.diloco.close()
        second = Replica(rank, here, **METHODS[name])
        second.model.load_state_dict(local)
        second.diloco.load_state_dict(outer)
        second.steps(6, 12)
        results.append(equal(through.all(), second.all()))
        for replica in (through, second):
            replica.diloco.close()
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["streaming", "eager"])
def test_resume_on_a_device(device: str, name: str, replicas, stand_in) -> None:
    assert replicas(2).run(resumed, device, stand_in, name) == [[True, True]] * 2


def skipped_rounds(rank: int, world: int, device: str, library: str) -> list[bool]:
    """One replica's values are not finite in a round: none applies it, on either device."""
    here = devices.use(device, library)
    results = []
    for name in ("diloco", "streaming", "eager", "eager_2"):
        pair = []
        for there in (here, torch.device("cpu")):
            replica = Replica(rank, there, on_nonfinite="skip", **METHODS[name])
            replica.steps(0, 5)
            spoil = replica.model.tensors[3]
            kept = spoil.detach().clone()
            if rank == 1:
                with torch.no_grad():
                    spoil.view(-1)[77].fill_(float("inf"))
            replica.steps(5, 8)
            with torch.no_grad():
                spoil.copy_(kept)
            replica.steps(8, 17)
            verdicts = [m.is_applied for m in replica.diloco.metrics()]
            assert name != "eager_2" or verdicts.count(False) == 1
            pair.append(([*replica.all()], verdicts))
            replica.diloco.close()
        results.append(equal(pair[0][0], pair[1][0]) and pair[0][1] == pair[1][1])
        assert not all(pair[0][1])
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_that_is_not_finite(device: str, replicas, stand_in) -> None:
    assert replicas(2).run(skipped_rounds, device, stand_in) == [[True] * 4] * 2


def lost_and_regrouped(rank: int, world: int, device: str, library: str) -> list[Any]:
    """The last replica leaves; the others lose a round and go on without it."""
    here = devices.use(device, library)
    results = []
    # When Eager learns of it depends on the network: only Blocking's state is that of the CPU.
    for name, there in (("diloco", here), ("diloco", torch.device("cpu")), ("eager", here)):
        store = dist.group.WORLD.get_group_store()
        store = dist.PrefixStore(f"{device}/{there.type}/{name}", store)
        members = {"store": store, "replica": rank, "num_replicas": world}
        replica = Replica(rank, there, **members, **METHODS[name])
        replica.steps(0, 6)
        if rank == world - 1:
            replica.diloco.close()
            continue
        with pytest.raises(SyncError):
            replica.steps(6, 12)
        replica.diloco.change_group(range(world - 1))
        replica.steps(12, 18)
        replica.diloco.flush()
        results.append(replica.diloco.outer_hash())
        replica.diloco.close()
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_survivors_of_a_failure(device: str, replicas, stand_in) -> None:
    first, second, _ = replicas(3).run(lost_and_regrouped, device, stand_in)
    assert first == second
    assert first[0] == first[1] != first[2]


def reduced(rank: int, world: int, device: str, library: str) -> bool:
    here = devices.use(device, library)
    results = []
    for there in (here, torch.device("cpu")):
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(10_007, generator=generator).to(there)
        for wire in ("int4", "fp16"):
            diloco_comm.all_reduce(tensor, wire=wire)
        with devices.no_host_wait(there):
            diloco_comm.all_reduce(tensor, wire="int4", weight=rank + 1.0)
            work = diloco_comm.all_reduce(tensor, wire="fp16", async_op=True)
            work.wait()
            mean = diloco_comm.all_reduce(tensor, wire="int8", out=torch.empty_like(tensor))
        results.append(torch.cat([tensor, mean]).cpu())
        diloco_comm.shutdown()
    return equal(results[:1], results[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_all_reduce_on_a_device(device: str, replicas, stand_in) -> None:
    assert replicas(3).run(reduced, device, stand_in) == [True] * 3


def raced(rank: int, world: int, device: str, library: str) -> list[bool]:
    """Train on a stream of the user's while another one keeps the device busy."""
    here = devices.use(device, library)
    load = torch.ones(1 << 20, device=here)
    side, busy = torch.Stream(here), torch.Stream(here)
    results = []
    for name in ("streaming", "eager"):
        expected = Replica(rank, torch.device("cpu"), **METHODS[name])
        expected.steps(0, 14)
        torch.accelerator.synchronize()
        with current(side):
            given = Replica(rank, here, checks=True, **METHODS[name])
            for step in range(14):
                with current(busy):
                    for _ in range(1 + (step + rank) % 3):
                        load.mul_(1.0)
                given.steps(step, step + 1)
            results.append(equal(expected.all(), given.all()))
        for replica in (expected, given):
            replica.diloco.close()
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_a_stream_of_the_user_s_under_load(device: str, replicas, stand_in) -> None:
    assert replicas(2).run(raced, device, stand_in) == [[True, True]] * 2


def seen_by_the_stand_in(rank: int, world: int, library: str) -> list[str]:
    """The stand-in tells when the host waits, and is late when nobody waits."""
    here = devices.use("lagging", library)
    lagging = torch.ops.lagging
    seen = []
    for what in (lambda: torch.ones(3, device=here).sum().item(), torch.accelerator.synchronize):
        try:
            with devices.no_host_wait(here):
                what()
        except AssertionError as error:
            seen.append(str(error))
    lagging.set_lag(50_000)
    zeros = torch.zeros(1000, pin_memory=True)
    ones = torch.ones(1000, device=here)
    side = torch.Stream(here)
    early = zeros.copy_(ones, non_blocking=True).sum().item()
    torch.accelerator.synchronize()
    late = zeros.sum().item()
    lagging.set_lag(devices.LAG_US)
    assert side != torch.accelerator.current_stream()
    return [*seen, f"{early} {late}"]


@devices.synchronizes_stand_in
def test_the_stand_in_tells_of_waits(replicas, stand_in) -> None:
    [(item, device, values)] = replicas(1).run(seen_by_the_stand_in, stand_in)
    assert "_local_scalar_dense" in item or "copy out" in item, item
    assert "synchronizeDevice" in device, device
    assert values == "0.0 1000.0"


def offloaded(
    rank: int,
    world: int,
    device: str,
    library: str,
    names: list[str],
    shapes: tuple[tuple[int, ...], ...] = device_training.SHAPES,
    num_steps: int = 13,
    **options: Any,
) -> list[str]:
    """Outer state in host memory, in chunks of a few thousand elements; the names that differ."""
    here = devices.use(device, library)
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.chunks_of, "__defaults__", (4096,))
        patch.setattr(device_training, "SHAPES", shapes)
        for name in names:
            arguments = {**METHODS[name], **options}
            expected = train(rank, torch.device("cpu"), num_steps, **{**arguments, "impl": ""})
            arguments["offload"] = "cpu"
            given = train(rank, here, num_steps, checks=name != "co2", **arguments)
            wrong += [] if equal(expected, given) else [name]
    return wrong


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_state_gives_the_same_bits(device: str, replicas, stand_in) -> None:
    names = ["diloco", "streaming", "eager", "co2", "adam", "fedavg"]
    assert replicas(2).run(offloaded, device, stand_in, names) == [[], []]


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_state_that_is_sent_in_pieces(device: str, replicas, stand_in) -> None:
    """More elements than the engine has brought to the device at a time."""
    options = {"shapes": (((4 << 20) + 99_991,), (7, 3)), "num_steps": 5, "chunk_bytes": 1 << 20}
    crew = replicas(2)
    assert crew.run(offloaded, device, stand_in, ["diloco"], **options) == [[], []]


@pytest.mark.nightly(
    "5 s each in the interpreter; they differ in the optimizer", but=["diloco-lagging"]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["diloco", "eager", "adam"])
def test_offloaded_state_with_triton_s_kernels(device: str, name: str, replicas, stand_in) -> None:
    """A driver refuses pointers into memory that it does not know, and so does the stand-in."""
    pytest.importorskip("triton", reason="needs Triton")
    shapes = ((33, 65), (7,), (3001,), (0, 3), (255,))
    options = {"shapes": shapes, "num_steps": 6, "impl": "triton"}
    assert replicas(2).run(offloaded, device, stand_in, [name], **options) == [[], []]


def where_the_state_is(rank: int, world: int, device: str, library: str) -> list[Any]:
    here = devices.use(device, library)
    replica = Replica(rank, here, offload="cpu", **METHODS["diloco"])
    replica.steps(0, 5)
    [part] = replica.diloco.parts
    kept = [part.outer, *part.state.tensors().values()]
    places = [(tensor.device.type, tensor.is_pinned()) for tensor in kept]
    replica.diloco.close()
    with pytest.raises(ValueError, match="goes with SGD, HeavyBall, Nesterov and Adam"):
        Replica(rank, here, offload="cpu", outer=lambda params: torch.optim.SGD(params, lr=1.0))
    return places


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_state_is_page_locked(device: str, replicas, stand_in) -> None:
    [places] = replicas(1).run(where_the_state_is, device, stand_in)
    assert places == [("cpu", True)] * 2


def test_offload_needs_a_device() -> None:
    with pytest.raises(ValueError, match="parameters on a GPU"):
        Replica(0, torch.device("cpu"), offload="cpu")
    with pytest.raises(ValueError, match=r"offload must be one of None, cpu, got 'disk'"):
        Replica(0, torch.device("cpu"), offload="disk")


def replayed(device: torch.device) -> list[torch.Tensor]:
    """Capture encode and outer step, run them three times, the last time voted down."""
    layout = Layout.plan(10_007, 2, 2, WireFormat("int8", 64))
    count, form = layout.num_elements, (layout.run_elements, "int8", 64)
    generator = torch.Generator().manual_seed(0)
    param, kept, momentum = (torch.randn(count, generator=generator) for _ in range(3))
    param, kept, momentum = (t.to(device) for t in (param, kept, momentum))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=device)
    bad, verdict = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    terms: Any = ([payload], [1.0], 0, count, *form)

    def work() -> None:
        ops.encode(kept, [param], payload, 0, count, *form, nonfinite=bad)
        ops.outer_step(kept, momentum, [param], *terms, "nesterov", 0.7, mu=0.9, verdict=verdict)

    work()
    replay = devices.capture(work, device)
    replay()
    param.add_(1.0)
    replay()
    verdict.fill_(1)
    param.add_(1.0)
    replay()
    return [t.cpu() for t in (param, kept, momentum, payload, bad)]


def captured(rank: int, world: int, device: str, library: str) -> bool:
    """Encode and outer step wait for nothing and allocate nothing; on a GPU they are captured."""
    return equal(replayed(devices.use(device, library)), replayed(torch.device("cpu")))


@pytest.mark.parametrize("device", DEVICES)
def test_encode_and_outer_step_can_be_captured(device: str, replicas, stand_in) -> None:
    assert replicas(1).run(captured, device, stand_in) == [True]


def on_the_second_device(rank: int, world: int, library: str) -> list[Any]:
    """Train on device 1 of two; whether the bits are right, and the devices that the engine set."""
    here = devices.use("lagging", library, 1)
    expected = train(rank, torch.device("cpu"), 9, **METHODS["streaming"])
    with torch.accelerator.device_index(1):
        torch.ops.lagging.set_devices()
        given = train(rank, here, 9, **METHODS["streaming"])
        taken = torch.ops.lagging.set_devices()
    engine = {device for device in taken if "diloco-engine" in device}
    return [equal(expected, given), sorted(engine)]


def test_the_engine_stays_off_other_devices(replicas, stand_in) -> None:
    """A thread begins on device 0; on a GPU, going back to it makes a context there."""
    results = replicas(2).run(on_the_second_device, stand_in)
    assert results == [[True, ["1 in diloco-engine"]]] * 2
