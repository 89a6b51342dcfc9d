"""The groups of options: the same training in every spelling, and errors that name the choice."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from diloco_comm.integrations.attaching import (
    all_named,
    attach,
    check,
    choices_for,
    with_total_steps,
)
from diloco_comm.options import (
    HOMES,
    check_names,
    choices_among,
    choices_in,
    choices_of,
    grouped,
    with_defaults,
)
from diloco_comm.training.arguments import backend_of

KINDS = {"wire": Wire, "link": Link, "nonfinite": NonFinite, "peers": StorePeers}


def made(**arguments: Any) -> tuple[Regression, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    make = arguments.pop("make", DiLoCo)
    return model, optimizer, make(model, optimizer, **{"sync_every": 2, **arguments})


def test_every_choice_has_one_home() -> None:
    homes = [home for home in HOMES.values() if home[1]]
    fields = [
        (group, field.name) for group, kind in KINDS.items() for field in dataclasses.fields(kind)
    ]
    assert sorted([*homes, ("wire", "name")]) == sorted(fields)


WIRE = {"block_size": 64, "rounding": "stochastic", "seed": 5, "error_feedback": True}
LINK = {"lanes": 2, "chunk_bytes": 512, "timeout": 60.0, "suspect_after": 20.0}
BAD = {"max_skipped": None}
SPELLINGS: list[dict[str, Any]] = [
    {"wire": "int4", **WIRE, **LINK, "on_nonfinite": "skip", **BAD},
    {"wire": Wire("int4", **WIRE), "link": Link(**LINK), "nonfinite": NonFinite("skip", **BAD)},
    {"wire": Wire("int4", seed=5), **{**WIRE, "seed": None}, "link": Link(lanes=2),
     **{name: LINK[name] for name in LINK if name != "lanes"}, "nonfinite": "skip", **BAD},
]  # fmt: skip


def trained(rank: int, world: int) -> list[tuple[str, dict[str, Any]]]:
    mesh = init_device_mesh("cpu", (world,))
    store = dist.distributed_c10d._get_default_store()
    peers: list[dict[str, Any]] = [
        {},
        {"peers": dist.group.WORLD},
        {"group": dist.group.WORLD},
        {"peers": mesh},
        {"peers": StorePeers(store, rank, of=world, name="a")},
        {"peers": StorePeers(store, rank, members=list(range(world)), name="b")},
        {"peers": StorePeers(store, of=world), "replica": rank, "name": "c"},
    ]
    found = []
    runs = [(spelling, peers[0]) for spelling in SPELLINGS]
    runs += [(SPELLINGS[1], place) for place in peers[1:]]
    for spelling, place in runs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model, optimizer, diloco = made(**{**spelling, **place})
        with diloco:
            for step in range(5):
                train_step(model, optimizer, rank, step)
            diloco.flush()
            found.append((diloco.outer_hash(), diloco.config()))
    return found


def test_every_spelling_is_the_same_training(workers) -> None:
    results = [result for found in workers(2).run(trained) for result in found]
    assert len(results) == 2 * (len(SPELLINGS) + 6)
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


STORE = dist.HashStore()
# Names of 0.1, and the two lines that the warning shows.
OLD: list[tuple[Any, dict[str, Any], str, str]] = [
    (DiLoCo, {"block_size": 64, "lanes": 4}, "DiLoCo(block_size=64, lanes=4)",
     "DiLoCo(wire=Wire(block_size=64), link=Link(lanes=4))"),
    (DiLoCo, {"wire": "int4", "seed": 3, "on_nonfinite": "skip"},
     'DiLoCo(seed=3, on_nonfinite="skip", wire="int4")',
     'DiLoCo(wire=Wire("int4", seed=3), nonfinite="skip")'),
    (DiLoCo, {"store": STORE, "replica": 0, "num_replicas": 1, "backend": "gloo"},
     'DiLoCo(store=store, replica=0, num_replicas=1, backend="gloo")',
     'DiLoCo(peers=StorePeers(store, replica=0, of=1), link="gloo")'),
    (DiLoCo, {"on_nonfinite": "reset", "on_reset": print, "max_skipped": None},
     'DiLoCo(on_nonfinite="reset", on_reset=on_reset, max_skipped=None)',
     'DiLoCo(nonfinite=NonFinite("reset", max_skipped=None, on_reset=on_reset))'),
    (DiLoCo, {"mesh": None, "num_replicas": 1}, "DiLoCo(mesh=None, num_replicas=1)",
     'DiLoCo(peers="alone")'),
    (eager_diloco, {"align_tensors": True}, "eager_diloco(align_tensors=True)",
     "eager_diloco(wire=Wire(align_tensors=True))"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "arguments", "before", "after"), OLD)
def test_an_old_name_warns_once_with_the_new_line(
    make: Any, arguments: dict[str, Any], before: str, after: str
) -> None:
    with pytest.warns(DeprecationWarning) as caught:
        *_, diloco = made(make=make, **arguments)
    diloco.close()
    sentence = f"{before} is written {after} since 0.2; the old names end with 0.3"
    assert [str(one.message) for one in caught] == [sentence]
    assert caught[0].filename == __file__
    *_, again = made(make=make, **grouped(arguments))
    again.close()
    assert again.config() == diloco.config()


@pytest.mark.parametrize("make", [AsyncDiLoCo, DecoupledDiLoCo])
def test_old_names_of_asynchronous_training_warn(make: Any) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentence = (
        r"\(seed=3, timeout=9.0\) is written .*\(wire=Wire\(seed=3\), link=Link\(timeout=9.0\)\)"
    )
    with pytest.warns(DeprecationWarning, match=make.__name__ + sentence):
        with pytest.raises(ValueError, match="address"):
            make(model, optimizer, server="nowhere", name="a", seed=3, timeout=9.0)


def test_old_names_of_a_callback_warn_when_it_is_made() -> None:
    class Callback:
        def __init__(self, make: Any, **arguments: Any) -> None:
            self.arguments = check(Callback, make, arguments)

    make = functools.partial(DiLoCo, sync_every=4, seed=3, lanes=2)
    with pytest.warns(DeprecationWarning, match="Callback") as caught:
        arguments = Callback(make, seed=5, timeout=60.0).arguments
    assert len(caught) == 1
    assert arguments == {
        "sync_every": 4,
        "wire": Wire(seed=5),
        "link": Link(lanes=2, timeout=60.0),
    }
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(make, model, optimizer, {**arguments, "peers": "alone"}) as diloco:
        assert diloco.config()["seed"] == 5 and diloco.config()["lanes"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"group": "x"}, TypeError, "group must be a process group of torch.distributed"),
        ({"mesh": "x"}, TypeError, "mesh must be a DeviceMesh"),
        ({"replica": 1}, ValueError, "replica, num_replicas and members need store="),
        ({"membership": 3}, TypeError, "peers must be a ProcessGroup"),
        ({"membership": Elastic("tcp://h:1"), "replica": 1}, ValueError, "leave out replica"),
    ],
)
def test_old_names_are_checked_as_before(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(error, match=message):
        made(**arguments)


def test_a_choice_is_not_given_twice() -> None:
    with pytest.raises(TypeError, match="seed is given twice: in wire= and as seed="):
        grouped({"wire": Wire(seed=3), "seed": 4})


def test_a_configuration_has_old_names_or_groups() -> None:
    """Neither warns: 0.1 reads what this version saves, and a file may be written by hand."""
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
        ({"wire": Wire("int4", block_size=64), "block_size": 32}, TypeError, "block_size twice"),
        ({"link": Link(lanes=2), "lanes": 2}, TypeError, "lanes twice: in link= and as lanes="),
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
        (
            {"lane": 2},
            TypeError,
            "no argument 'lane': did you mean link=Link",
        ),
    ],
)
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
    check_names(Callback, {"peers": None, "lanes": 2}, all_named())
    with pytest.raises(TypeError, match="did you mean 'peers'"):
        check_names(Callback, {"peer": None}, all_named())


@pytest.mark.parametrize("name", ["peers", "membership"])
def test_the_trainer_s_steps_end_an_elastic_run(name: str) -> None:
    elastic = Elastic("tcp://127.0.0.1:1")
    assert with_total_steps({name: elastic}, 7)[name].total_steps == 7
    assert with_total_steps({name: elastic}, 0)[name] is elastic


def test_every_spelling_makes_the_same_choices() -> None:
    """Also those that no configuration shows."""
    more = {"join_timeout": 9.0, "backend": "tcp", "listen": "h:1", "advertise": "g:2"}
    old = {"wire": "int4", **WIRE, **LINK, **more, "on_nonfinite": "reset", "on_reset": print}
    old["link_keys"] = "k"
    groups = {"wire": Wire("int4", **WIRE), "link": Link(**LINK, **more, keys="k")}
    new = {**groups, "nonfinite": NonFinite("reset", on_reset=print)}
    assert choices_of(old) == choices_of(new) and choices_of(new)["on_reset"] is print
    place = StorePeers("tcp://h:1", 1, members=[1, 2], name="x")
    told = {"store": "tcp://h:1", "replica": 1, "members": [1, 2], "name": "x"}
    assert choices_of({"peers": place}) == choices_of(told)


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
