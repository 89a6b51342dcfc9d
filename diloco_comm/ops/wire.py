"""Wire formats, the byte layout of a payload, the key of stochastic rounding, and the phases.

Arithmetic on sizes and keys; only ``Layout.rearrange`` moves bytes. The bits of each code are
defined in ``csrc/wire`` and, in plain PyTorch, in ``reference.py``;
``docs/developers/wire-formats.md`` describes both.

This module imports no other module of the package, so every module may import it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


# The names of ``WIRES``, for type checkers.
WireName = Literal[
    "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "e3m0",
    "int2r", "int1r", "sub2", "sub4", "sub8", "sub16",
    "topk32", "topk64", "topk128", "topk256",
]  # fmt: skip
# Bits of one code, and the largest magnitude that a code stands for: a block's scale maps the
# block's largest element to it. None: the wire has no scales.
_CODES: dict[str, tuple[int, float | None]] = {
    "fp32": (32, None),
    "bf16": (16, None),
    "fp16": (16, None),
    "fp8_e4m3": (8, 448.0),
    "fp8_e5m2": (8, 57344.0),
    "int8": (8, 127.0),
    "int4": (4, 7.0),
    "e3m0": (4, 16.0),
}
# Elements of a block, and bytes of its code, of the wires that rotate a block before they round it
# (``reference_rotation``): these have no code for a single element.
_ROTATED: dict[str, tuple[int, int]] = {
    "int2r": (256, 64),
    "int1r": (256, 32),
    "sub2": (1024, 64),
    "sub4": (1024, 32),
    "sub8": (1024, 16),
    "sub16": (1024, 8),
}
# How many elements of each block of 4096, the largest ones, are sent (``reference_sparse``).
_SPARSE = {"topk32": 32, "topk64": 64, "topk128": 128, "topk256": 256}
_SPARSE_BLOCK = 4096
ELEMENT_WIRES: tuple[str, ...] = tuple(_CODES)
ROTATED_WIRES: tuple[str, ...] = tuple(_ROTATED)
SPARSE_WIRES: tuple[str, ...] = tuple(_SPARSE)
WIRES: tuple[str, ...] = ELEMENT_WIRES + ROTATED_WIRES + SPARSE_WIRES
BLOCK_SIZES: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)  # of the ELEMENT_WIRES
_DEFAULT_BLOCK_SIZE = 256

SCALE_BYTES = 2  # one bf16, little endian, for each block
KEY_BYTES = 8  # the key of a rotated run's signs, little endian, before the scales
ALIGNMENT = 16  # runs, and the codes inside a run, start at multiples of this many bytes

STAGE_ENCODE = 0
STAGE_REDUCE = 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


@dataclass(frozen=True)
class WireFormat:
    """Name how elements are encoded and how many of them share a scale.

    Args:
        name: One of ``WIRES``.
        block_size: Elements that share one scale: one of ``BLOCK_SIZES``, and for the
            ``ROTATED_WIRES`` and ``SPARSE_WIRES`` the one size that they have. None is the wire's
            own: 256, or 1024 for sub2 to sub16, or 4096 for topk32 to topk256. Formats without
            scales keep it too: runs are cut at its multiples.

    Raises:
        ValueError: If the name or the block size is not one of those.
    """

    name: str = "int8"
    block_size: int = None  # type: ignore[assignment]  # the wire's own is filled in

    def __post_init__(self) -> None:
        if self.name not in WIRES:
            names = ", ".join(WIRES)
            hint = "; diloco-comm plan --gbps chooses one" if self.name == "auto" else ""
            raise ValueError(f"unknown wire {self.name!r}: it must be one of {names}{hint}")
        own = _DEFAULT_BLOCK_SIZE if self.has_element_codes else self.code_unit[0]
        # A NumPy integer is taken too; the ``int()`` below makes it one that JSON can hold.
        size = own if self.block_size is None else self.block_size
        if not self.has_element_codes:
            if size != own:
                raise ValueError(f"wire {self.name} has blocks of {own}, got block_size={size!r}")
        elif size not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size must be one of {allowed}, got {size!r}")
        object.__setattr__(self, "block_size", int(size))

    @cached_property
    def is_rotated(self) -> bool:
        """Whether a block is rotated by random signs and a Hadamard transform before rounding."""
        return self.name in _ROTATED

    @cached_property
    def is_sparse(self) -> bool:
        """Whether the largest elements of a block are sent, and no others."""
        return self.name in _SPARSE

    @cached_property
    def is_random(self) -> bool:
        """Whether a payload or the mean of payloads has random signs, so that it needs a key."""
        # The mean of sparse payloads is encoded on a rotated wire (``mean_wire``).
        return self.is_rotated or self.is_sparse

    @property
    def num_kept(self) -> int:
        """Elements of a block that a sparse wire sends.

        Raises:
            KeyError: If the wire is not sparse.
        """
        return _SPARSE[self.name]

    @property
    def feedback_decay(self) -> float:
        """Factor of an encoding's errors before error feedback adds them to the next encoding."""
        return 0.95 if self.is_sparse else 1.0

    @cached_property
    def has_element_codes(self) -> bool:
        """Whether each element has a code of its own; else one code stands for a whole block."""
        return self.name in _CODES

    @property
    def is_gathered(self) -> bool:
        """Whether a few replicas send all payloads to all; ``num_phases`` says how few these are.

        On other wires, from three replicas on, owners average the payloads.
        """
        return self.is_sparse or self.name.startswith("sub")

    @property
    def code_bits(self) -> int:
        """Bits of one element's code, without the scale; a ValueError if the wire has none."""
        if not self.has_element_codes:
            raise ValueError(f"wire {self.name} has a code for a block, and none for one element")
        return _CODES[self.name][0]

    @cached_property
    def code_unit(self) -> tuple[int, int]:
        """The fewest elements whose codes together are whole bytes, and the number of bytes."""
        if self.is_rotated:
            return _ROTATED[self.name]
        if self.is_sparse:
            # A kept element takes the low bits of its index, two bits for the high ones (Elias and
            # Fano's code), and a bit for its sign.
            low_bits = (_SPARSE_BLOCK // self.num_kept).bit_length() - 1
            return _SPARSE_BLOCK, self.num_kept * (low_bits + 3) // 8
        return (1, self.code_bits // 8) if self.code_bits >= 8 else (2, 1)

    def code_bytes(self, num_elements: int) -> int:
        """Bytes of the codes of a run's first ``num_elements`` elements, in whole code units."""
        elements, num_bytes = self.code_unit
        return _ceil_div(num_elements, elements) * num_bytes

    @cached_property
    def has_scales(self) -> bool:
        return not self.has_element_codes or _CODES[self.name][1] is not None

    @property
    def qmax(self) -> float:
        """Largest magnitude of a code; the scale is a block's absmax over it, rounded up.

        Raises:
            ValueError: If the wire has no scales, or no code for a single element.
        """
        qmax = _CODES[self.name][1] if self.has_element_codes else None
        if qmax is None:
            what = "no scales" if self.has_element_codes else "no code for one element"
            raise ValueError(f"wire {self.name} has {what} and therefore no qmax")
        return qmax

    @property
    def bits_per_element(self) -> float:
        """Bits an element costs on the wire, its share of the scale included, padding not."""
        elements, num_bytes = self.code_unit
        scale_bits = 8 * SCALE_BYTES / self.block_size if self.has_scales else 0.0
        return 8 * num_bytes / elements + scale_bits

    @property
    def scale_offset(self) -> int:
        """Bytes from the start of a run to its first scale; the key of the signs is before it."""
        return KEY_BYTES if self.is_rotated else 0

    def code_offset(self, run_elements: int) -> int:
        """Bytes from the start of a run of ``run_elements`` to its first code."""
        if not self.has_scales:
            return 0
        scale_bytes = SCALE_BYTES * _ceil_div(run_elements, self.block_size)
        return _round_up(self.scale_offset + scale_bytes, ALIGNMENT)

    def run_bytes(self, run_elements: int) -> int:
        """Bytes that a run of ``run_elements`` occupies in a payload: a multiple of 16."""
        return self.code_offset(run_elements) + _round_up(self.code_bytes(run_elements), ALIGNMENT)


def parse(wire: str | WireFormat, block_size: int | None = None) -> WireFormat:
    """Turn a wire's name into a ``WireFormat``; a ``WireFormat`` is returned as it is.

    Args:
        block_size: None: as in the ``WireFormat``, or the wire's own.

    Raises:
        ValueError: If the name or the block size is unknown, or the block size differs from
            the ``WireFormat``'s.
        TypeError: If ``wire`` is neither a string nor a ``WireFormat``.
    """
    if isinstance(wire, WireFormat):
        if block_size not in (None, wire.block_size):
            raise ValueError(f"block_size={block_size!r} is not that of wire={wire!r}: give one")
        return wire
    if not isinstance(wire, str):
        raise TypeError(f"wire must be a name or a WireFormat, got {type(wire).__name__}")
    return WireFormat(wire) if block_size is None else WireFormat(wire, block_size)


@dataclass(frozen=True)
class Layout:
    """Place the runs of one fragment in its payload.

    The fragment's ``num_elements``, counted through its tensors one after the other, are cut in
    ``num_runs`` runs of ``run_elements``. The last runs may be short or empty; in the payload each
    run occupies ``run_bytes`` all the same.

    Args:
        num_elements: Elements of the fragment.
        num_runs: World size times number of chunks: rank r owns run k*W + r of chunk k.
        run_elements: Elements of a full run, a positive multiple of the wire's block size.
        wire: Format and block size.

    Raises:
        ValueError: If the runs do not hold all elements or are not made of whole blocks.
    """

    num_elements: int
    num_runs: int
    run_elements: int
    wire: WireFormat

    def __post_init__(self) -> None:
        if self.num_elements < 0:
            raise ValueError(f"num_elements must not be negative, got {self.num_elements}")
        if self.num_runs < 1:
            raise ValueError(f"num_runs must be at least 1, got {self.num_runs}")
        if self.run_elements < 1 or self.run_elements % self.wire.block_size:
            raise ValueError(
                "run_elements must be a positive multiple of the block size "
                f"{self.wire.block_size}, got {self.run_elements}"
            )
        if self.num_runs * self.run_elements < self.num_elements:
            raise ValueError(
                f"{self.num_runs} runs of {self.run_elements} elements cannot hold "
                f"{self.num_elements} elements"
            )

    @classmethod
    def plan(
        cls, num_elements: int, world_size: int, num_chunks: int = 1, wire: WireFormat | None = None
    ) -> Layout:
        """Cut ``num_elements`` into equal runs, one for each rank in each chunk.

        Raises:
            ValueError: If the world size or the number of chunks is below 1.
        """
        wire = WireFormat() if wire is None else wire
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
        num_runs = world_size * num_chunks
        run_elements = _round_up(max(_ceil_div(num_elements, num_runs), 1), wire.block_size)
        return cls(num_elements, num_runs, run_elements, wire)

    @cached_property
    def run_bytes(self) -> int:
        """Bytes from the start of one run to the start of the next."""
        return self.wire.run_bytes(self.run_elements)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.num_runs * self.run_bytes

    @cached_property
    def whole(self) -> tuple[int, int, int, str, int]:
        """The arguments of an operator on all elements: [begin, end), run elements, wire, block."""
        return 0, self.num_elements, self.run_elements, self.wire.name, self.wire.block_size

    def run_range(self, run_idx: int) -> tuple[int, int]:
        """Return the elements [begin, end) of the fragment that run ``run_idx`` holds.

        Raises:
            IndexError: If there is no such run.
        """
        if not 0 <= run_idx < self.num_runs:
            raise IndexError(f"run {run_idx} of a layout with {self.num_runs} runs")
        begin = min(run_idx * self.run_elements, self.num_elements)
        return begin, min(begin + self.run_elements, self.num_elements)

    def filled(self) -> list[tuple[int, int]]:
        """Return the bytes [begin, end) of a payload that hold elements; the rest is padding."""
        num_full, rest = divmod(self.num_elements, self.run_elements)
        full = num_full * self.run_bytes
        used = self.wire.code_offset(self.run_elements) + self.wire.code_bytes(rest)
        return [(0, full)] * (full > 0) + [(full, full + used)] * (rest > 0)

    def rearrange(self, payload: Tensor, other: Layout) -> Tensor:
        """Return the same encoded elements, uint8, laid out as ``other``.

        Runs are made of whole blocks, so scales and codes are moved and none is computed. The
        payload itself is returned when the layouts are equal.

        Raises:
            ValueError: If the layouts are of other elements or of another wire, or the runs of a
                rotated wire were encoded with several keys.
        """
        if self == other:
            return payload
        if (self.num_elements, self.wire) != (other.num_elements, other.wire):
            raise ValueError(f"a payload laid out as {self} cannot be laid out as {other}")
        result = payload.new_zeros(other.payload_bytes)
        if self.wire.is_rotated and self.num_elements:
            other._keys(result).copy_(self._one_key(payload))
        for source, target in zip(self._regions(payload), other._regions(result), strict=True):
            flat = source.reshape(-1)
            moved = flat.new_zeros(target.numel())
            count = min(flat.numel(), moved.numel())
            moved[:count] = flat[:count]
            target.copy_(moved.view(target.shape))
        return result

    def _regions(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """View the bytes of all scales and the bytes of all codes, as two matrices.

        Row r of each has the scales, or the codes, of run r.
        """
        wire, runs = self.wire, payload.view(self.num_runs, self.run_bytes)
        num_blocks = self.run_elements // wire.block_size if wire.has_scales else 0
        scales, codes = wire.scale_offset, wire.code_offset(self.run_elements)
        return (
            runs[:, scales : scales + SCALE_BYTES * num_blocks],
            runs[:, codes : codes + wire.code_bytes(self.run_elements)],
        )

    def _keys(self, payload: Tensor) -> Tensor:
        """View the key of each run that has elements, [runs, KEY_BYTES]."""
        used = _ceil_div(self.num_elements, self.run_elements)
        return payload.view(self.num_runs, self.run_bytes)[:used, :KEY_BYTES]

    def _one_key(self, payload: Tensor) -> Tensor:
        keys = self._keys(payload)
        if bool((keys != keys[0]).any()):
            raise ValueError(
                "the runs of a rotated payload were encoded with several keys, so its elements "
                "cannot be laid out anew"
            )
        return keys[0]


_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(state: int) -> int:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    z = (state + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def rng_key(seed: int, replica: int, stage: int, round: int, fragment: int) -> int:
    """Derive a key of stochastic rounding or of random signs, another one for other arguments.

    Args:
        seed: The user's seed.
        replica: The replica that rounds: the sender, or the owner of a run that is reduced. See
            ``encoding_keys`` for random signs.
        stage: ``STAGE_ENCODE`` or ``STAGE_REDUCE``.
        round: Outer round of the fragment.
        fragment: Index of the fragment.

    Returns:
        A signed 64-bit integer, as an operator's argument must be.
    """
    key = seed & _MASK64
    for part in (replica, stage, round, fragment):
        key = _splitmix64(key) ^ (part & _MASK64)
    key = _splitmix64(key)
    return key - (1 << 64) if key >> 63 else key


def encoding_keys(
    wire: WireFormat, stochastic: bool, seed: int, replica: int, round: int, fragment: int
) -> tuple[int, int]:
    """Return the keys with which a replica encodes its payload, and the mean of runs it owns.

    The owners of a rotated mean's runs share one key, which names no replica: so the mean can be
    laid out anew (``Layout.rearrange``). A key is 0 where its encoding uses no random numbers.
    """
    own = mean = 0
    if stochastic or wire.is_rotated:
        own = rng_key(seed, replica, STAGE_ENCODE, round, fragment)
    if stochastic or wire.is_random:
        mean = rng_key(seed, 0 if wire.is_random else replica, STAGE_REDUCE, round, fragment)
    return own, mean


# ---------------------------------------------------------------------- phases of a reduction

_OWNER_OF_ROTATED, _OWNER_OF_SPARSE = WireFormat("int1r"), WireFormat("int2r")


def mean_wire(wire: WireFormat) -> WireFormat:
    """Return the wire on which owners of runs encode the mean of payloads on ``wire``."""
    if wire.is_sparse:
        return _OWNER_OF_SPARSE
    return _OWNER_OF_ROTATED if wire.is_gathered else wire


def num_phases(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> int:
    """Return in how many phases a group of replicas exchanges payloads.

    0: there is one replica. 1: all payloads go to all replicas. 2: each replica gets the payloads
    of the runs that it owns, and then sends their mean to all.

    Args:
        must_gather: A wire that ``is_gathered`` stays so with any number of replicas.
    """
    if num_replicas == 1:
        return 0
    if num_replicas == 2:
        return 1
    if not wire.is_gathered:
        return 2
    # In one phase a replica of W receives W - 1 payloads. In two phases it receives (W - 1) / W
    # of two, counted here as two on the mean's wire.
    costs_more = num_replicas * wire.bits_per_element > 2 * mean_wire(wire).bits_per_element
    return 2 if costs_more and not must_gather else 1


def mean_layout(layout: Layout, num_replicas: int, *, must_gather: bool = False) -> Layout:
    """Return the layout of an exchange's result: the same runs, on the mean's wire if averaged."""
    is_reduced = num_phases(layout.wire, num_replicas, must_gather=must_gather) == 2
    return replace(layout, wire=mean_wire(layout.wire)) if is_reduced else layout


def received_bits(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> float:
    """Return the bits that a replica receives, and sends, for each element of an exchange."""
    others = num_replicas - 1
    if num_phases(wire, num_replicas, must_gather=must_gather) < 2:
        return others * wire.bits_per_element
    both = wire.bits_per_element + mean_wire(wire).bits_per_element
    return both * others / num_replicas


def held_bits(wire: WireFormat, num_replicas: int, *, must_gather: bool = False) -> float:
    """Return the bits of all payloads that a replica holds for each element of an exchange."""
    phases = num_phases(wire, num_replicas, must_gather=must_gather)
    if phases < 2:
        return num_replicas * wire.bits_per_element
    return wire.bits_per_element + mean_wire(wire).bits_per_element
