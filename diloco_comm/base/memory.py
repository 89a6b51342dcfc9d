"""Buffers that are made once and reused: in host memory, page-locked, or on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import _C

CPU = torch.device("cpu")
# Below every count of bad elements.
GIVEN_UP = -1 << 63
# 2^62 over the golden ratio, made odd.
_GOLDEN_RATIO = 0x278DDE6E5FD29F05


def empty_pages(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a zeroed CPU tensor that costs no page fault later.

    64-byte aligned, huge pages advised, every page touched.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return _C.empty_pages(num_bytes).view(dtype).view(shape)


def persistent(
    shape: int | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Tensor:
    """Allocate a zeroed tensor that will be kept: on a device, or as ``empty_pages`` does."""
    if device.type == "cpu":
        return empty_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def persistent_like(tensor: Tensor) -> Tensor:
    """Allocate a zeroed tensor of the same shape, dtype and device that will be kept.

    It is page-locked where the other one is.
    """
    if tensor.device.type == "cpu" and tensor.is_pinned():
        return page_locked(tuple(tensor.shape), tensor.dtype)
    return persistent(tuple(tensor.shape), tensor.dtype, tensor.device)


def page_locked(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate a zeroed CPU tensor that a device copies to and from without a wait of the host."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True, device="cpu")


@dataclass(eq=False)
class Ballot:
    """Counts of bad elements in an exchange on streams.

    A vote is one int64: bad elements of the mean times 2^32, bad elements encoded, and the token of
    the vote. What an aborted gather leaves behind (zeros, earlier votes) differs from the token,
    so that only a vote that has come can read as "yes". A rank that has given its group up votes
    ``GIVEN_UP`` more, and finds the verdict to be "no" whatever has come.

    Attributes:
        is_no: bool [size], the votes that differ from the token.
        bad: int64 [1], the elements that this rank has encoded; from the vote on, this rank's vote.
        bad_mean: int64 [1], the elements that this rank has added up.
        votes: int64 [size], the vote of every rank.
        verdict: int64 [1], the number of these: 0 says that the round may be applied.
        given_up: int64 [1], whether the group was given up: 0 or ``GIVEN_UP``.
        digest: int64 [2], the sums of the digest of all payloads that are added up.
        host_bad, host_votes, host_verdict, host_given_up, host_digest: Page-locked copies; those of
            ``bad`` and ``given_up`` are from before the vote.
        token: See ``vote_token``; set when the vote is enqueued.
    """

    is_no: Tensor
    bad: Tensor
    bad_mean: Tensor
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

    @classmethod
    def make(cls, size: int, device: torch.device) -> Ballot:
        sizes = 1, 1, size, 1, 1, 2
        on_device = (torch.zeros(n, dtype=torch.int64, device=device) for n in sizes)
        is_no = torch.zeros(size, dtype=torch.bool, device=device)
        hosts = (page_locked(n, torch.int64) for n in (1, size, 1, 1, 2))
        return cls(is_no, *on_device, *hosts)

    def numbers(self) -> list[tuple[int, int]]:
        """Return what every rank has encoded and added up, once all votes are on the host."""
        return [(count & (1 << 32) - 1, count >> 32) for count in self._counts()]

    def quitters(self) -> list[int]:
        """List the ranks that gave their group up before they voted, once all votes are there."""
        return [rank for rank, count in enumerate(self._counts()) if count < 0]

    def _counts(self) -> list[int]:
        return [vote - self.token for vote in self.host_votes.tolist()]


def vote_token(number: int) -> int:
    """Return the token, in [1, 2^62), of the vote with this number, counted from 1.

    Tokens are multiples of the golden ratio: those of votes less than 2^28 apart differ in both
    halves of 32 bits, so that a torn vote, one half of which is old, does not read as "yes" either.
    """
    return number * _GOLDEN_RATIO & (1 << 62) - 1


@dataclass(eq=False)
class Payload:
    """Encoded bytes: where the operators have them, and where the engine has them.

    Attributes:
        tensor: uint8 on the fragment's device.
        host: The same tensor, or its page-locked twin when the fragment is on a device.
        bad, bad_host: int64 [1] of bad elements, likewise; None in host memory.
        ballot: The counts of an exchange on streams, which needs no twins.
    """

    tensor: Tensor
    host: Tensor
    bad: Tensor | None = None
    bad_host: Tensor | None = None
    ballot: Ballot | None = None

    @classmethod
    def make(cls, num_bytes: int, device: torch.device, *, voters: int = 0) -> Payload:
        """Allocate it. ``voters``: replicas that exchange it on streams; 0: the engine does."""
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


def device_of(tensors: list[Tensor]) -> torch.device:
    """Return the device that all tensors are on; the CPU's when there are none."""
    return tensors[0].device if tensors else CPU


class Reading:
    """A norm on its way to the host, which waits for it only when it is asked for.

    Args:
        squared: fp64, the squared norm first; on any device.
    """

    def __init__(self, squared: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = squared
        if squared.device.type != "cpu":
            self._host = page_locked(squared.numel(), squared.dtype)
            self._host.copy_(squared, non_blocking=True)
            self._event = torch.Event(squared.device)
            self._event.record(torch.accelerator.current_stream(squared.device))

    @property
    def is_there(self) -> bool:
        """Whether ``norm`` will return, now or as soon as the device comes to it."""
        return True

    def norm(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return rounded_norm(self._host[0].item())


def rounded_norm(squared: float) -> float:
    """Return the root, rounded to the 24 bits of fp32.

    The last bits of a sum of squares depend on how it is divided among workers; these are gone.
    """
    norm = math.sqrt(squared)
    if not math.isfinite(norm):
        return norm
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


def memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor of any shape as 1-D, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
