"""The local side of a worker: its model, its encoded payloads, and its attachment to a loop."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from .. import ops
from ..base.checks import refuse_copy
from ..base.memory import empty_pages, memory_order, round_as
from ..ops.digests import each_digest
from ..ops.residuals import Residuals
from ..ops.wire import STAGE_ENCODE, Layout, WireFormat, rng_key
from ..replica.fragments import (
    Fragment,
    FragmentSpec,
    buffer_names,
    describe_parameters,
    make_fragments,
    shared_memory,
    trainable_parameters,
    unexchanged_tensors,
)
from ..replica.hooks import StepHooks
from ..replica.model_watch import ModelWatch
from .messages import MAX_PLACES
from .model import decode, layout_of

if TYPE_CHECKING:
    from typing_extensions import Self


class WorkerPiece:
    """Tensors that are encoded together, and the shared values from which they are measured.

    Args:
        tensors: The parameters.
        base: The shared values, fp32 [num_elements], from which the progress is measured.
        wire: Format of the payload.
        error_feedback: Add the rounding errors of one encoding to the next.
    """

    def __init__(
        self, tensors: Sequence[Tensor], base: Tensor, wire: WireFormat, error_feedback: bool
    ) -> None:
        self.tensors, self.base = list(tensors), base
        self.layout = layout_of(base.numel(), wire)
        self.payload = empty_pages((self.layout.payload_bytes,), torch.uint8)
        self.residuals = Residuals(
            base.numel(),
            error_feedback=error_feedback,
            dtype=torch.float32,
            carries=False,
            decay=wire.feedback_decay,
        )

    def encode(self, key: int, is_stochastic: bool, impl: str) -> bool:
        """Encode the base minus the parameters into ``payload``.

        Args:
            key: Key of random rounding.

        Returns:
            False if a value is not finite or too large, so that the payload must not be sent.
        """
        bad = torch.zeros(1, dtype=torch.int64)
        ops.encode(
            self.base,
            self.tensors,
            self.payload,
            *self.layout.whole,
            stochastic=is_stochastic,
            rng_key=key,
            residual=self.residuals.value,
            new_residual=self.residuals.new,
            nonfinite=bad,
            impl=impl,
        )
        self.residuals.encoded()
        return not bad.item()

    def snapshot(self, impl: str) -> Tensor:
        """Return the parameters at the last ``encode``, as its payload determines them, fp32.

        With s the decoded payload, e the residual before the encoding, e' the error of the encoding
        (the new residual without its decay), and c(base) the base rounded to the parameters'
        dtypes, they are c(base) - s - e' + e. So no copy has to be kept.
        """
        then = self.held(self.base).sub_(decode(self.payload, self.layout, impl=impl))
        if self.residuals.new is not None and self.residuals.value is not None:
            then -= self.residuals.new / self.residuals.decay
            then += self.residuals.value
        return then

    def held(self, values: Tensor) -> Tensor:
        """Return shared values rounded to the parameters' dtypes, fp32: progress starts there."""
        return round_as(values.clone(), self.tensors)

    def write(self, impl: str) -> None:
        """Set the parameters to the shared ones."""
        ops.merge(self.base, self.tensors, impl=impl)

    def values(self) -> Tensor:
        """Return the present parameters, fp32 [num_elements]."""
        return torch.cat([memory_order(tensor) for tensor in self.tensors]).float()


class LocalModel:
    """The parameters of a worker by fragment, and the shared ones from which its round started.

    Args:
        model, optimizers: Define which parameters are exchanged, as in ``DiLoCo``.
        fragments: As in ``DiLoCo``.
        wire: Format of the payloads.
        error_feedback: Add the rounding errors of one encoding to the next.
        rounding, seed: As in ``DiLoCo``.
        name: Name of the worker; workers of different names draw different random numbers.
        impl: Force an implementation of the operators.

    Attributes:
        outer: The shared parameters, fp32 [num_elements] for each fragment.
        payloads, layouts: The encoded pseudo-gradient of each fragment.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        fragments: FragmentSpec = 1,
        wire: WireFormat,
        error_feedback: bool = False,
        rounding: str = "nearest",
        seed: int = 0,
        name: str = "",
        impl: str = "",
    ) -> None:
        named = trainable_parameters(model, list(optimizers))
        self.fragments = [f for f in make_fragments(model, named, fragments) if f.num_elements]
        self.sizes = [fragment.num_elements for fragment in self.fragments]
        self.wire, self.impl = wire, ops.resolve_impl(impl)
        self._is_stochastic, self._seed = rounding == "stochastic", seed
        self.rename(name)
        self.pieces = [
            WorkerPiece(
                fragment.tensors(), empty_pages((size,), torch.float32), wire, error_feedback
            )
            for fragment, size in zip(self.fragments, self.sizes, strict=True)
        ]
        self.outer = [piece.base for piece in self.pieces]
        self.layouts = [piece.layout for piece in self.pieces]
        self.payloads = [piece.payload for piece in self.pieces]

    def rename(self, name: str) -> None:
        """Set the worker's name, from which the random numbers of rounding are made."""
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._replica = int.from_bytes(digest, "little")

    @property
    def layout_hash(self) -> int:
        """Hash of names, shapes and dtypes in 62 bits, the same on all workers of one model."""
        return layout_hash(self.fragments)

    def encode(self, seq: int) -> bool:
        """Encode the pseudo-gradient of the round into the payloads.

        Args:
            seq: Number of the update, for stochastic rounding.

        Returns:
            False if some value is not finite.
        """
        pieces = self.present_pieces()
        keys = [
            rng_key(self._seed, self._replica, STAGE_ENCODE, seq, i) for i in range(len(pieces))
        ]
        pairs = zip(pieces, keys, strict=True)
        return all([piece.encode(key, self._is_stochastic, self.impl) for piece, key in pairs])

    def encode_parameters(self) -> tuple[list[Tensor], list[Layout]]:
        """Return the parameters as fp32 payloads, which the first worker sends to the server."""
        return whole_payloads(_flat(fragment).float() for fragment in self.fragments)

    def update_applied(self) -> None:
        """Note that the server has applied the update: the next encoding adds its residual."""
        for piece in self.pieces:
            piece.residuals.turn(0)

    def write(self) -> None:
        """Set the parameters to the shared ones, in place."""
        for piece in self.present_pieces():
            piece.write(self.impl)

    def read(self) -> None:
        """Set the shared parameters to the local ones."""
        for outer, fragment in zip(self.outer, self.fragments, strict=True):
            outer.copy_(_flat(fragment))

    def present_pieces(self) -> list[WorkerPiece]:
        """Return the pieces, with the fragments' present tensors."""
        for piece, fragment in zip(self.pieces, self.fragments, strict=True):
            fragment.refuse_changes()
            piece.tensors = fragment.tensors()
        return self.pieces


