"""Buffers that are allocated once and reused: in host memory, page-locked, or on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _C

CPU = torch.device("cpu")
# A rank that has given its group up adds this to its vote, which no count of elements makes up for.
GIVEN_UP = -1 << 63
# 2^62 over the golden ratio, made odd.
_GOLDEN_RATIO = 0x278DDE6E5FD29F05


def empty_pages(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a zeroed CPU tensor without page faults at its first use.

    The memory is 64-byte aligned and advised to use huge pages, and every page has been touched.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return _C.empty_pages(num_bytes).view(dtype).view(shape)


def persistent(
    shape: int | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Tensor:
    """Allocate a zeroed tensor for long use: on a device, or by ``empty_pages`` on the CPU."""
    if device.type == "cpu":
        return empty_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def persistent_like(tensor: Tensor) -> Tensor:
    """Allocate a zeroed tensor for long use with the same shape, dtype and device.

    The new tensor is page-locked if the given tensor is.
    """
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return page_locked(tuple(tensor.shape), tensor.dtype)
    return persistent(tuple(tensor.shape), tensor.dtype, tensor.device)


def page_locked(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a zeroed CPU tensor for copies to and from a device that the host need not await."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True, device="cpu")


@dataclass(eq=False)
class Ballot:
    """Counts of bad elements in an exchange on streams.

    A *bad* element is not finite or out of the wire's range. A vote is two int64: the bad elements
    that were encoded, and bad elements of the mean, each plus the token of the vote. An aborted
    gather leaves zeros or earlier votes behind, which differ from the token; so only a vote that
    has arrived can read as "yes". A rank that has given its group up adds ``GIVEN_UP`` to its vote,
    and its verdict is "no" whatever the others vote.

    Attributes:
        is_no: bool [2 size], whether each number of each rank's vote differs from the token.
        own: int64 [2], ``bad`` and ``bad_mean``; after the vote, this rank's vote.
        bad: int64 [1], bad elements that this rank has encoded.
        bad_mean: int64 [1], bad elements of the mean that this rank has computed.
        votes: int64 [2 size], the vote of every rank.
        verdict: int64 [1], how many numbers of the votes differ from the token; with 0 the round
            may be applied.
        given_up: int64 [1], 0, or ``GIVEN_UP`` if this rank has given the group up.
        digest: int64 [2], the sums of the digest of all payloads in the mean.
        host_bad, host_votes, host_verdict, host_given_up, host_digest: Page-locked copies. The
            copies of ``bad`` and ``given_up`` are from before the vote.
        token: See ``vote_token``; set when the vote is enqueued.
    """

    is_no: Tensor
    own: Tensor
    votes: Tensor
    verdict: Tensor
    given_up: Tensor
    digest: Tensor
    host_bad: Tensor
    host_votes: Tensor
    host_verdict: Tensor
    host_given_up: Tensor
    host_digest: Tensor
    token: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.bad, self.bad_mean = self.own.split(1)

    @classmethod
    def make(cls, size: int, device: torch.device) -> Ballot:
        sizes = 2, 2 * size, 1, 1, 2
        on_device = (torch.zeros(n, dtype=torch.int64, device=device) for n in sizes)
        is_no = torch.zeros(2 * size, dtype=torch.bool, device=device)
        hosts = (page_locked(n, torch.int64) for n in (1, 2 * size, 1, 1, 2))
        return cls(is_no, *on_device, *hosts)

    def numbers(self) -> list[tuple[int, int]]:
        """Return every rank's bad elements, encoded and of the mean, from the votes on the host."""
        counts = [number - self.token for number in self.host_votes.tolist()]
        return list(zip(counts[::2], counts[1::2], strict=True))

    def quitters(self) -> list[int]:
        """List the ranks that had given their group up, from the votes on the host."""
        return [rank for rank, counts in enumerate(self.numbers()) if min(counts) < 0]


def vote_token(number: int) -> int:
    """Return the token, in [1, 2^62), of the vote with this number, counted from 1.

    Tokens are multiples of the golden ratio. Tokens of votes less than 2^28 apart differ in both
    halves of 32 bits. So a torn vote, one half of which is old, does not read as "yes".
    """
    return number * _GOLDEN_RATIO & (1 << 62) - 1


@dataclass(eq=False)
class Payload:
    """The encoded bytes of a fragment, on its device for the operators and on the host for sockets.

    Attributes:
        tensor: uint8 on the fragment's device.
        host: The same tensor, or a page-locked copy if the fragment is on a device.
        bad, bad_host: int64 [1], the number of bad elements on the device and on the host; None if
            the fragment is in host memory.
        ballot: The counts of an exchange on streams, which needs no payload on the host.
    """

    tensor: Tensor
    host: Tensor
    bad: Tensor | None = None
    bad_host: Tensor | None = None
    ballot: Ballot | None = None

    @classmethod
    def make(cls, num_bytes: int, device: torch.device, *, voters: int = 0) -> Payload:
        """Allocate a payload that ``voters`` replicas exchange on streams, or with 0 the engine."""
        if voters:
            payload = persistent(num_bytes, torch.uint8, device)
            return cls(payload, payload, ballot=Ballot.make(voters, device))
        if device.type == "cpu":
            pages = empty_pages(num_bytes, torch.uint8)
            return cls(pages, pages)
        return cls(
            persistent(num_bytes, torch.uint8, device),
            page_locked(num_bytes, torch.uint8),
            torch.zeros(1, dtype=torch.int64, device=device),
            page_locked(1, torch.int64),
        )


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Enter a block in which a stream, and its device, are the current ones."""
    module = torch.get_device_module(stream.device)
    device = module.current_device()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        # Streams are set together with their device, which need not be the caller's.
        module.set_device(device)


def device_of(tensors: list[Tensor]) -> torch.device:
    """Return the device of all tensors; the CPU if the list is empty."""
    return tensors[0].device if tensors else CPU


class Reading:
    """Numbers that are copied to the host; only ``values`` and ``norm`` wait for the copy.

    Args:
        numbers: 1-D, on any device. For ``norm`` the first of them is a squared norm, in fp64.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = numbers
        if numbers.device.type != "cpu":
            self._host = page_locked(numbers.numel(), numbers.dtype)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.Event(numbers.device)
            self._event.record(torch.accelerator.current_stream(numbers.device))

    @property
    def is_there(self) -> bool:
        """Whether ``norm`` returns without a wait for other replicas, which is always so here."""
        return True

    @property
    def is_copied(self) -> bool:
        """Whether the numbers are in host memory."""
        return self._event is None or self._event.query()

    def values(self) -> list[Any]:
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None
        values: list[Any] = self._host.tolist()
        return values

    def norm(self) -> float:
        return rounded_norm(self.values()[0])


def rounded_norm(squared: float) -> float:
    """Return the square root, rounded to the 24 bits of fp32.

    The last bits of a sum of squares depend on its division among workers; rounding nearly always
    removes the difference.
    """
    norm = math.sqrt(squared)
    if not math.isfinite(norm):
        return norm
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


def memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor of any shape as 1-D, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def paired(values: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the values of dense tensors, virtually concatenated, with the tensors as 1-D views."""
    pieces = values.split([tensor.numel() for tensor in tensors])
    return zip(pieces, map(memory_order, tensors), strict=True)


def round_as(values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Round fp32 values in place, as if they were stored in dense tensors one after the other.

    Each value is rounded to nearest in the dtype of the tensor that it would be stored in.
    """
    for piece, tensor in paired(values, tensors):
        if tensor.dtype != piece.dtype:
            piece.copy_(piece.to(tensor.dtype))
    return values
