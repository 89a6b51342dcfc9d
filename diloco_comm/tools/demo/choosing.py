"""Run the demo that the options of ``diloco-comm demo`` ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .chaos import command as chaos
from .chaos import settings as chaos_settings
from .command import run
from .decoupled import settings as decoupled_settings
from .report.results import Claim
from .settings import DEFAULT, QUICK

# Options that say how the methods are compared: the script of --chaos has its own replicas.
_OF_LINK = ("gbps", "rtt_ms")
_OF_COMPARISON = ("replicas", "steps", "gbps", "rtt_ms")


def run_chosen(options: Mapping[str, Any], given: Collection[str]) -> Sequence[Claim]:
    """Run a demo and return its claims.

    Args:
        options: All options of the command, by the names of its arguments.
        given: Those that the user gave.

    Raises:
        ValueError: If an option cannot be.
        ReplicaError: If a replica failed.
        OSError: If a file cannot be written; its text is a sentence.
    """
    out, as_json = options["out"], options["as_json"]
    if options["chaos"] and options["decoupled"]:
        raise ValueError("--chaos and --decoupled exclude each other")
    if options["chaos"]:
        settings = _of_chaos(options, given)
        return chaos.run(settings, out, as_json=as_json).claims()
    if options["decoupled"]:
        # The server needs pyzmq, which may be missing.
        from .decoupled import command as decoupled

        return decoupled.run(_of_decoupled(options, given), out, as_json=as_json).claims()
    preset = QUICK if options["quick"] else DEFAULT
    comparison = dataclasses.replace(
        preset,
        data=options["data"],
        num_replicas=options["replicas"],
        num_steps=preset.num_steps if options["steps"] is None else options["steps"],
        sync_every=options["sync_every"],
        link_gbps=options["gbps"],
        link_rtt_ms=options["rtt_ms"],
    )
    return run(comparison, out, as_json=as_json).claims()


def _of_chaos(options: Mapping[str, Any], given: Collection[str]) -> chaos_settings.ChaosSettings:
    refused = [f"--{name.replace('_', '-')}" for name in _OF_COMPARISON if name in given]
    if refused:
        raise ValueError(f"--chaos has replicas and times of its own: leave out {refused[0]}")
    preset = chaos_settings.QUICK if options["quick"] else chaos_settings.DEFAULT
    every = options["sync_every"] if "sync_every" in given else preset.sync_every
    return dataclasses.replace(preset, data=options["data"], sync_every=every)


def _of_decoupled(
    options: Mapping[str, Any], given: Collection[str]
) -> decoupled_settings.DecoupledDemo:
    refused = [f"--{name.replace('_', '-')}" for name in _OF_LINK if name in given]
    if refused:
        raise ValueError(f"--decoupled has no emulated link: leave out {refused[0]}")
    preset = decoupled_settings.QUICK if options["quick"] else decoupled_settings.DEFAULT
    every = options["sync_every"] if "sync_every" in given else preset.sync_every
    return dataclasses.replace(
        preset,
        data=options["data"],
        num_learners=options["replicas"],
        num_steps=preset.num_steps if options["steps"] is None else options["steps"],
        sync_every=every,
    )
