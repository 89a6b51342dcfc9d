"""How a learner finds its syncers, and tells them of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...ops.wire import Layout
from ...replica.fragments import Fragment
from ..link import Link
from ..local import layout_hash, whole_payloads
from ..messages import MAX_FRAGMENTS, Kind, Message
from .courier import Courier
from .learner import LearnerFragment
from .merges import Piece
from .settings import DecoupledSettings


@dataclass
class Shard:
    """A syncer with some of the fragments, and the connection to it.

    Attributes:
        settings: As the syncer has them.
        fragments: Numbers of the syncer's fragments in the model.
    """

    link: Link
    settings: DecoupledSettings
    fragments: list[int]
    courier: Courier | None = None

    @property
    def carrier(self) -> Courier:
        assert self.courier is not None
        return self.courier

    def close(self) -> None:
        """Leave the syncer; idempotent."""
        if self.courier is not None:
            self.courier.close()
        self.link.close()


def addresses_of(server: str | Sequence[str]) -> list[str]:
    """Return the addresses of all syncers.

    Raises:
        ValueError: If there is none.
    """
    addresses = [server] if isinstance(server, str) else list(server)
    if not addresses:
        raise ValueError("server must be an address or a list of addresses, got an empty list")
    return addresses


def open_shard(
    address: str,
    name: str | None,
    *,
    timeout: float,
    keys: str | Path | None,
    key_name: str,
) -> Shard:
    """Connect to a syncer, and ask for its settings.

    Raises:
        ServerRefused: If the server hosts asynchronous training, or has another protocol.
        ServerLost: If no server answers.
    """
    link = Link(address, name, [1], 0, timeout=timeout, keys=keys, key_name=key_name)
    try:
        message = link.ask(Message(Kind.SETTINGS), Kind.SET, "settings")
        return Shard(link, DecoupledSettings.from_json(message.meta["settings"]), [])
    except BaseException:
        link.close()
        raise


def check_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return the shards in order.

    Raises:
        ValueError: If they are not the shards of one run, each once.
    """
    ordered = sorted(shards, key=lambda shard: shard.settings.place)
    places = [shard.settings.shard for shard in ordered]
    wanted = [f"{i}/{len(ordered)}" for i in range(len(ordered))]
    if places != wanted:
        raise ValueError(
            f"the servers of a learner must be the shards {', '.join(wanted)}, got the shards "
            f"{', '.join(places)}: give all addresses, each once"
        )
    first = ordered[0]
    for shard in ordered[1:]:
        difference = replace(first.settings, shard=shard.settings.shard).difference(shard.settings)
        if difference:
            raise ValueError(
                f"the servers differ: {shard.link.address} has {difference} as {first.link.address}"
            )
    return ordered


def describe(
    shard: Shard,
    fragments: Sequence[Fragment],
    pieces: Sequence[Sequence[Piece]],
    beside: dict[str, Any],
) -> None:
    """Put the model into the first message to a syncer.

    Args:
        beside: See ``beside_layout``.

    Raises:
        ValueError: If there is no fragment for the syncer.
    """
    index, count = shard.settings.place
    shard.fragments = list(range(index, len(fragments), count))
    if not shard.fragments:
        raise ValueError(
            f"the model has {len(fragments)} fragments, too few for {count} servers: start them "
            "with more --fragments"
        )
    own = [pieces[p] for p in shard.fragments]
    num_pieces = sum(len(each) for each in own)
    if num_pieces > MAX_FRAGMENTS:
        raise ValueError(
            f"the model has {num_pieces} tensors that merge by themselves, and a server takes "
            f"{MAX_FRAGMENTS} at most: start it with --merge mean, or with more names in --by-mean"
        )
    shard.link.identity.greeting = Kind.JOIN
    shard.link.identity.model = {
        "layout": layout_hash(fragments),
        "settings": shard.settings.of_learners,
        "total": len(fragments),
        "sizes": [piece.num_elements for each in own for piece in each],
        "pieces": [len(each) for each in own],
        "alone": [sum(piece.merge == "rda" for piece in each) for each in own],
        **beside,
    }


def parameters_of(parts: Sequence[LearnerFragment]) -> tuple[list[Tensor], list[Layout]]:
    """Return the parameters in fp32, one payload a piece, for a syncer that has none."""
    return whole_payloads(piece.base for part in parts for piece in part.pieces)
