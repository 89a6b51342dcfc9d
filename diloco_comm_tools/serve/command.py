"""``diloco-comm serve`` and its sub-commands, and ``diloco-comm replay``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from ..common.commands import (
    fail,
    given_options,
    in_options,
    is_for_below,
    misuse,
    option,
    rare,
    sentence_of,
    with_dataclasses,
)
from ..common.console import announcer
from ..common.hosts import Http, HttpToken, Listen, Server, closed_by_signal
from ..common.outputs import check_folder

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm serve --rule delayed --period 4 --sync-every 50 --snapshot snapshots
"""
DECOUPLED_EXAMPLES = """Examples:

\b
diloco-comm serve decoupled --quorum 2 --fragments 4 --wire-down int4 --snapshot snapshots
"""
STATUS_EXAMPLES = """Examples:

\b
diloco-comm serve status tcp://127.0.0.1:29500 --json
"""
TRUNCATE_EXAMPLES = """Examples:

\b
diloco-comm serve truncate --snapshot snapshots
"""
KEYGEN_EXAMPLES = """Examples:

\b
diloco-comm serve keygen keys --worker paris --worker tokyo
"""

REPLAY_EXAMPLES = """Examples:

\b
diloco-comm replay snapshots
"""

SyncEvery = Annotated[int, option("Inner steps of a round.")]
Keys = Annotated[Path | None, option("Folder of CURVE keys.")]


@dataclass(frozen=True)
class Serving:
    """The options of both servers."""

    snapshot: Annotated[Path | None, option("Folder of snapshot and journal.")] = None
    keys: Keys = None
    lost_after: Annotated[
        float, rare("Seconds of silence after which a worker counts as gone.")
    ] = 30.0
    snapshot_every: Annotated[
        int, rare("Updates, or merges of decoupled training, between two snapshots.")
    ] = 100
    insecure: Annotated[bool, rare("Listen on an open address without keys.", "--insecure")] = False


@dataclass(frozen=True)
class Rule:
    """When and how the server of asynchronous training takes an outer step."""

    lr: Annotated[float, option("Outer learning rate.")] = 0.7
    momentum: Annotated[float, option("Outer momentum.")] = 0.9
    period: Annotated[int, option("Updates of an outer step (delayed, buffer).")] = 4
    activation: Annotated[float, rare("c of delayed Nesterov, in [0, 1/N].")] = 0.0
    discount: Annotated[float, rare("Exponent of the staleness discount.")] = 0.0
    max_staleness: Annotated[int | None, rare("Refuse staler updates.")] = None


@dataclass(frozen=True)
class Merging:
    """The merges of decoupled training, and when they come."""

    quorum: Annotated[int, option("Learners that make a merge.")] = 1
    gamma: Annotated[float, option("Share of the slack that the grace window takes.")] = 0.5
    delay: Annotated[
        int,
        option("tau, inner steps in which a merge should be back; 0: no grace window."),
    ] = 0
    fragments: Annotated[str, option("A number, layers:N or sequential:N.")] = "1"
    wire: Annotated[str, option("Wire format of the reports.")] = "int8"
    wire_down: Annotated[str, option("Wire format of the commits.")] = "fp32"
    sync_every: SyncEvery = 50
    merge: Annotated[str, rare("rda or mean.")] = "rda"
    by_mean: Annotated[
        list[str] | None, rare("Names of parameters that merge by the mean; repeatable.")
    ] = None
    receipt: Annotated[str, rare("overwrite, carry or blend.")] = "overwrite"
    alpha: Annotated[float, rare("Weight of local parameters, for blend.")] = 0.5
    error_feedback: Annotated[bool, rare("Reports carry their errors.", "--error-feedback")] = False
    shard: Annotated[str, rare("i/S, this syncer has the fragments i, i+S, ...")] = "0/1"


@dataclass(frozen=True)
class Tape:
    """The part of a decoupled run that is kept."""

    keep_tape: Annotated[bool, rare("Keep all journals in --snapshot.", "--keep-tape")] = False
    drop_tape: Annotated[bool, rare("Remove the tape in --snapshot.", "--drop-tape")] = False


