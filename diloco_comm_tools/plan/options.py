"""What ``diloco-comm plan`` and its sub-commands are asked: groups of options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.exits import misuse
from ..common.options import option, rare
from ..common.sizes import at_least, not_negative, parse_count

Layers = Annotated[int | None, option("Layers of the model.")]
Replicas = Annotated[int, option("Replicas.", "--replicas")]
Wire = Annotated[
    str | None,
    option(
        "Wire format (int8, or fp32 for dp); a named one is that of the settings chosen for "
        "--gbps, too. auto chooses among int4 and the rotated wires."
    ),
]
RttMs = Annotated[float, option("Round trip of the link, ms.")]
Gbps = Annotated[float | None, option("A link to look at, Gbit/s.")]
Target = Annotated[float, rare("Utilisation that settings for the link must reach.")]
Efficiency = Annotated[
    float | None,
    rare("Share of the link's rate that payloads get; by default as measured at that rate."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class Model:
    """The size of a model, as a number or in a file, and the time of its step."""

    params: Annotated[str | None, option("Parameters, such as 7B or 100e9.")] = None
    model_config: Annotated[
        Path | None, option("Hugging Face config.json to count parameters and layers in.")
    ] = None
    safetensors: Annotated[
        Path | None, option("Weights, or their .index.json, to count them in.")
    ] = None
    step_time: Annotated[
        float | None, option("Seconds of an inner step without communication.")
    ] = None

    def size(self, layers: int | None) -> tuple[float, int]:
        """Return the numbers of parameters and layers; numbers that are given win over files."""
        from .request import Size, from_config, from_safetensors

        if self.model_config is not None and self.safetensors is not None:
            misuse("--model-config and --safetensors exclude each other")
        counted, num_params = Size(0.0, 0), None
        try:
            if self.params is not None:
                num_params = parse_count("--params", self.params)
            if self.model_config is not None:
                counted = from_config(self.model_config)
            elif self.safetensors is not None:
                counted = from_safetensors(self.safetensors)
            elif num_params is None or layers is None:
                absent = ["--params"] * (num_params is None) + ["--layers"] * (layers is None)
                misuse(
                    f"{' and '.join(absent)} missing: the model's size is --params and --layers, "
                    "--model-config or --safetensors"
                )
        except UnicodeDecodeError:
            misuse(f"{self.model_config or self.safetensors} is not a text file")
        except ValueError as error:
            misuse(str(error))
        except OSError as error:
            misuse(f"cannot read {error.filename}: {error.strerror}")
        return (
            counted.num_params if num_params is None else num_params,
            counted.num_layers if layers is None else layers,
        )

    def seconds(self) -> float:
        """Return the time of a step."""
        if self.step_time is None:
            misuse("--step-time is missing: the seconds of an inner step without communication")
        return self.step_time


@dataclass(frozen=True)
class Run:
    """How replicas train and what they send."""

    replicas: Replicas = 2
    method: Annotated[str, option("dp, diloco, streaming, delayed, eager or co2.")] = "diloco"
    sync_every: Annotated[int, option("Inner steps between two sends (H).")] = 100
    wire: Wire = None
    rtt_ms: RttMs = 0.0
    fragment_layers: Annotated[
        int | None,
        rare(
            "Layers of a fragment, 0 for one fragment; 3 by default for streaming. dp and diloco "
            "send all at once."
        ),
    ] = None
    delay: Annotated[int, rare("Steps from send to apply, of streaming.")] = 1
    rounds: Annotated[int, rare("Sends to apply, of delayed, eager, co2.")] = 1
    block_size: Annotated[int, rare("Elements that share a scale.")] = 256
    bits: Annotated[float | None, rare("Bits sent for each parameter, instead of the wire's.")] = (
        None
    )
    efficiency: Efficiency = None

    def arguments(self, layers: int) -> dict[str, Any]:
        """Return the arguments of a ``Request`` for a model of so many layers."""
        of_fragment, wire = self.fragment_layers, self.wire
        if of_fragment is None:
            of_fragment = min(3, layers) if self.method == "streaming" else 0
        wire = wire or ("fp32" if self.method == "dp" else "int8")
        given = asdict(self) | {"fragment_layers": of_fragment, "wire": wire}
        return {"workers": given.pop("replicas"), **given}


@dataclass(frozen=True)
class Prices:
    """The price of traffic and machines, and the tokens of an inner step."""

    tokens_per_step: Annotated[
        int | None, rare("Tokens of one replica's inner step, for the prices.")
    ] = None
    egress_usd_per_gb: Annotated[float, rare("Price of 1e9 bytes that a replica sends.")] = 0.0
    gpu_usd_per_hour: Annotated[float, rare("Price of a GPU.")] = 0.0
    gpus: Annotated[
        int, rare("GPUs of a replica, for --gpu-usd-per-hour.", "--gpus-per-replica")
    ] = 1

    def __post_init__(self) -> None:
        tokens = 1 if self.tokens_per_step is None else self.tokens_per_step
        at_least(1, tokens_per_step=tokens, gpus_per_replica=self.gpus)
        not_negative(egress_usd_per_gb=self.egress_usd_per_gb)
        not_negative(gpu_usd_per_hour=self.gpu_usd_per_hour)


@dataclass(frozen=True)
class Quorum:
    """When the syncer of decoupled training merges."""

    quorum: Annotated[int, option("Learners of a quorum (K).")] = 1
    delay: Annotated[int, option("Steps in which a merge should be back (tau).")] = 2
    gamma: Annotated[float, rare("Share of the slack that the grace window takes.")] = 0.5
