"""The sub-commands ``diloco-comm serve``, with its own ``keygen``, and ``diloco-comm replay``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from ..common.console import announcer
from ..common.exits import fail, given_options, in_options, misuse, sentence_of
from ..common.hosts import Http, HttpToken, Listen, Server, closed_by_signal
from ..common.outputs import check_folder

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm serve --rule delayed --period 4 --sync-every 50 --snapshot snapshots
diloco-comm serve --decoupled --quorum 2 --fragments 4 --wire-down int4 --snapshot snapshots
diloco-comm serve --status tcp://127.0.0.1:29500 --json
"""
KEYGEN_EXAMPLES = """Examples:

\b
diloco-comm serve keygen keys --worker paris --worker tokyo
"""

REPLAY_EXAMPLES = """Examples:

\b
diloco-comm replay snapshots
"""

# Options of one kind of server alone.
DECOUPLED_OPTIONS = (
    "quorum", "gamma", "delay", "fragments", "merge", "by_mean", "wire", "wire_down", "receipt",
    "alpha", "error_feedback", "shard", "keep_tape", "drop_tape",
)  # fmt: skip
_OF_RULE = ("lr", "momentum", "period", "activation", "discount", "max_staleness")
_OF_SERVER = ("listen", "lost_after", "snapshot", "snapshot_every", "keys", "insecure")
ASYNCHRONOUS_OPTIONS = ("period", "activation", "discount", "max_staleness", "dylu", "grace")