class ModelServer(Server, Protocol):
    """A server of asynchronous or decoupled training."""

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types; any thread may ask."""
        ...


serve_app = typer.Typer(epilog=EXAMPLES)


@serve_app.callback(invoke_without_command=True)
@with_dataclasses
def serve(
    context: typer.Context,
    *,
    listen: Listen = "127.0.0.1:29500",
    rule: Annotated[str, option("delayed, nesterov, heavy-ball, sgd or buffer.")] = "delayed",
    of_rule: Rule,
    serving: Serving,
    sync_every: SyncEvery = 50,
    dylu: Annotated[bool, option("Fewer steps for slower workers.", "--dylu")] = False,
    grace: Annotated[float, option("Seconds of the grace period.")] = 0.0,
    model_sizes: Annotated[
        float, rare("Memory of the server in fp32 models, for rule and updates.")
    ] = 4.0,
    http: Http = None,
    http_token: HttpToken = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Host the shared model of asynchronous training until Ctrl-C or SIGTERM.

    Workers attach with AsyncDiLoCo.
    """
    if is_for_below(context, given_options(context)):
        return

    def make() -> ModelServer:
        from diloco_comm.asynchronous.server import AsyncServer

        from .status import make_rule

        made = make_rule(rule, **asdict(of_rule))
        return AsyncServer(
            made,
            listen=listen,
            sync_every=sync_every,
            dylu=dylu,
            grace=grace,
            model_sizes=model_sizes,
            **vars(serving),
        )

    _host(context, make, serving.snapshot, as_json=as_json)


@serve_app.command(epilog=DECOUPLED_EXAMPLES)
@with_dataclasses
def decoupled(
    context: typer.Context,
    *,
    listen: Listen = "127.0.0.1:29500",
    rule: Annotated[str, option("nesterov, heavy-ball or sgd.")] = "nesterov",
    lr: Annotated[float, option("Outer learning rate.")] = 0.7,
    momentum: Annotated[float, option("Outer momentum.")] = 0.9,
    merging: Merging,
    serving: Serving,
    tape: Tape,
    model_sizes: Annotated[
        float | None, rare("Memory of the server in fp32 models, for merges and reports.")
    ] = None,
    http: Http = None,
    http_token: Annotated[Path | None, rare("File with the page's password.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Host the syncer of decoupled training until Ctrl-C or SIGTERM.

    Learners attach with DecoupledDiLoCo.
    """

    def make() -> ModelServer:
        from .status import make_server

        outer = {"name": rule, "lr": lr, "momentum": momentum}
        sizes = {} if model_sizes is None else {"model_sizes": model_sizes}
        options = {"listen": listen, **vars(serving), **vars(tape), **sizes}
        return make_server(vars(merging), outer, options)

    _host(context, make, serving.snapshot, as_json=as_json)


@serve_app.command(epilog=STATUS_EXAMPLES)
def status(
    context: typer.Context,
    server: Annotated[str, typer.Argument(metavar="ADDRESS", help="The server's tcp://host:port.")],
    keys: Keys = None,
    key_name: Annotated[str, option("Pair of keys.")] = "worker",
    watch: Annotated[bool, option("Show the status every second.", "--watch")] = False,
    timeout: Annotated[float, option("Seconds to wait.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the status of a server of asynchronous or decoupled training."""
    from diloco_comm.asynchronous.link import ServerLost
    from diloco_comm.base.service.addresses import parse_address, tcp_address

    from .status import show_status

    if watch and as_json:
        misuse("--watch and --json exclude each other: call status --json as often as you like")
    options = {"keys": keys, "key_name": key_name, "timeout": timeout}
    try:
        address = tcp_address(*parse_address("address", server))
        show_status(address, as_json=as_json, watch=watch, **options)
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    except ServerLost as error:
        asked = "is it running, and does it want --keys?"
        if keys is not None:
            asked = f"is it running, and does it know the keys in --keys {keys}?"
        fail(f"the server {address} has not answered for {error.seconds:.1f} s: {asked}")


@serve_app.command(epilog=TRUNCATE_EXAMPLES)
def truncate(
    snapshot: Annotated[Path | None, option("The server's folder of snapshot and journal.")] = None,
) -> None:
    """Cut a damaged journal at the damage, and say what was cut off."""
    from diloco_comm.asynchronous.snapshots import truncate_journal
    from diloco_comm.base.log import DamagedLog

    if snapshot is None:
        misuse("truncate needs --snapshot, the folder with the journal")
    try:
        print(truncate_journal(snapshot))
    except (ValueError, OSError, DamagedLog) as error:
        fail(sentence_of(error))


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
    from .status import snapshot_of

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
