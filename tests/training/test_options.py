"""The groups of options: the same training in every spelling, and errors that name the choice."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import KINDS, grouped
from problems import Regression, train_step
from torch.distributed.device_mesh import init_device_mesh

from diloco_comm import (
    DiLoCo,
    Elastic,
    Link,
    NonFinite,
    StorePeers,
    Wire,
    WireFormat,
    eager_diloco,
    local_sgd,
)
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo
from diloco_comm.integrations.attachment import attach, check, choices_for, with_total_steps
from diloco_comm.methods.settings import Settings
from diloco_comm.options import DEFAULTS, choices_among, choices_in, choices_of, with_defaults
from diloco_comm.training.arguments import Arguments, backend_of


def made(**arguments: Any) -> tuple[Regression, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    make = arguments.pop("make", DiLoCo)
    return model, optimizer, make(model, optimizer, **{"sync_every": 2, **arguments})


def test_every_choice_has_a_name_of_its_own() -> None:
    choices = [field for kind in KINDS.values() for field in dataclasses.fields(kind)]
    assert len(DEFAULTS) == len(choices) + len(("group", "mesh", "membership"))


def test_the_signature_has_the_defaults_that_are_used() -> None:
    """``Arguments``, for functions that pass arguments on, has all of them."""
    parameters = inspect.signature(DiLoCo).parameters
    assert parameters["sync_every"].default is inspect.Parameter.empty
    assert parameters.keys() - {"model", "optimizer"} == Arguments.__optional_keys__
    names = [field.name for field in dataclasses.fields(Settings) if field.name in parameters]
    told = {name: parameters[name].default for name in names if name != "sync_every"}
    assert len(told) == 6
    assert Settings(4, **told).shared() == Settings(4).shared()


WIRE = {"block_size": 64, "rounding": "stochastic", "seed": 5, "error_feedback": True}
LINK = {"lanes": 2, "chunk_bytes": 512, "timeout": 60.0, "suspect_after": 20.0}
BAD = {"max_skipped": None}
FLAT = {"wire": "int4", **WIRE, **LINK, "on_nonfinite": "skip", **BAD}
SAVED = {"wire": {"name": "int4", **WIRE}, "lanes": 2, "chunk_bytes": 512, "nonfinite": "skip"}
SPELLINGS: list[dict[str, Any]] = [
    grouped(FLAT),
    {"wire": Wire("int4", **WIRE), "link": Link(**LINK), "nonfinite": NonFinite("skip", **BAD)},
    {"config": {**SAVED, **BAD}, "link": Link(timeout=60.0, suspect_after=20.0)},
    {"config": {**SAVED, "wire": {"name": "int4", **WIRE, "seed": 4}}, "wire": Wire(seed=5),
     "link": Link(timeout=60.0), "nonfinite": NonFinite(**BAD)},
]  # fmt: skip


def trained(rank: int, world: int) -> list[tuple[str, dict[str, Any]]]:
    mesh = init_device_mesh("cpu", (world,))
    store = dist.distributed_c10d._get_default_store()
    peers: list[dict[str, Any]] = [
        {},
        {"peers": dist.group.WORLD},
        {"peers": mesh},
        {"peers": StorePeers(store, rank, of=world, name="a")},
        {"peers": StorePeers(store, rank, members=list(range(world)), name="b")},
        {"peers": StorePeers(store, rank, of=world), "name": "c"},
    ]
    found = []
    runs = [(spelling, peers[0]) for spelling in SPELLINGS]
    runs += [(SPELLINGS[1], place) for place in peers[1:]]
    for spelling, place in runs:
        model, optimizer, diloco = made(**spelling, **place)
        with diloco:
            for step in range(5):
                train_step(model, optimizer, rank, step)
            diloco.flush()
            found.append((diloco.outer_hash(), diloco.config()))
    return found


def test_every_spelling_is_the_same_training(workers) -> None:
    results = [result for found in workers(2).run(trained) for result in found]
    assert len(results) == 2 * (len(SPELLINGS) + 5)
    assert all(result == results[0] for result in results)
    assert results[0][1]["seed"] == 5 and results[0][1]["max_skipped"] is None


@pytest.mark.parametrize(
    ("link", "expected"),
    [(None, "tcp"), ("gloo", "gloo"), (Link(listen="127.0.0.1:0"), "tcp"), (Link("tcp"), "tcp")],
)
def test_jobs_that_meet_at_a_store_exchange_over_one_port(link: Any, expected: str) -> None:
    _, _, diloco = made(peers=StorePeers(dist.HashStore(), 0, of=1), link=link)
    with diloco:
        assert diloco.exchange.collectives == expected


def test_replicas_of_a_registry_exchange_over_one_port() -> None:
    chosen = choices_of({"peers": Elastic("tcp://127.0.0.1:1", run="a")}, "DiLoCo")
    assert backend_of(chosen) == "tcp"
    assert backend_of({**chosen, "backend": "gloo"}) == "gloo"
    assert backend_of({**chosen, "membership": None}) is None


def test_a_name_is_not_given_twice() -> None:
    with pytest.raises(TypeError, match="DiLoCo is given name twice: in peers= and as name="):
        made(peers=StorePeers(dist.HashStore(), 0, of=1, name="a"), name="b")


def test_a_callback_has_the_arguments_of_a_partial_function() -> None:
    class Callback:
        def __init__(self, make: Any, **arguments: Any) -> None:
            self.arguments = check(Callback, make, arguments)

    make = functools.partial(DiLoCo, sync_every=4, wire=Wire(seed=3), link=Link(lanes=2))
    arguments = Callback(make, wire=Wire("int4", seed=5)).arguments
    assert arguments == {"sync_every": 4, "wire": Wire("int4", seed=5), "link": Link(lanes=2)}
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(make, model, optimizer, {**arguments, "peers": "alone"}) as diloco:
        assert diloco.config()["seed"] == 5 and diloco.config()["lanes"] == 2


def test_a_configuration_has_single_choices_or_groups() -> None:
    """0.1 and 0.2 have saved single choices, as this version does; a hand may write groups."""
    old = {"sync_every": 2, "wire": "int4", "seed": 3, "lanes": 2, "max_skipped": None}
    new = {
        "sync_every": 2,
        "wire": {"name": "int4", "seed": 3},
        "link": {"lanes": 2},
        "nonfinite": {"max_skipped": None},
    }
    assert choices_in("config", new) == old
    assert choices_in("config", {"nonfinite": "skip"}) == {"on_nonfinite": "skip"}
    found = []
    for config in (old, new):
        *_, diloco = made(config=config, sync_every=None, peers="alone")
        diloco.close()
        found.append(diloco.config())
    assert found[0] == found[1] and found[0]["seed"] == 3 and found[0]["lanes"] == 2
    *_, diloco = made(config=found[0], sync_every=None, peers="alone")
    diloco.close()
    assert diloco.config() == found[0]
    patterns = {"sync_every": 2, "wire": {"bias": "int4", "rest": "int8"}}
    assert choices_in("config", patterns) == patterns
    with pytest.raises(ValueError, match="config has 'lane' in link, where only backend, lanes,"):
        choices_in("config", {"link": {"lane": 4}})
    with pytest.raises(ValueError, match="config has seed twice: in wire and beside it"):
        choices_in("config", {"wire": {"seed": 3}, "seed": 3})


@pytest.mark.parametrize("make", [local_sgd, eager_diloco])
def test_a_wire_without_a_name_keeps_the_preset_s(make: Any) -> None:
    for wire, name in ((Wire(align_tensors=True), None), (Wire("int4"), "int4")):
        *_, diloco = made(make=make, peers="alone", wire=wire)
        with diloco:
            own = {local_sgd: "fp32", eager_diloco: "e3m0"}[make]
            assert diloco.config()["wire"] == (name or own)
            assert diloco.config()["align_tensors"] == (name is None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wire": Wire("int4", block_size=63)}, ValueError, "block_size must be one of"),
        ({"wire": Wire("topk64")}, ValueError, "error_feedback"),
        ({"wire": 4}, TypeError, "wire must be a name, a WireFormat"),
        ({"link": 4}, TypeError, "link must be a Link or a string, got int"),
        ({"link": "udp"}, ValueError, "udp"),
        ({"link": Link(timeout=-1)}, ValueError, "timeout"),
        ({"link": Link(listen="0.0.0.0:1")}, ValueError, 'backend="tcp"'),
        (
            {"link": Link("gloo", advertise="")},
            ValueError,
            "advertise='' needs .*got backend='gloo'",
        ),
        ({"link": Link("tcp", listen="0.0.0.0")}, ValueError, "listen must be host:port with"),
        ({"link": Link(keys="keys")}, ValueError, "keys='keys' needs .*got no backend"),
        ({"link": Link("gloo", keys=Path("k"))}, ValueError, "keys='k' needs .*got backend='gloo'"),
        ({"link": Link("tcp", keys=4)}, TypeError, "keys must be a folder or a file .*got 4"),
        ({"link": Link("tcp", keys="/none")}, ValueError, "keys must be a folder or a file"),
        ({"nonfinite": ["skip"]}, TypeError, "nonfinite must be a NonFinite or a string"),
        ({"nonfinite": "ignore"}, ValueError, "ignore"),
        ({"nonfinite": NonFinite("skip", on_reset=print)}, ValueError, "on_reset"),
        ({"peers": 2}, TypeError, "peers must be a ProcessGroup, a DeviceMesh, StorePeers"),
        ({"peers": "tcp://host:1"}, TypeError, "peers must be a ProcessGroup"),
        ({"peers": StorePeers(dist.HashStore(), 4, of=2)}, ValueError, "replica"),
        ({"peers": StorePeers(dist.HashStore(), 0)}, ValueError, "StorePeers needs replica="),
        ({"lane": 2}, TypeError, "no argument 'lane': did you mean link=Link\\(lanes=...\\)"),
        ({"sync_evry": 2}, TypeError, "DiLoCo has no argument 'sync_evry': did you mean 'sync_ev"),
        ({"error_feedback": True}, TypeError,
         "error_feedback is a field of Wire: wire=Wire\\(error_feedback=True\\)"),
        ({"num_replicas": 2}, TypeError, "is a field of StorePeers: peers=StorePeers\\(of=2\\)"),
        ({"on_nonfinite": "skip"}, TypeError, "nonfinite=NonFinite\\(action='skip'\\)"),
        ({"on_reset": print}, TypeError, "nonfinite=NonFinite\\(on_reset=...\\)"),
        ({"proxy": "http://alice:secret@h:1"}, TypeError, "link=Link\\(proxy=...\\)$"),
        ({"group": "x"}, TypeError, "no argument 'group': give the group as peers=..."),
        ({"xyz": 2}, TypeError, "no argument 'xyz': it has model, optimizer, sync_every, frag"),
    ],
)  # fmt: skip
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**arguments)


def test_a_callback_checks_the_groups_when_it_is_made() -> None:
    class Callback:
        def __init__(self, **arguments: Any) -> None:
            self.arguments = check(Callback, DiLoCo, arguments)

    good = {"sync_every": 2, "wire": Wire("int4", block_size=64), "link": "gloo"}
    assert Callback(**good).arguments == good
    for arguments, message in (
        ({"wire": Wire("int4", block_size=63)}, "block_size must be"),
        ({"peers": StorePeers(dist.HashStore(), 5)}, "StorePeers needs replica="),
        ({"nonfinite": NonFinite("skip", on_reset=print)}, "on_reset"),
    ):
        with pytest.raises(ValueError, match=message):
            Callback(sync_every=2, **arguments)
    with pytest.raises(TypeError, match="Callback has no argument 'peer': did you mean 'peers'"):
        Callback(sync_every=2, peer=None)
    with pytest.raises(TypeError, match="lanes is a field of Link: link=Link\\(lanes=2\\)"):
        Callback(sync_every=2, lanes=2)
    with pytest.raises(TypeError, match="takes the trainer's own model: leave out model="):
        Callback(sync_every=2, model=None)


def test_the_trainer_s_steps_end_an_elastic_run() -> None:
    elastic = Elastic("tcp://127.0.0.1:1")
    assert with_total_steps({"peers": elastic}, 7)["peers"].total_steps == 7
    assert with_total_steps({"peers": elastic}, 0)["peers"] is elastic


def test_the_time_of_a_busy_replica_is_checked() -> None:
    registry = "tcp://127.0.0.1:1"
    assert Elastic(registry).busy_after == 120.0
    with pytest.raises(ValueError, match="busy_after must be positive, got 0"):
        Elastic(registry, busy_after=0)
    with pytest.raises(ValueError, match="busy_after must be finite"):
        Elastic(registry, busy_after=float("inf"))


@pytest.mark.parametrize("make", [AsyncDiLoCo, DecoupledDiLoCo])
def test_the_classes_of_asynchronous_training_name_the_nearest_argument(make: Any) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, message in (
        ({"seed": 3}, f"{make.__name__} has no argument 'seed': seed is a field of Wire: wire="),
        ({"timeout": 9.0}, r"timeout is a field of Link: link=Link\(timeout=9.0\)"),
        ({"serve": "tcp://h:1"}, "no argument 'serve': did you mean 'server'"),
    ):
        with pytest.raises(TypeError, match=message):
            make(model, optimizer, **given)


def test_a_wire_without_a_name_takes_the_default_s() -> None:
    for default in ("int4", Wire("int4", block_size=64)):
        wire = with_defaults({"wire": default}, {"wire": Wire(seed=3)})["wire"]
        assert (wire.name, wire.seed) == ("int4", 3)
    assert with_defaults({"wire": "int4"}, {"wire": "fp32", "x": 1}) == {"wire": "fp32", "x": 1}


def test_a_function_of_the_user_s_has_arguments_of_its_own() -> None:
    """Its ``link`` and ``peers`` are its own matter."""

    def make(model: Any, optimizer: Any, *, link: float, peers: list[int], **rest: Any) -> None: ...

    arguments = {"link": 0.5, "peers": [0, 1], "store": "tcp://h:1"}
    choices = choices_for(make, check(make, make, arguments))
    assert choices["store"] == "tcp://h:1" and choices["membership"] is choices["backend"] is None
    assert with_total_steps(arguments, 5) == arguments


def test_choices_by_their_own_names() -> None:
    choices = choices_of({"wire": Wire(WireFormat("int4", 32)), "link": "nccl", "sync_every": 4})
    assert choices["wire"] == WireFormat("int4", 32) and choices["backend"] == "nccl"
    assert choices["sync_every"] == 4 and choices["lanes"] is None and choices["name"] == "default"
    assert not KINDS.keys() - {"wire"} & choices.keys()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (AsyncDiLoCo, {"wire": Wire(feedback_decay=0.5)}, "no wire=Wire\\(feedback_decay=...\\)"),
        (AsyncDiLoCo, {"link": Link(lanes=2)}, "AsyncDiLoCo has no link=Link\\(lanes=...\\)"),
        (AsyncDiLoCo, {"nonfinite": NonFinite("skip", on_reset=print)}, "on_reset"),
        (DecoupledDiLoCo, {"wire": Wire("int4", block_size=64)}, "block_size"),
        (DecoupledDiLoCo, {"link": Link(backend="gloo")}, "backend"),
        (DecoupledDiLoCo, {"link": "tcp"}, "DecoupledDiLoCo has no link=Link\\(backend=...\\)"),
        (AsyncDiLoCo, {"link": Link(listen="h:1")}, "AsyncDiLoCo has no link=Link\\(listen=...\\)"),
    ],
)
def test_asynchronous_doors_refuse_choices_that_they_lack(
    make: Any, arguments: dict[str, Any], message: str
) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=message):
        make(model, optimizer, server="tcp://127.0.0.1:1", **arguments)
    defaults = {"wire": "int8", "seed": 0}
    assert choices_among("X", {"wire": Wire(seed=3)}, defaults) == {"wire": "int8", "seed": 3}
    assert choices_among("X", {"wire": "int4"}, defaults) == {"wire": "int4", "seed": 0}
