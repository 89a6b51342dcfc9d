"""How many parameters and layers a model has: from its configuration or its weights' header."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        # Experts and the like repeat below a layer: the outermost number counts.
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