class ModelServer(Server, Protocol):
    """A server of asynchronous or decoupled training."""

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types; any thread may ask."""
        ...


serve_app = typer.Typer(
    help="Host a server of asynchronous or decoupled training, show its status, make its keys.",
    epilog=EXAMPLES,
)


@serve_app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    listen: Listen = "127.0.0.1:29500",
    rule: Annotated[
        str,
        typer.Option(
            help="delayed, nesterov, heavy-ball, sgd or buffer; "
            "--decoupled: nesterov, heavy-ball or sgd."
        ),
    ] = "delayed",
    lr: Annotated[float, typer.Option(help="Outer learning rate.")] = 0.7,
    momentum: Annotated[float, typer.Option(help="Outer momentum.")] = 0.9,
    period: Annotated[int, typer.Option(help="Updates of an outer step (delayed, buffer).")] = 4,
    activation: Annotated[float, typer.Option(help="c of delayed Nesterov, in [0, 1/N].")] = 0.0,
    discount: Annotated[float, typer.Option(help="Exponent of the staleness discount.")] = 0.0,
    max_staleness: Annotated[int | None, typer.Option(help="Refuse staler updates.")] = None,
    sync_every: Annotated[int, typer.Option(help="Inner steps of a round.")] = 50,
    dylu: Annotated[bool, typer.Option("--dylu", help="Fewer steps for slower workers.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds of the grace period.")] = 0.0,
    lost_after: Annotated[
        float, typer.Option(help="Seconds of silence after which a worker counts as gone.")
    ] = 30.0,
    snapshot: Annotated[Path | None, typer.Option(help="Folder of snapshot and journal.")] = None,
    snapshot_every: Annotated[
        int, typer.Option(help="Updates (--decoupled: merges) between two snapshots.")
    ] = 100,
    model_sizes: Annotated[
        float, typer.Option(help="Memory of the server in fp32 models, for rule and updates.")
    ] = 4.0,
    decoupled: Annotated[
        bool, typer.Option("--decoupled", help="Host the syncer of decoupled training.")
    ] = False,
    quorum: Annotated[int, typer.Option(help="--decoupled: learners that make a merge.")] = 1,
    gamma: Annotated[
        float, typer.Option(help="--decoupled: share of the slack that the grace window takes.")
    ] = 0.5,
    delay: Annotated[
        int,
        typer.Option(
            help="--decoupled: tau, inner steps in which a merge should be back; "
            "0: no grace window."
        ),
    ] = 0,
    fragments: Annotated[
        str, typer.Option(help="--decoupled: a number, layers:N or sequential:N.")
    ] = "1",
    merge: Annotated[str, typer.Option(help="--decoupled: rda or mean.")] = "rda",
    by_mean: Annotated[
        list[str] | None,
        typer.Option(help="--decoupled: names of parameters that merge by the mean; repeatable."),
    ] = None,
    wire: Annotated[str, typer.Option(help="--decoupled: format of the reports.")] = "int8",
    wire_down: Annotated[str, typer.Option(help="--decoupled: format of the commits.")] = "fp32",
    receipt: Annotated[
        str, typer.Option(help="--decoupled: overwrite, carry or blend.")
    ] = "overwrite",
    alpha: Annotated[
        float, typer.Option(help="--decoupled: weight of local parameters, for blend.")
    ] = 0.5,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback", help="--decoupled: reports carry their errors.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="--decoupled: i/S, this syncer has the fragments i, i+S, ...")
    ] = "0/1",
    keep_tape: Annotated[
        bool, typer.Option("--keep-tape", help="--decoupled: keep all journals in --snapshot.")
    ] = False,
    drop_tape: Annotated[
        bool, typer.Option("--drop-tape", help="--decoupled: remove the tape in --snapshot.")
    ] = False,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Cut a damaged journal in --snapshot at the damage, and end."
        ),
    ] = False,
    keys: Annotated[Path | None, typer.Option(help="Folder of CURVE keys.")] = None,
    key_name: Annotated[str, typer.Option(help="Pair of keys for --status.")] = "worker",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on an open address without keys.")
    ] = False,
    http: Http = None,
    http_token: HttpToken = None,
    status: Annotated[
        str | None, typer.Option(help="Show the status of the server at this tcp://host:port.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="With --status: every second.")] = False,
    timeout: Annotated[float, typer.Option(help="With --status: seconds to wait.")] = 5.0,
) -> None:
    """Host the shared model until Ctrl-C or SIGTERM.

    Workers attach with AsyncDiLoCo; with --decoupled, learners attach with DecoupledDiLoCo.
    """
    if context.invoked_subcommand is not None:
        return
    if http is not None and (status is not None or truncate):
        misuse("--http does not go with --status or --truncate, which host nothing")
    if watch and status is None:
        misuse("--watch is for --status: it shows a server that runs, and hosts none")
    if watch and as_json:
        misuse("--watch and --json exclude each other: call --status --json as often as you like")
    if status is not None:
        _show(context)
        return
    if truncate:
        _truncate(snapshot)
        return
    options = given_options(context)
    of_the_other = ASYNCHRONOUS_OPTIONS if decoupled else DECOUPLED_OPTIONS
    used = next((options[name] for name in of_the_other if name in options), None)
    if used is not None:
        misuse(f"{used} does not go with --decoupled" if decoupled else f"{used} needs --decoupled")
    make = _make_decoupled if decoupled else _make_asynchronous
    _host(context, partial(make, context.params, options), snapshot, as_json=as_json)


def _show(context: typer.Context) -> None:
    """Show the status of a server, and end with a sentence if there is no answer."""
    from diloco_comm.asynchronous.worker.link import ServerLost
    from diloco_comm.base.service.addresses import parse_address, tcp_address

    from .run import show_status

    names = ("as_json", "watch", "keys", "key_name", "timeout")
    options, keys = {name: context.params[name] for name in names}, context.params["keys"]
    try:
        address = tcp_address(*parse_address("status", context.params["status"]))
        show_status(address, **options)
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    except ServerLost as error:
        asked = "is it running, and does it want --keys?"
        if keys is not None:
            asked = f"is it running, and does it know the keys in --keys {keys}?"
        fail(f"the server {address} has not answered for {error.seconds:.1f} s: {asked}")


def _truncate(snapshot: Path | None) -> None:
    """Cut a damaged journal at the damage, and say what was cut off."""
    from diloco_comm.asynchronous.server.storage.snapshots import truncate_journal
    from diloco_comm.base.log import DamagedLog

    if snapshot is None:
        misuse("--truncate needs --snapshot, the folder with the journal")
    try:
        print(truncate_journal(snapshot))
    except (ValueError, OSError, DamagedLog) as error:
        fail(sentence_of(error))


def _make_asynchronous(options: dict[str, Any], given: dict[str, str]) -> ModelServer:
    from diloco_comm.asynchronous.server.server import AsyncServer

    from .run import make_rule

    rule = make_rule(options["rule"], **{name: options[name] for name in _OF_RULE})
    names = (*_OF_SERVER, "sync_every", "dylu", "grace", "model_sizes")
    return AsyncServer(rule, **{name: options[name] for name in names})


def _make_decoupled(options: dict[str, Any], given: dict[str, str]) -> ModelServer:
    from .run import make_server

    rule = options["rule"] if "rule" in given else "nesterov"
    outer = {"name": rule, "lr": options["lr"], "momentum": options["momentum"]}
    tape = ("keep_tape", "drop_tape")
    settings = [name for name in (*DECOUPLED_OPTIONS, "sync_every") if name not in tape]
    names = [*_OF_SERVER, *tape, *(["model_sizes"] if "model_sizes" in given else [])]
    return make_server(
        {name: options[name] for name in settings}, outer, {name: options[name] for name in names}
    )


@closed_by_signal()
def _host(
    context: typer.Context,
    make: Callable[[], ModelServer],
    snapshot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Host a server until a signal, and end with a sentence if an option is wrong."""
    from diloco_comm.base.log import DamagedLog

    from ..common.hosts import page_beside, place_of_page, serve_until_signal
    from .run import snapshot_of

    try:
        check_folder("--snapshot", snapshot, may_be_full=True)
        place, server = place_of_page(context), make()
        with page_beside(place, lambda: snapshot_of(server.report())) as page:
            serve_until_signal(server, announcer(as_json, page))
    except (ValueError, TypeError) as error:
        misuse(in_options(str(error), context.params))
    except (OSError, DamagedLog) as error:
        fail(sentence_of(error))


