"""A worker of asynchronous training, attached to an ordinary training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..base import env, recording
from ..base.checks import choice, logger_of, timeout_seconds, warn
from ..base.errors import NonFiniteError
from ..base.trace import span
from ..ops.wire import WireFormat, WireName, parse
from ..ops.wire_options import check_training
from ..options import Link, NonFinite, Wire, choices_among, closed
from ..replica.fragments import FragmentSpec
from ..replica.hooks import StepHooks, hookable
from ..replica.model_watch import CHECKS, Checks, ModelWatch, server_has_weights, warn_at_exit
from .downloads import Download, Follower
from .link import Link as ServerLink
from .link import ServerLost
from .local import Attachment, LocalModel, WorkerPiece, beside_layout

logger = logger_of(__name__)

# The options inside ``wire=``, ``link=`` and ``nonfinite=`` that a worker has, with defaults.
_CHOICES = {
    "wire": "int8",
    "block_size": None,
    "rounding": "nearest",
    "seed": 0,
    "error_feedback": False,
    "timeout": None,
    "on_nonfinite": "raise",
}


@dataclass(frozen=True)
class RoundMetrics:
    """The figures of one round of a worker.

    Attributes:
        seq: Number of the update.
        started_from: Version of the shared model from which the round started.
        version: Version of the shared model after the update.
        staleness: Versions that other updates made meanwhile; -1 if the update was refused.
        refusal, reason: Why the server refused the update; "" if it was applied.
        steps: Inner steps of the round.
        train_s, encode_s, push_s, pull_s: Seconds of the round's stages.
        sent_bytes, received_bytes: Bytes that the worker sent and received in the round.
    """

    seq: int
    started_from: int
    version: int
    staleness: int
    refusal: str
    reason: str
    steps: int
    train_s: float
    encode_s: float
    push_s: float
    pull_s: float
    sent_bytes: int
    received_bytes: int


class AsyncDiLoCo(Attachment):
    """Send an update after each round of inner steps, and continue from the server's newest model.

    Args:
        model, optimizer: As in ``DiLoCo``; parameters are written in place.
        server: ``tcp://host:port`` of a ``diloco-comm serve`` or an ``AsyncServer``.
        name: Name of this worker, unique. After a restart the same name continues the count of
            updates. The default is made from the host and the rank (node7-rank3), or from the host
            and the process where no launcher gave a rank (node7-pid4242). If a live worker has the
            default name, a number is added: node7-rank3-2.
        fragments: As in ``DiLoCo``, the same on all workers.
        wire: The format of an update ("int8"): a name, or ``Wire``. Each worker may have another
            one. One wire is for all parameters; no ``feedback_decay``, no ``align_tensors``.
        link: ``Link(timeout=...)``: seconds of the server's silence after which ``ServerLost`` is
            raised. The default is ``DILOCO_COMM_TIMEOUT_S``, or 1800.
        nonfinite: "raise" (default) or "skip" a round whose values are not finite. The worker
            throws a skipped round away and continues from the newest shared model.
        fetch: How the worker gets the server's newest parameters, which are exact either way.
            "parameters" (default) fetches the parameters. "updates" keeps a copy of the rule's
            buffers on the worker and fetches the other workers' encoded updates, which are fewer
            bytes with few workers.
        keys, key_name: Folder of CURVE keys, and the name of this worker's pair.
        on_round: Called with ``RoundMetrics`` after every round.
        impl: Force an implementation of the operators.
        attach: With False the user calls ``step()`` after each optimizer step, and the optimizer
            may be any object with ``param_groups``.
        checks: As in ``DiLoCo``; weights that are loaded before the first step are refused too,
            because the server's model is there already.

    The server decides how many inner steps a round has. If the server is silent at the end of a
    round, ``step`` waits. After ``timeout``, ``step`` raises ``ServerLost`` and leaves the
    parameters as they are; the next call sends the same update again, unless the server has
    answered it, and fetches the parameters. ``step`` also raises
    ``ServerLost`` if the server was restarted from an older state; the next call then sends the
    update to the restarted server.

    Raises:
        ValueError, TypeError: For invalid arguments.
        ServerRefused: If the server refuses this worker: its model differs, or its name is taken.
        ServerLost: If no server answers.
    """

    _watch: ModelWatch

    @closed
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        server: str,
        name: str | None = None,
        fragments: FragmentSpec = 1,
        wire: WireName | WireFormat | Wire = "int8",
        link: Link | None = None,
        nonfinite: Literal["raise", "skip"] | NonFinite = "raise",
        fetch: Literal["parameters", "updates"] = "parameters",
        keys: str | Path | None = None,
        key_name: str = "worker",
        on_round: Callable[[RoundMetrics], None] | None = None,
        impl: str = "",
        attach: bool = True,
        checks: Checks = "raise",
    ) -> None:
        groups = {"wire": wire, "link": link, "nonfinite": nonfinite}
        choices = choices_among("AsyncDiLoCo", groups, _CHOICES)
        timeout, on_nonfinite = choices["timeout"], choices["on_nonfinite"]
        rounding, seed = choices["rounding"], choices["seed"]
        error_feedback = choices["error_feedback"]
        choice("checks", checks, CHECKS)
        choice("rounding", rounding, ("nearest", "stochastic"))
        choice("nonfinite", on_nonfinite, ("raise", "skip"))
        wire = parse(choices["wire"], choices["block_size"])
        check_training(wire, rounding=rounding, error_feedback=error_feedback)
        choice("fetch", fetch, ("parameters", "updates"))
        seconds = timeout_seconds(env.timeout_s() if timeout is None else timeout)
        recording.start_if_asked()
        self.on_nonfinite, self.on_round = on_nonfinite, on_round
        optimizers = hookable(optimizer, attach=attach)
        self._local = LocalModel(
            model,
            optimizers,
            fragments=fragments,
            wire=wire,
            error_feedback=error_feedback,
            rounding=rounding,
            seed=seed,
            impl=impl,
        )
        self._impl = self._local.impl
        self._follower = Follower(self._local.outer, impl, follows=fetch == "updates")
        sizes, layout = self._local.sizes, self._local.layout_hash
        self._link = ServerLink(
            server, name, sizes, layout, timeout=seconds, keys=keys, key_name=key_name
        )
        self._link.identity.model |= beside_layout(model, self._local.fragments, checks)
        self.inner_step = self.round_step = 0
        self._is_encoded = self._is_pushed = False
        self._sent: tuple[int, int] = (0, 0)
        try:
            self._attach()
        except BaseException:
            self._link.close()
            raise
        if self._link.warning:
            warn(self._link.warning, RuntimeWarning)
        self._watch = ModelWatch(
            model,
            optimizers,
            self._local.fragments,
            server_has_weights,
            checks,
            sync_every=self.round_steps,
            is_hooked=attach,
        )
        if attach:
            self._hooks = StepHooks(optimizers, self.step)
        warn_at_exit(self)

    # ----------------------------------------------------------------------------------- attach

    def _attach(self) -> None:
        self._link.hello()
        if self._link.needs_start:
            payloads, layouts = self._local.encode_parameters()
            self._link.push(0, payloads, layouts, steps=0, seconds=0.0, is_start=True)
        self._begin_round()

    def _begin_round(self) -> None:
        """Fetch the newest parameters, write them into the model, and start to count steps."""
        download = Download(self._link.send, self._follower)
        self.version, self.round_steps = self._link.fetch(download)
        self._local.write()
        self.round_step = 0
        self._is_encoded = self._is_pushed = False
        self._began_at = time.monotonic()
        self._sent = (self._link.sent_bytes, self._link.received_bytes)

    # ---------------------------------------------------------------------------------- training

    @property
    def name(self) -> str:
        """The worker's name; a default name changes if another worker takes it."""
        return self._link.worker

    @property
    def seq(self) -> int:
        """Sequence number of the newest update whose outcome the worker knows."""
        return self._link.identity.next_seq - 1

    @property
    def due_in(self) -> int:
        """Inner steps until the end of the round."""
        return max(0, self.round_steps - self.round_step)

    def step(self) -> None:
        """Count one inner step; at the end of a round send the update and fetch the parameters.

        Raises:
            ServerLost: The server was silent for ``timeout``, or was restarted from an older state;
                the next step tries again.
            NonFiniteError: This worker's values are not finite; nothing was sent.
        """
        self._watch.stepped()
        self.inner_step += 1
        self.round_step += 1
        if self.round_step >= self.round_steps:
            self._end_round()

    def flush(self) -> None:
        """End the round now, if it has had at least one step."""
        if self.round_step:
            self._end_round()

    def _end_round(self) -> None:
        try:
            self._exchange()
        except ServerLost as error:
            if error.went_back_to is not None:
                self._go_back(error.went_back_to)
            raise

    def _go_back(self, version: int) -> None:
        """Forget versions later than this one, as a restarted server has lost them."""
        self.version = min(self.version, version)
        self._follower.lose()
        self._follower.own = None

    def _exchange(self) -> None:
        times = [time.monotonic()]
        if not self._is_encoded:
            # From now on the update does not change: after a failure the same bytes are sent again.
            self._trained = (self.round_step, times[0] - self._began_at)
            self._follower.own = None
            self._local.rename(self.name)
            self._watch.before_send()
            with span("encode", 0, self.seq + 1):
                if not self._local.encode(self.seq + 1):
                    self._drop()
                    return
            self._is_encoded = True
        times.append(time.monotonic())
        if not self._is_pushed:
            self._outcome = self._push()
            self._is_pushed = True
        times.append(time.monotonic())
        started_from, outcome = self.version, self._outcome
        traffic = self._sent
        with span("pull", 0, self.seq), self._watch.writing():
            self._begin_round()
        times.append(time.monotonic())
        self._report_round(started_from, outcome.version, outcome.meta, traffic, times)

    def _push(self):  # type: ignore[no-untyped-def]
        steps, seconds = self._trained
        with span("push", 0, self.seq + 1):
            outcome = self._link.push(
                self.version,
                self._local.payloads,
                self._local.layouts,
                steps=steps,
                seconds=seconds,
                follows=self._follower.version is not None,
            )
        if outcome.meta["refusal"]:
            logger.warning("%s", outcome.meta["reason"])
        else:
            self._local.update_applied()
            self._follower.own = (outcome.version, self._local.payloads, self._local.layouts)
        return outcome

    def _drop(self) -> None:
        """Raise, or drop the round, as its values are not finite."""
        if self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"worker {self.name}: the parameters of round {self.seq + 1} are not finite; "
                "nothing was sent"
            )
        logger.warning("the values of round %d are not finite: it is thrown away", self.seq + 1)
        self._begin_round()

    def _report_round(
        self,
        started_from: int,
        version: int,
        meta: dict,
        traffic: tuple[int, int],
        times: list[float],
    ) -> None:
        if self.on_round is None:
            return
        steps, seconds = self._trained
        self.on_round(
            RoundMetrics(
                self.seq,
                started_from,
                version,
                meta["staleness"],
                meta["refusal"],
                meta["reason"],
                steps,
                seconds,
                times[1] - times[0],
                times[2] - times[1],
                times[3] - times[2],
                self._link.sent_bytes - traffic[0],
                self._link.received_bytes - traffic[1],
            )
        )

    # -------------------------------------------------------------------------------- the end

    def _shared_pieces(self) -> list[WorkerPiece]:
        return self._local.present_pieces()

    def _unshared(self) -> tuple[str, int] | None:
        return (f"worker {self.name}", self.inner_step) if self.round_step else None

    def _leave(self) -> None:
        try:
            self._link.leave()
        except ServerLost:
            pass
        self._link.close()

    def _may_share(self) -> bool:
        # If an update has not been taken by the server, another try could block for ``timeout``.
        return not self._is_encoded
