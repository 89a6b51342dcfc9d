"""The shared model of a syncer, and the versions of it that the learners get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...base.memory import empty_pages
from ...methods.outer import OuterOptimizer
from ...ops.wire import STAGE_ENCODE, Layout, rng_key
from ...replica.fragments import Schedule
from ..model import decode, layout_of
from .merges import Piece, SharedFragment
from .settings import FP32, DecoupledSettings
from .syncer import Commit, Syncer

# Versions of a fragment that are kept beside the newest because a learner reads them.
MAX_OLDER = 2
# Models that a server keeps: the values, the momentum, the newest version, and older ones.
KEPT_MODELS = 3 + MAX_OLDER


@dataclass(frozen=True)
class Published:
    """A version of a fragment as learners get it; its bytes never change.

    Attributes:
        values: fp32 [num_elements] for each piece: what learners have.
        coded: The difference to the version before, uint8 for each piece; None if there is none.
        merged: The number of each learner's last report that was merged.
    """

    version: int
    values: list[Tensor] = field(repr=False)
    coded: list[Tensor] | None = field(repr=False)
    merged: dict[str, int]


class ServedModel:
    """The fragments of the shared model with their rounds, and what learners have of them.

    Args:
        pieces: The pieces of each fragment.
        flats: The parameters at version 0, fp32 [num_elements] for each piece of each fragment. The
            model keeps these tensors as version 0.
        settings: The settings of the run.
        outer: The outer optimizer.
        total: Fragments of the whole model, of which other syncers may have some.

    Attributes:
        syncer: Decides and merges.
        published: The newest version of each fragment that may be told to learners.
        places: Fragment and place in it of each piece, in order.
        first: Number of each fragment's first piece.
        chain: Digest of the records of all merges that are on the disk; "" before the first one.
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[Piece]],
        flats: Sequence[Sequence[Tensor]],
        settings: DecoupledSettings,
        outer: OuterOptimizer,
        total: int,
        impl: str = "",
    ) -> None:
        self.total = total
        self.settings, self.impl = settings, ops.resolve_impl(impl)
        self.pieces = [_renumbered(each) for each in pieces]
        shared = [
            SharedFragment(flat, each, settings.up, outer, impl)
            for flat, each in zip(flats, self.pieces, strict=True)
        ]
        index, count = settings.place
        offsets = Schedule.plan(settings.sync_every, total).offsets[index::count]
        self.syncer = Syncer(shared, settings.rule, sync_every=settings.sync_every, offsets=offsets)
        counts = [len(each) for each in self.pieces]
        self.places = [(p, i) for p, count in enumerate(counts) for i in range(count)]
        self.first = list(accumulate(counts, initial=0))[:-1]
        self.sizes = [piece.num_elements for each in self.pieces for piece in each]
        self.down = [layout_of(size, settings.down) for size in self.sizes]
        self.whole = [layout_of(size, FP32) for size in self.sizes]
        self.published = [Published(0, list(flat), None, {}) for flat in flats]
        self.chain = ""

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def num_commits(self) -> int:
        """Merges so far, of all fragments."""
        return sum(each.num_merges for each in self.syncer.fragments)

    @property
    def is_coded(self) -> bool:
        """Commits are coded differences."""
        return self.settings.down.name != "fp32"

    def reports(self, fragment: int) -> list[Layout]:
        """Return the layouts of a report on a fragment."""
        return self.syncer.fragments[fragment].layouts

    def publish(self, commit: Commit) -> None:
        """Let learners have a commit."""
        before = self.published[commit.fragment]
        merged = {**before.merged, **commit.merged}
        values, coded = commit.values, None
        if self.is_coded:
            found = self._code(commit, before)
            if found is not None:
                values, coded = found
        self.published[commit.fragment] = Published(commit.version, values, coded, merged)

    def _code(self, commit: Commit, before: Published) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return what learners will have, and the coded differences; None if a value has no code.

        What a difference lacks is in the next one, since the syncer knows what learners have.
        """
        first, values, payloads = self.first[commit.fragment], [], []
        for offset, (new, old) in enumerate(zip(commit.values, before.values, strict=True)):
            layout = self.down[first + offset]
            payload = empty_pages((layout.payload_bytes,), torch.uint8)
            bad = torch.zeros(1, dtype=torch.int64)
            ops.encode(
                new,
                [old],
                payload,
                *layout.whole,
                rng_key=rng_key(0, 0, STAGE_ENCODE, commit.version, first + offset),
                nonfinite=bad,
                impl=self.impl,
            )
            if bad.item():
                return None
            payloads.append(payload)
            values.append(decode(payload, layout, impl=self.impl).add_(old))
        return values, payloads

    # -------------------------------------------------------------------------- in a saved state

    def header(self) -> dict[str, Any]:
        """Return what a snapshot needs beside the tensors, as JSON types."""
        return {
            "pieces": [[[p.num_elements, p.merge] for p in each] for each in self.pieces],
            "total": self.total,
            "versions": [each.version for each in self.published],
            "merged": [each.merged for each in self.published],
            "chain": self.chain,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers, by the names that they have in a snapshot."""
        found: dict[str, Tensor] = {}
        for number, (p, i) in enumerate(self.places):
            fragment = self.syncer.fragments[p]
            found[f"{number}/values"] = fragment.values[i]
            momentum = fragment.momenta[i]
            if momentum is not None:
                found[f"{number}/momentum"] = momentum
            if self.is_coded:
                found[f"{number}/published"] = self.published[p].values[i]
        return found

    def loaded(self, header: dict[str, Any]) -> None:
        """Take over the header of a snapshot, whose tensors are in the buffers."""
        self.chain = header["chain"]
        for p, (version, merged) in enumerate(
            zip(header["versions"], header["merged"], strict=True)
        ):
            self.syncer.fragments[p].num_merges = version
            self.syncer.rounds[p].version = version
            values = self.published[p].values
            if not self.is_coded:
                values = self.syncer.fragments[p].copy_values()
            self.published[p] = Published(version, values, None, merged)

    @classmethod
    def from_header(
        cls,
        header: dict[str, Any],
        settings: DecoupledSettings,
        outer: OuterOptimizer,
        impl: str = "",
    ) -> ServedModel:
        """Return a model whose buffers a snapshot is to fill."""
        pieces = [[Piece((), n, merge) for n, merge in each] for each in header["pieces"]]
        flats = [[empty_pages((p.num_elements,), torch.float32) for p in each] for each in pieces]
        return cls(pieces, flats, settings, outer, header["total"], impl)


def _renumbered(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces of one flat tensor each."""
    return [Piece((i,), piece.num_elements, piece.merge) for i, piece in enumerate(pieces)]


def pieces_from(sizes: Sequence[int], counts: Sequence[int], alone: Sequence[int]) -> list:
    """Return the pieces of each fragment from a learner's first message.

    Args:
        sizes: Elements of all pieces.
        counts: Pieces of each fragment.
        alone: Pieces of each fragment that merge by RDA; they come first.

    Raises:
        ValueError: If the numbers contradict each other.
    """
    if sum(counts) != len(sizes) or len(alone) != len(counts):
        raise ValueError(
            f"{len(sizes)} sizes, {sum(counts)} pieces and {len(alone)} of {len(counts)} fragments "
            "do not go together"
        )
    ends = accumulate(counts, initial=0)
    return [
        [Piece((), n, "rda" if i < alone[p] else "mean") for i, n in enumerate(sizes[begin:end])]
        for p, (begin, end) in enumerate(pairwise(ends))
    ]
