"""Which parameters travel together, and when."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import nn

from diloco_comm.base.memory import memory_order
from diloco_comm.replica.fragments import (
    Schedule,
    describe_parameters,
    layout_hash,
    make_fragments,
    trainable_parameters,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )


class Transformer(nn.Module):
    """Seven blocks, an embedding tied to the head, a final norm."""

    def __init__(self, num_layers: int = 7, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def cut(model: nn.Module, spec: object, **kwargs: object) -> list[list[str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fragments = make_fragments(model, trainable_parameters(model, [optimizer]), spec)  # type: ignore[arg-type]
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))
    return [list(fragment.names) for fragment in fragments]


def layers_in(names: list[str]) -> list[int]:
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})


# --------------------------------------------------------------------------- parameters


def test_tied_weight_counts_once_under_its_first_name() -> None:
    model = Transformer()
    named = trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    names = [name for name, _ in named]
    assert "embedding.weight" in names and "head.weight" not in names
    assert len(named) == len(list(model.parameters()))


def test_optimizer_decides_model_orders() -> None:
    model = Transformer()
    for param in model.layers.parameters():
        param.requires_grad_(False)
    model.layers[2].attention.weight.requires_grad_(True)
    first = torch.optim.SGD([model.norm.weight, model.layers[2].attention.weight], lr=0.1)
    second = torch.optim.SGD([*model.layers[0].parameters(), model.embedding.weight], lr=0.1)
    names = [name for name, _ in trainable_parameters(model, [first, second])]
    assert names == ["embedding.weight", "layers.2.attention.weight", "norm.weight"]


@pytest.mark.nightly("8 s; test_diloco_parameters trains a compiled model")
def test_names_do_not_show_wrappers() -> None:
    model = Transformer(num_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = [name for name, _ in trainable_parameters(model, [optimizer])]
    whole = torch.compile(model)
    assert [name for name, _ in trainable_parameters(whole, [optimizer])] == plain
    model.layers[1] = torch.compile(model.layers[1])
    assert [name for name, _ in trainable_parameters(model, [optimizer])] == plain


def test_foreign_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 parameters that the model does not have.*\(5,\)"):
        trainable_parameters(
            nn.Linear(2, 2), [torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)]
        )
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        trainable_parameters(frozen, [torch.optim.SGD(frozen.parameters(), lr=0.1)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameter_that_is_no_float_is_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    with pytest.raises(TypeError, match=f"parameter 'weight' is {dtype}"):
        trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_parameter_on_another_device_is_refused() -> None:
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(TypeError, match=r"^parameter 'weight' is on meta: only .* CPU memory"):
        trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_parameter_with_gaps_is_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4)[:, :2])
    with pytest.raises(TypeError, match=r"'weight' of shape .* gaps or overlaps"):
        trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_views_follow_the_parameters_memory_order() -> None:
    model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
    named = trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    (fragment,) = make_fragments(model, named, 1)
    flat = torch.cat([memory_order(tensor) for tensor in fragment.tensors()])
    views = fragment.views(flat)
    assert torch.equal(views["weight"], model.weight) and torch.equal(views["bias"], model.bias)
    views["weight"].zero_()
    assert flat[: model.weight.numel()].abs().sum() == 0


# ---------------------------------------------------------------------------- fragments


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 5, 8])
def test_number_gives_contiguous_balanced_fragments(num_fragments: int) -> None:
    torch.manual_seed(num_fragments)
    sizes = torch.randint(0, 50, (23,)).tolist()
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    parts = cut(model, num_fragments)
    assert [int(name) for part in parts for name in part] == list(range(23))
    loads = [sum(sizes[int(name)] for name in part) for part in parts]
    assert len(parts) == num_fragments
    assert max(loads) <= sum(sizes) / num_fragments + max(sizes)


@pytest.mark.parametrize("bad", [0, -1, 3])
def test_number_outside_the_range_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and the number of parameters 2, got {bad}"):
        cut(nn.Linear(2, 2), bad)


def test_strided_and_sequential_layers() -> None:
    model = Transformer(num_layers=7)
    strided, sequential = cut(model, "layers:3"), cut(model, "sequential:3")
    assert [layers_in(part) for part in strided] == [[0, 3, 6], [1, 4], [2, 5], []]
    assert [layers_in(part) for part in sequential] == [[0, 1, 2], [3, 4, 5], [6], []]
    rest = ["embedding.weight", "norm.weight", "norm.bias"]
    assert strided[-1] == rest and sequential[-1] == rest


def test_layers_of_encoder_and_decoder_count_on() -> None:
    model = nn.Module()
    model.encoder = nn.Sequential(*[Block(2) for _ in range(3)])
    model.decoder = nn.ModuleList([Block(2) for _ in range(2)])
    model.classifier = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    parts = cut(model, "sequential:2")
    roots = [sorted({".".join(name.split(".")[:2]) for name in part}) for part in parts]
    assert roots == [
        ["encoder.0", "encoder.1"],
        ["decoder.0", "encoder.2"],
        ["decoder.1"],
        ["classifier.0", "classifier.2"],
    ]


def test_only_trained_layers_count() -> None:
    model = Transformer(num_layers=6)
    for layer in model.layers[:4]:
        layer.requires_grad_(False)
    assert [layers_in(part) for part in cut(model, "layers:1")] == [[4], [5], []]


@pytest.mark.parametrize("spec", ["layers", "layers:0", "layers:x", "layers:²", "strided:3", ""])
def test_unknown_scheme_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="unknown fragments"):
        cut(Transformer(), spec)


def test_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="found no list of layers of one class in Linear"):
        cut(nn.Linear(2, 2), "layers:3")


def test_patterns_with_rest() -> None:
    parts = cut(Transformer(num_layers=2), ["layers.0.*", "rest", ["layers.1.*", "norm.*"]])
    assert [layers_in(part) for part in parts] == [[0], [], [1]]
    assert parts[1] == ["embedding.weight"]
    assert "norm.bias" in parts[2]


def test_patterns_must_match_exactly_once() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'bias' is matched by no fragment"):
        cut(model, ["weight"])
    with pytest.raises(ValueError, match=r"'weight' is matched by fragments \[0, 1\]"):
        cut(model, ["weight", "*"])
    with pytest.raises(ValueError, match=r"fragment 1 with patterns \['gone'\] matches nothing"):
        cut(model, ["*", "gone"])
    with pytest.raises(ValueError, match="at most one 'rest'"):
        cut(model, ["rest", "rest"])


@pytest.mark.parametrize("bad", [1.5, True, [1, 2], [["weight", 1]], b"layers:3", None])
def test_a_specification_of_another_type_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="fragments must be a number, a string or patterns, got"):
        cut(nn.Linear(2, 2), bad)


# ----------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(("sync_every", "num"), [(1, 1), (1, 3), (7, 3), (10, 4), (4, 8)])
def test_default_schedule_sends_all_once_by_step_h(sync_every: int, num: int) -> None:
    schedule = Schedule.plan(sync_every, num)
    sent = [schedule.due(step) for step in range(1, 3 * sync_every + 1)]
    for begin in range(0, 3 * sync_every, sync_every):
        assert sorted(chain.from_iterable(sent[begin : begin + sync_every])) == list(range(num))
    assert num - 1 in schedule.due(sync_every)


def test_offsets_are_the_first_send_and_repeat_every_h() -> None:
    schedule = Schedule.plan(4, 2, [4, 2])
    due = {step: schedule.due(step) for step in range(1, 13) if schedule.due(step)}
    assert due == {2: [1], 4: [0], 6: [1], 8: [0], 10: [1], 12: [0]}
    assert Schedule.plan(100, 4).offsets == (25, 50, 75, 100)


@pytest.mark.parametrize("offsets", [[1], [4, 2], [8, 3, 5]])
def test_the_next_send_is_the_first_that_is_due(offsets: list[int]) -> None:
    schedule = Schedule.plan(4, len(offsets), offsets)
    for step in range(-3, 20):
        first = next(later for later in range(step + 1, 40) if schedule.due(later))
        assert schedule.next(step) == first


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, "10"])
def test_sync_every_below_one_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="sync_every must be an integer of at least 1, got"):
        Schedule.plan(bad, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [[1.5, 2], ["1", 2], [True, 2]])
def test_offsets_that_are_no_integers_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="each of offsets must be an integer, got"):
        Schedule.plan(4, 2, offsets)


@pytest.mark.parametrize("offsets", [1, "12"])
def test_offsets_that_are_no_list_are_refused(offsets: list[int]) -> None:
    with pytest.raises(TypeError, match="offsets must be a list of inner steps, got"):
        Schedule.plan(4, 2, offsets)


@pytest.mark.parametrize("offsets", [[1], [0, 4], [1, 9], [1, 2, 3]])
def test_offsets_outside_two_rounds_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"offsets must be 2 inner steps between 1 and 2\*sync_"):
        Schedule.plan(4, 2, offsets)


def test_layout_hash_sees_every_difference() -> None:
    def hash_of(model: nn.Module, spec: object = 1, sync_every: int = 8, offset: int = 8) -> int:
        named = trainable_parameters(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        fragments = make_fragments(model, named, spec)  # type: ignore[arg-type]
        offsets = [offset] * len(fragments)
        assert len(describe_parameters(fragments)) == len(named)
        return layout_hash(fragments, Schedule.plan(sync_every, len(fragments), offsets))

    model = nn.Linear(6, 4)
    transposed = nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.zeros(6, 4).T)
    hashes = [
        hash_of(model),
        hash_of(nn.Linear(4, 6)),
        hash_of(nn.Linear(6, 4, bias=False)),
        hash_of(nn.Linear(6, 4).bfloat16()),
        hash_of(nn.Sequential(nn.Linear(6, 4))),
        hash_of(transposed),
        hash_of(model, 2),
        hash_of(model, 1, 9),
        hash_of(model, 1, 8, 7),
    ]
    assert len(set(hashes)) == len(hashes) and all(0 <= h < 2**63 for h in hashes)
    assert hash_of(nn.Linear(6, 4)) == hashes[0]