def _flat(fragment: Fragment) -> Tensor:
    """Return the parameters in memory order."""
    return torch.cat([memory_order(tensor) for tensor in fragment.tensors()])


def whole_payloads(flats: Iterable[Tensor]) -> tuple[list[Tensor], list[Layout]]:
    """Return fp32 values as payloads of the fp32 wire, for a server without parameters."""
    payloads, layouts = [], []
    for flat in flats:
        layout = layout_of(flat.numel(), WireFormat("fp32"))
        payload = empty_pages((layout.payload_bytes,), torch.uint8)
        payload.view(torch.float32)[: flat.numel()] = flat
        payloads.append(payload)
        layouts.append(layout)
    return payloads, layouts


def layout_hash(fragments: Sequence[Fragment]) -> int:
    """Return a hash of names, shapes and dtypes in 62 bits."""
    text = json.dumps(describe_parameters(fragments))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def beside_layout(model: nn.Module, fragments: Sequence[Fragment], checks: str) -> dict[str, Any]:
    """Return the optional fields of a worker's first message, by which the server compares models.

    Args:
        checks: With "off" the server compares no frozen parameters and buffers; with "warn" a
            difference is only a warning.
    """
    places = sorted(shared_memory(t for fragment in fragments for t in fragment.tensors()))
    # The first places are enough: models that share memory do so as a whole.
    found: dict[str, Any] = {"memory": places[:MAX_PLACES]} if places else {}
    if checks != "off":
        names = {name for fragment in fragments for name in fragment.names}
        tensors, buffers = unexchanged_tensors(model, names), buffer_names(model)
        found["unexchanged"] = [
            _digest({name: t for name, t in tensors.items() if (name in buffers) == is_buffer})
            for is_buffer in (False, True)
        ]
        found["warns"] = checks == "warn"
    return found


def _digest(tensors: Mapping[str, Tensor]) -> int:
    """Return one digest of the names and the bytes of tensors."""
    names = sorted(tensors)
    digests = each_digest([tensors[name] for name in names])
    text = json.dumps(list(zip(names, digests, strict=True)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Attachment(ABC):
    """Base of a training loop's attachment to a server: checks of the model, hooks, and the end."""

    # These are None until the constructor of the derived class has set them.
    _watch: ModelWatch | None = None
    _hooks: StepHooks | None = None
    _is_closed = False
    # Implementation of the operators.
    _impl = ""

    @abstractmethod
    def flush(self) -> object:
        """Send the training that the server does not have."""

    @abstractmethod
    def _shared_pieces(self) -> Iterable[WorkerPiece]:
        """Return the pieces with all parameters and the newest shared values here."""

    @abstractmethod
    def _unshared(self) -> tuple[str, int] | None:
        """Return words for this worker, and its inner step, if the server lacks training of it.

        None if the server has all of it.
        """

    @abstractmethod
    def _leave(self) -> None:
        """Leave the server; idempotent."""

    def _may_share(self) -> bool:
        """Return whether the end of a ``with`` block is to share the last steps."""
        return True

    def _watched_writes(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.writing()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Run a block with the newest shared parameters known here in the model, to evaluate."""
        with nullcontext() if self._watch is None else self._watch.paused():
            yield from self._swapped()

    def _swapped(self) -> Iterator[None]:
        pieces = list(self._shared_pieces())
        tensors = [tensor for piece in pieces for tensor in piece.tensors]
        kept = [tensor.clone() for tensor in tensors]
        for piece in pieces:
            piece.write(self._impl)
        try:
            yield
        finally:
            # A parameter may have got another storage meanwhile.
            tensors = [tensor for piece in self._shared_pieces() for tensor in piece.tensors]
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)

    def close(self) -> None:
        """Leave the server and remove the hooks; idempotent. Nothing is sent, see ``flush``."""
        try:
            self._warn_of_unshared_steps()
        finally:
            self._close()

    def _warn_of_unshared_steps(self) -> None:
        unshared = self._unshared()
        if unshared is not None and not self._is_closed and self._watch is not None:
            self._watch.warn_of_unshared_steps(*unshared)

    def _close(self) -> None:
        self._is_closed = True
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._watch is not None:
            self._watch.close()
        self._leave()

    def __reduce__(self) -> NoReturn:
        refuse_copy(
            self,
            "the server has its state; save the model's and the optimizer's state_dict(), and "
            f"construct a new {type(self).__name__} under the same name",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the server; unless the block has raised, share the last steps before."""
        try:
            if exception[:1] == (None,) and not self._is_closed:
                if self._may_share():
                    self.flush()
                # ``close`` warns if some steps are still not in the shared model.
                self.close()
        finally:
            if not self._is_closed:
                self._close()
