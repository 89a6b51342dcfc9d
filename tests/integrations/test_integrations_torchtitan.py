"""The context manager for torchtitan: its names, and the run that they describe."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from problems import batch
from trainers import NUM_STEPS, WithLoss, flat, make_optimizer, plain_loop

from diloco_comm import SGD, Blocking, Nesterov, Streaming
from diloco_comm.integrations.torchtitan import diloco_arguments, semi_sync_training

ON = {"enable": True, "semi_sync_method": "diloco"}


@dataclasses.dataclass
class FaultTolerance:
    """The section ``fault_tolerance`` of torchtitan 0.3.0."""

    enable: bool = True
    process_group: str = "gloo"
    process_group_timeout_ms: int = 10000
    replica_id: int = 0
    group_size: int = 0
    min_replica_size: int = 1
    semi_sync_method: str | None = "diloco"
    sync_steps: int = 4
    should_quantize: bool = True
    fragment_sync_delay: int = 1
    fragment_update_alpha: float = 0.5
    module_fqns_per_model_fragment: list[list[str]] = dataclasses.field(default_factory=list)
    num_fragments: int = 2


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON types, to compare them."""
    shown = {k: v.config() if hasattr(v, "config") else v for k, v in arguments.items()}
    return shown


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        (
            {"sync_steps": 20},
            {
                "sync_every": 20,
                "wire": "fp32",
                "outer": Nesterov(0.7, 0.9),
                "overlap": Blocking(),
                "fragments": 1,
            },
        ),
        (
            FaultTolerance(),
            {
                "sync_every": 4,
                "wire": "int8",
                "outer": Nesterov(0.7, 0.9),
                "overlap": Streaming(delay=1, alpha=0.5),
                "fragments": 2,
            },
        ),
        (
            {"module_fqns_per_model_fragment": [["tok", "layers.0"], ["layers.1", "norm"]]},
            {
                "sync_every": 5,
                "wire": "fp32",
                "outer": Nesterov(0.7, 0.9),
                "overlap": Blocking(),
                "fragments": [["tok.*", "layers.0.*"], ["layers.1.*", "norm.*"]],
            },
        ),
        (
            {"semi_sync_method": "local_sgd", "should_quantize": True},
            {"sync_every": 5, "wire": "int8", "outer": SGD(1.0)},
        ),
    ],
)
def test_names_of_the_section(section: Any, arguments: dict[str, Any]) -> None:
    given = section if dataclasses.is_dataclass(section) else {**ON, **section}
    assert plain(diloco_arguments(given)) == plain(arguments)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"semi_sync_method": "fedavg"}, "must be 'diloco' or 'local_sgd', got 'fedavg'"),
        ({"sync_step": 3}, "fault_tolerance has no sync_step"),
    ],
)
def test_what_the_section_cannot_say(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        diloco_arguments({**ON, **section})


@pytest.mark.parametrize("section", [{}, {"enable": True}, {"semi_sync_method": "diloco"}])
def test_nothing_happens_unless_asked(section: dict[str, Any]) -> None:
    model = WithLoss()
    optimizer = make_optimizer(model)
    with semi_sync_training(section, [model], optimizer) as diloco:
        assert diloco is None
    assert not optimizer._optimizer_step_post_hooks


class Container:
    """Like torchtitan's ``OptimizersContainer``, which steps several optimizers without a hook."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def train(rank: int, world: int) -> list[bool]:
    model = WithLoss(rank)
    optimizers = Container(make_optimizer(model.net.layers), make_optimizer(model.net.norm))
    optimizers.optimizers[1].add_param_group({"params": list(model.net.head.parameters())})
    with semi_sync_training(FaultTolerance(), [model], optimizers) as diloco:
        for step in range(NUM_STEPS):
            x, y = batch(rank, step)
            model(x, y)["loss"].backward()
            optimizers.step()
            model.zero_grad()
        assert diloco.inner_step == NUM_STEPS
    # The end of the block has shared the last steps.
    expected = plain_loop(WithLoss(rank), rank, diloco_arguments(FaultTolerance()))
    return [torch.equal(flat(model), expected[-1]), not torch.equal(expected[-1], expected[0])]


def test_the_run_is_that_of_the_arguments(workers) -> None:
    assert workers(2).run(train) == [[True, True]] * 2


def test_the_call_of_torchtitan() -> None:
    """As torchtitan 0.3.0 calls ``maybe_semi_sync_training``, with all its names."""
    model = WithLoss()
    optimizers = Container(make_optimizer(model))
    call = {"ft_manager": None, "model": model, "n_layers": 4, "optimizer": optimizers}
    with semi_sync_training(FaultTolerance(), fragment_fn=None, **call) as diloco:
        assert diloco is not None and diloco.settings.sync_every == 4
    with (
        pytest.raises(TypeError, match="takes one of optimizers and optimizer"),
        semi_sync_training(FaultTolerance(), model),
    ):
        pass
    with (
        pytest.raises(TypeError, match="has no argument 'sync_evry': did you mean 'sync_every'"),
        semi_sync_training(FaultTolerance(), model, optimizers, sync_evry=3),
    ):
        pass


def test_a_pipeline_is_refused() -> None:
    model = WithLoss()
    stages = [model.net.layers, model.net.head]
    with (
        pytest.raises(ValueError, match="a model in 2 pipeline stages is not supported"),
        semi_sync_training(ON, stages, make_optimizer(model)),
    ):
        pass


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
def test_torchtitans_own_classes() -> None:
    from torchtitan.components.optimizer import OptimizersContainer, default_adamw
    from torchtitan.experiments.torchft.config import FaultTolerance as Real

    names = {field.name for field in dataclasses.fields(Real)}
    assert names == {field.name for field in dataclasses.fields(FaultTolerance)}
    model = WithLoss()
    container: OptimizersContainer = default_adamw(lr=0.01).build(model_parts=[model])
    section = Real(enable=True, semi_sync_method="diloco", sync_steps=2)
    with semi_sync_training(section, [model], container) as diloco:
        for step in range(4):
            x, y = batch(0, step)
            model(x, y)["loss"].backward()
            container.step()
            container.zero_grad()
        assert diloco.inner_step == 4
        assert [metrics.round for metrics in diloco.metrics()] == [0, 1]
