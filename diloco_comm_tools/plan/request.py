"""A plan that is asked for, the predictions of a simulator for it, and settings for a link."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diloco_comm.methods.outer import SGD, OuterOptimizer
from diloco_comm.methods.overlap import Overlap, Streaming
from diloco_comm.ops.wire import (
    ELEMENT_WIRES,
    WIRES,
    WireFormat,
    held_bits,
    num_phases,
    received_bits,
)

from ..common.sizes import at_least, not_negative, positive
from .simulator import GRID_GBPS, Array, Schedule, Work, spread, strided, utilisation

# blocks.3.attn, model.layers.11.mlp, transformer.h.0: the number counts layers.
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")
# A header of a hundred thousand tensors has some 10 MB.
_LARGEST_HEADER = 100_000_000
MODEL_TYPES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Size:
    """Parameters of a model and its layers."""

    num_params: float
    num_layers: int


def from_names(sizes: Iterable[tuple[str, int]], source: str) -> Size:
    """Count elements and the distinct layers that the names of the tensors tell.

    Raises:
        ValueError: If no name has a layer's number.
    """
    num_params, layers = 0, set()
    for name, num_elements in sizes:
        num_params += num_elements
        # The first number is the layer's; numbers behind it count parts of a layer, as experts do.
        if found := _LAYER.search(name):
            layers.add((name[: found.start()], int(found[1])))
    if not layers:
        raise ValueError(
            f"{source} names no layers (layers.0., blocks.0., h.0.): give --params and --layers"
        )
    return Size(float(num_params), len(layers))


def from_safetensors(path: Path) -> Size:
    """Read the header of a ``.safetensors`` file, or of all shards of an ``.index.json``.

    Raises:
        ValueError: If it is not such a file.
        OSError: If it cannot be read.
    """
    if path.suffix != ".json":
        return from_names(_header_sizes(path), str(path))
    index = _read_object(path)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path} is not the index of a model in safetensors: it has no weight_map")
    files = sorted({path.parent / str(name) for name in shards.values()})
    return from_names((size for file in files for size in _header_sizes(file)), str(path))


def _header_sizes(path: Path) -> list[tuple[str, int]]:
    wrong = f"{path} is not a safetensors file: it has no valid header"
    with path.open("rb") as file:
        prefix = file.read(8)
        num_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= num_bytes <= _LARGEST_HEADER:
            raise ValueError(wrong)
        try:
            header = json.loads(file.read(num_bytes))
            entries = {name: e for name, e in header.items() if name != "__metadata__"}
            return [(name, math.prod(entry["shape"])) for name, entry in entries.items()]
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise ValueError(wrong) from None


def from_config(path: Path) -> Size:
    """Count the parameters that a Hugging Face ``config.json`` describes; tied ones count once.

    Raises:
        ValueError: If it is no such file, or of a model type that is not in ``MODEL_TYPES``.
        OSError: If it cannot be read.
    """
    config = _read_object(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{path} is not a Hugging Face model config: it has no model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"{path} has model_type {kind!r}, but only {', '.join(MODEL_TYPES)} can be counted: "
            "give --safetensors, or --params and --layers"
        )
    try:
        num_params, num_layers = (_gpt2 if kind == "gpt2" else _llama)(config)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]!r}") from None
    except TypeError:
        raise ValueError(f"{path} has sizes that are not numbers") from None
    return Size(float(num_params), num_layers)


def _gpt2(config: dict[str, Any]) -> tuple[int, int]:
    width, num_layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    block = attention + (width + 1) * inner + (inner + 1) * width + 4 * width
    embeddings = (config["vocab_size"] + config["n_positions"]) * width
    return embeddings + num_layers * block + 2 * width, num_layers


def _llama(config: dict[str, Any]) -> tuple[int, int]:
    """Count Llama and those that differ from it by biases, norms of heads, or experts."""
    kind, width, num_layers = (
        config["model_type"],
        config["hidden_size"],
        config["num_hidden_layers"],
    )
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    rows = (heads + 2 * kv_heads) * head
    attention = width * rows + heads * head * width
    if kind == "qwen2":
        attention += rows
    elif config.get("attention_bias"):
        attention += rows + width
    if kind == "qwen3":
        attention += 2 * head
    inner = config["intermediate_size"]
    mlp = 3 * width * inner + (2 * inner + width if config.get("mlp_bias") else 0)
    if kind == "mixtral":
        mlp = config["num_local_experts"] * (mlp + width)
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + num_layers * (attention + mlp + 2 * width) + width, num_layers


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


# ``choose`` tries these wires in order, and with each the methods and delays of ``_WAYS``. int4
# is before int8, because the recorded runs of Blocking and Streaming lost nothing on int4
# (``LOSS_OVER_FP32``). Eager updates are never chosen, because their loss is higher.
WIRES_CHOSEN = ("int4", "int8")
_WAYS = (("diloco", 0), ("streaming", 1), ("streaming", 5))
# The most inner steps between two exchanges that ``choose`` prefers: the number in the published
# table of Streaming DiLoCo (arXiv 2501.18512, Table 4).
MOST_STEPS = 100
_DEFAULT_BLOCK_SIZE = 256
# For wires with fewer bits an element the outer optimizer is SGD: momentum would carry the rounding
# errors of a round into later rounds.
LEAST_BITS_FOR_MOMENTUM = 2
# The arguments of a configuration that a program gives to ``Wire``.
_OF_WIRE = ("block_size", "error_feedback")


@dataclass(frozen=True)
class Setting:
    """A method, a wire and its H, with the compute utilisation that they reach on a link."""

    method: str
    delay: int
    wire: str
    sync_every: int
    fragment_layers: int
    utilisation: float

    @property
    def words(self) -> str:
        late = f" with a delay of {self.delay}" if self.method == "streaming" else ""
        return f"{self.method}{late}, H={self.sync_every}, {self.wire}"


def choose(settings: Sequence[Setting], wires: Sequence[str] = WIRES_CHOSEN) -> Setting | None:
    """Return the first setting that exchanges at least every ``MOST_STEPS`` inner steps.

    Where no setting does, the setting that exchanges most often.

    Args:
        settings: Settings that reach the target, at most one for each method, delay and wire.
        wires: The wires that may be chosen, the preferred one first.

    Returns:
        A setting, or None if none is of DiLoCo or Streaming on one of these wires.
    """
    by_way = {(s.method, s.delay, s.wire): s for s in settings}
    ways = [(*way, wire) for wire in wires for way in _WAYS]
    found = [by_way[way] for way in ways if way in by_way]
    frequent = [setting for setting in found if setting.sync_every <= MOST_STEPS]
    return frequent[0] if frequent else min(found, key=lambda s: s.sync_every, default=None)


def as_arguments(
    setting: Setting, block_size: int, outer: OuterOptimizer | None = None, peers: str | None = None
) -> dict[str, Any]:
    """Return the setting, the ``config`` that ``DiLoCo`` takes, and the two lines of the program.

    A wire below two bits comes with SGD as outer optimizer, a sparse wire with error feedback, too.

    Args:
        outer: The outer optimizer, instead of the default one.
        peers: Source text of an ``Elastic`` for the argument ``peers``, in the line alone.
    """
    arguments: dict[str, Any] = {"sync_every": setting.sync_every, "wire": setting.wire}
    if setting.method == "streaming":
        arguments["fragments"] = f"layers:{setting.fragment_layers}"
        arguments["overlap"] = Streaming(setting.delay)
    if block_size != _DEFAULT_BLOCK_SIZE and setting.wire in ELEMENT_WIRES:
        arguments["block_size"] = block_size
    wire = WireFormat(setting.wire)
    if outer is None and wire.bits_per_element < LEAST_BITS_FOR_MOMENTUM:
        outer = SGD(1.0)
    if outer is not None:
        arguments["outer"] = outer
    if wire.is_sparse:
        arguments["error_feedback"] = True
    options = {name: arguments[name] for name in _OF_WIRE if name in arguments}
    words = {name: _literal(value) for name, value in arguments.items() if name not in options}
    if options:
        more = ", ".join(f"{name}={value!r}" for name, value in options.items())
        words["wire"] = f"Wire({words['wire']}, {more})"
    if peers is not None:
        words["peers"] = peers
    written = ", ".join(f"{name}={text}" for name, text in words.items())
    parts = {k: v for k, v in arguments.items() if isinstance(v, Overlap | OuterOptimizer)}
    names = [type(part).__name__ for part in parts.values()] + ["Wire"] * bool(options)
    names += ["Elastic"] * (peers is not None)
    return {
        "setting": asdict(setting),
        "config": {k: parts[k].config() if k in parts else v for k, v in arguments.items()},
        "imports": f"from diloco_comm import {', '.join(['DiLoCo', *sorted(names)])}",
        "line": f"diloco = DiLoCo(model, optimizer, {written})",
    }


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


METHODS = ("dp", "diloco", "streaming", "delayed", "eager", "co2")
# The methods that a plan may choose.
CHOOSABLE = ("diloco", "streaming")
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
DAY_S = 86400.0
# The methods that apply a result when its fragment is sent again.
ROUND_LATE = ("delayed", "eager", "co2")
AUTO = "auto"
MOST_SYNC_EVERY = 1_000_000  # each inner step of a round is simulated
# Gbit/s of a link, and the share of them that an all-reduce of fp32 among four replicas got: gloo's
# ring over TCP, without any codec (benchmarks/results/exchange/shaped-links.json).
EFFICIENCY = ((0.05, 0.87), (0.1, 0.91), (0.2, 0.91), (1.0, 0.94))


@dataclass(frozen=True)
class Request:
    """A run that is planned.

    Attributes:
        params: Parameters of the model.
        layers: Layers of the model.
        step_time: Seconds of an inner step without communication.
        workers: Replicas.
        method: One of ``METHODS``.
        sync_every: Inner steps between two sends of a fragment; data parallel ignores it.
        fragment_layers: Layers of a fragment; 0: the whole model is one. Ignored by dp and diloco.
        delay: Inner steps from send to apply; of streaming alone.
        rounds: Sends until a result is due; of delayed, eager and co2.
        wire: Wire format; "auto" is replaced by ``make_plan``.
        block_size: Elements that share a scale, on a wire with more than one possible size.
        bits: Bits that a replica sends for each parameter, instead of the wire's.
        rtt_ms: Round trip of the link.
        efficiency: Share of the link's rate that payloads get, at "step" granularity; None: as
            measured at that rate.
    """

    params: float
    layers: int
    step_time: float
    workers: int = 2
    method: str = "diloco"
    sync_every: int = 100
    fragment_layers: int = 0
    delay: int = 1
    rounds: int = 1
    wire: str = "int8"
    block_size: int = 256
    bits: float | None = None
    rtt_ms: float = 0.0
    efficiency: float | None = 1.0

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("wire", self.wire, (*WIRES, AUTO))
        at_least(1, layers=self.layers, sync_every=self.sync_every, rounds=self.rounds)
        at_least(2, replicas=self.workers)
        if self.sync_every > MOST_SYNC_EVERY:
            raise ValueError(
                f"--sync-every must be at most {MOST_SYNC_EVERY}, got {self.sync_every}"
            )
        positive(params=self.params, step_time=self.step_time, bits=self.bits)
        not_negative(rtt_ms=self.rtt_ms)
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency must be above 0 and at most 1, got {self.efficiency:g}")
        if not 0 <= self.fragment_layers <= self.layers:
            raise ValueError(
                f"--fragment-layers must be between 0 and --layers {self.layers}, "
                f"got {self.fragment_layers}"
            )
        if self.method == "streaming" and not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"--delay must be at least 0 and below --sync-every {self.sync_every}, "
                f"got {self.delay}"
            )
        if self.wire == AUTO and self.method not in CHOOSABLE:
            raise ValueError(
                f"--wire auto is for --method {' and '.join(CHOOSABLE)}, got {self.method}"
            )
        if self.wire == AUTO and self.bits is not None:
            raise ValueError("--wire auto and --bits exclude each other: both choose the bits")
        if self.wire != AUTO:
            _ = self.wire_format

    @property
    def wire_format(self) -> WireFormat:
        # The other wires have blocks of one size each: 256, the default here, counts as not given.
        is_given = self.wire in ELEMENT_WIRES or self.block_size != 256
        return WireFormat(self.wire, self.block_size) if is_given else WireFormat(self.wire)

    @property
    def steps_a_round(self) -> int:
        return 1 if self.method == "dp" else self.sync_every

    @property
    def bits_per_param(self) -> float:
        """Bits that a replica sends for each parameter in one exchange of all of them."""
        if self.bits is not None:
            return self.bits
        return received_bits(self.wire_format, self.workers, must_gather=self._must_gather)

    @property
    def _must_gather(self) -> bool:
        # Eager needs each replica's own payload beside the mean, so all payloads go to all.
        return self.method == "eager"

    @property
    def has_owners(self) -> bool:
        """Whether owners encode the mean on a wire of its own, because the replicas are many."""
        wire = self.wire_format
        phases = num_phases(wire, self.workers, must_gather=self._must_gather)
        return wire.is_gathered and phases == 2

    @property
    def work(self) -> Work:
        # Messages of an exchange, one after the other: header, payload, with more than two replicas
        # the owner's mean, and vote.
        one_ways = 3 if self.workers == 2 else 4
        is_dp = self.method == "dp"
        return Work(self.params, self.layers, self.step_time, self.bits_per_param, one_ways, is_dp)

    def schedule(self, granularity: str) -> Schedule:
        """Return when the fragments are sent and needed."""
        if self.method in ("dp", "diloco"):
            last = self.steps_a_round - 1
            return Schedule(self.steps_a_round, {last: [list(range(self.layers))]})
        fragments = strided(self.layers, self.fragment_layers or self.layers)
        sends = spread(fragments, self.sync_every, granularity)
        delay = self.delay if self.method == "streaming" else self.rounds * self.sync_every
        return Schedule(self.sync_every, sends, delay)

    def utilisation(self, gbps: Array, granularity: str = "layer") -> Array:
        """Return the compute utilisation at each bandwidth in Gbit/s."""
        schedule, rtt_s = self.schedule(granularity), self.rtt_ms / 1e3
        if granularity == "step":
            gbps = gbps * self.efficiency_at(gbps)
        return utilisation(self.work, schedule, gbps, rtt_s=rtt_s, granularity=granularity)

    def efficiency_at(self, gbps: Array) -> Array:
        """Return the share of each bandwidth that payloads get."""
        if self.efficiency is not None:
            return np.full_like(gbps, self.efficiency)
        rates, shares = np.array(EFFICIENCY).T
        return np.interp(np.log(gbps), np.log(rates), shares)

    def bandwidth_gbps(self, granularity: str = "layer") -> dict[str, float | None]:
        """Return the least bandwidth of the grid for each target; None: none is enough."""
        return needed_gbps(self.utilisation(GRID_GBPS, granularity))

    def setting(self, share: float) -> Setting:
        """Return this request, with its utilisation on a link, as a setting."""
        layers = self.fragment_layers or self.layers
        delay = self.delay if self.method == "streaming" else 0
        return Setting(self.method, delay, self.wire, self.sync_every, layers, share)

    @property
    def bytes_per_round(self) -> float:
        """Bytes that a replica sends in a round."""
        return self.params * self.bits_per_param / 8

    def bytes_per_day(self, share: float) -> float:
        """Bytes that a replica sends in a day at a given compute utilisation."""
        return self.bytes_per_round * DAY_S * share / (self.step_time * self.steps_a_round)

    @property
    def extra_memory_bytes(self) -> float:
        """Bytes beside model, gradients and inner optimizer: outer state, momentum, payloads."""
        if self.method == "dp":
            return 0.0
        rounds = self.rounds if self.method in ROUND_LATE else 0
        bits = held_bits(self.wire_format, self.workers, must_gather=self._must_gather)
        return self.params * (4 + 4 + (rounds + 1) * bits / 8)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value!r}")


def needed_gbps(shares: Array) -> dict[str, float | None]:
    """Return the least bandwidth of the grid that reaches each target, in Gbit/s.

    Rounded to two decimals, as a grid of 50 values from 0.1 to 1000 deserves.
    """
    needed: dict[str, float | None] = {}
    for target in TARGETS:
        reached = np.flatnonzero(shares >= target)
        needed[f"{target:g}"] = round(float(GRID_GBPS[reached[0]]), 2) if len(reached) else None
    return needed
