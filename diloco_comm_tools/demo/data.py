"""Text for the demo: the sources of Python's standard library, divided into shards by file."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MIN_SHARD_BYTES = 8 * 1024
HELD_OUT_ONE_IN = 16
PIECE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, one shard a replica, and bytes that no replica trains on."""

    source: str
    shards: tuple[bytes, ...]
    validation: bytes

    @property
    def unigram_entropy(self) -> float:
        """Entropy in nats of the validation bytes: no model without context gets below it."""
        counts = torch.bincount(as_tokens(self.validation), minlength=256).double()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * share.log()).sum())


def load_corpus(data: Path | None, num_shards: int) -> Corpus:
    """Read the text and give each replica different files, or different pieces of one file.

    Args:
        data: A file to use instead of the standard library.
        num_shards: Number of replicas.

    Raises:
        ValueError: If the file cannot be read, or holds too little text for ``num_shards`` shards
            and validation.
    """
    if data is None:
        pieces = _standard_library()
        source = f"the standard library of Python {platform.python_version()}, {len(pieces)} files"
    else:
        text = _read(data)
        pieces = {f"{i:08d}": text[i : i + PIECE_BYTES] for i in range(0, len(text), PIECE_BYTES)}
        source = f"{data}, {len(pieces)} pieces of {PIECE_BYTES // 1024} KiB"
    held_out, kept = _hold_out(pieces)
    corpus = Corpus(source, _deal(kept, num_shards), b"".join(held_out))
    smallest = min(len(text) for text in (*corpus.shards, corpus.validation))
    if smallest < MIN_SHARD_BYTES:
        needed = MIN_SHARD_BYTES * HELD_OUT_ONE_IN * max(1, num_shards // HELD_OUT_ONE_IN + 1)
        raise ValueError(
            f"{source}: too little text for {num_shards} replicas, "
            f"the smallest part has {smallest} bytes; give --data a file of {needed} bytes or more"
        )
    return corpus


def as_tokens(text: bytes) -> Tensor:
    """Return the bytes as an int64 tensor of shape [len(text)]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Batches:
    """Endless random windows of one shard, the same sequence for the same seed."""

    def __init__(self, text: bytes, batch_size: int, context: int, seed: int) -> None:
        self._tokens = as_tokens(text)
        self._shape = (batch_size, context)
        self._generator = torch.Generator().manual_seed(seed)
        self._offsets = torch.arange(context + 1)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 of shape [batch_size, context] each."""
        batch_size, context = self._shape
        last = len(self._tokens) - context - 1
        begin = torch.randint(last, (batch_size, 1), generator=self._generator)
        window = self._tokens[begin + self._offsets]
        return window[:, :-1], window[:, 1:]


def validation_windows(text: bytes, num_windows: int, context: int) -> Tensor:
    """Return windows evenly spread over the text, int64 of shape [num_windows, context + 1]."""
    tokens = as_tokens(text)
    begin = torch.linspace(0, len(tokens) - context - 1, num_windows).long()
    return tokens[begin[:, None] + torch.arange(context + 1)]


def _read(data: Path) -> bytes:
    try:
        return data.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read --data {data}: {error.strerror}") from None


def _standard_library() -> dict[str, bytes]:
    """Return the text of the standard library's top-level modules and pydoc's topics, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*root.glob("*.py"), *root.glob("pydoc_data/topics.py")]
    if not files:
        raise ValueError(f"no Python sources in {root}: give a text with --data FILE")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def _hold_out(pieces: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """Hold out a share of the bytes, by a hash of the name: the same pieces on every machine.

    A piece larger than half of the share and than ``PIECE_BYTES`` is never held out, so that the
    validation text mixes several pieces.
    """
    share = sum(map(len, pieces.values())) // HELD_OUT_ONE_IN
    longest = max(share // 2, PIECE_BYTES)
    held_out: list[bytes] = []
    kept: list[bytes] = []
    for name in sorted(pieces, key=lambda name: hashlib.sha256(name.encode()).digest()):
        wanted = sum(map(len, held_out)) < share and len(pieces[name]) <= longest
        (held_out if wanted else kept).append(pieces[name])
    return held_out, kept


def _deal(pieces: Sequence[bytes], num_shards: int) -> tuple[bytes, ...]:
    """Give each piece, longest first, to the smallest shard."""
    shards: list[list[bytes]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    for piece in sorted(pieces, key=len, reverse=True):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(piece)
        sizes[smallest] += len(piece)
    return tuple(b"".join(shard) for shard in shards)