@serve_app.command(epilog=KEYGEN_EXAMPLES)
def keygen(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys.")] = Path("keys"),
    worker: Annotated[
        list[str] | None, typer.Option(help="Name of a worker's pair; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths in JSON.")] = False,
) -> None:
    """Make CURVE keys for a server and its workers."""
    from ..keys.command import write_keys

    write_keys(folder, worker, as_json=as_json)


def replay(
    tape: Annotated[Path, typer.Argument(help="Snapshot folder of a syncer that has ended.")],
    every: Annotated[
        bool, typer.Option("--every", help="Print a line for each merge: who, how many steps.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Repeat the merges of decoupled training, and compare each with the tape to the bit.

    The tape begins with the run if the syncer had --keep-tape, else with its newest snapshot.
    """
    from diloco_comm.asynchronous.decoupled.tape import replay as repeat
    from diloco_comm.base.log import DamagedLog

    def show(record: dict[str, Any], model: object) -> None:
        if as_json:
            print(json.dumps(record))
            return
        rows = zip(record["reports"], record["weights"], strict=True)
        reports = ", ".join(
            f"{name} ({steps} steps, {tokens} tokens, weight {weight:.4f})"
            for (name, _, _, steps, tokens), weight in rows
        )
        print(f"fragment {record['fragment']} version {record['version']}: {reports}")

    try:
        done = repeat(tape, show if every else lambda record, model: None)
    except (ValueError, OSError, DamagedLog) as error:
        fail(sentence_of(error))
    if as_json:
        print(json.dumps({"schema": 1, **dataclasses.asdict(done)}))
        return
    print(
        f"merges {done.first + 1} to {done.last} give the same bits: {done.reports} reports of "
        f"{len(done.learners)} learners"
        if done.last > done.first
        else f"the tape has no merge after the snapshot of merge {done.first}"
    )
    if done.first:
        print(
            f"merges 1 to {done.first} are not on the tape: the syncer ran without --keep-tape, or "
            "began its tape later"
        )
    if done.is_compared:
        print("the newest snapshot has the same bits too")
