"""The sub-commands of ``diloco-comm``, one function each.

A sub-command imports its modules when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from diloco_comm import __version__

from .bench import command as bench
from .common.commands import fail, given_options, in_sentences, misuse, sentence_of
from .common.console import announcer, new_console, present
from .common.hosts import (
    AddressAsJson,
    Http,
    HttpToken,
    Listen,
    RelayPort,
    StoreKeys,
    closed_by_signal,
    host_store,
    opened_relay,
    page_beside,
    place_of_page,
    relay_facts,
    serve_until_signal,
)
from .common.outputs import check_folder
from .doctor.command import EXAMPLES as DOCTOR_EXAMPLES
from .doctor.command import doctor
from .keys.command import keys_app
from .launch.command import EXAMPLES as LAUNCH_EXAMPLES
from .launch.command import SETTINGS as LAUNCH_SETTINGS
from .launch.command import launch
from .plan.command import plan_app
from .profile.command import profile
from .registry.members import EXAMPLES as MEMBERS_EXAMPLES
from .registry.members import members
from .report.command import EXAMPLES as REPORT_EXAMPLES
from .report.command import report
from .serve.command import REPLAY_EXAMPLES, replay, serve_app

# The paragraphs behind \b keep their line breaks.
DEMO_EXAMPLES = """Examples:

\b
diloco-comm demo --quick
diloco-comm demo --chaos --quick
diloco-comm demo --decoupled --quick
"""
REGISTRY_EXAMPLES = """Examples:

\b
diloco-comm registry --journal journal
diloco-comm registry --journal journal --listen 10.0.0.5:29400 --keys keys
"""
STORE_EXAMPLES = """Examples:

\b
diloco-comm store --listen 127.0.0.1:29400
diloco-comm store --listen 0.0.0.0:29400 --keys keys
"""
RELAY_EXAMPLES = """Examples:

\b
diloco-comm relay --listen 127.0.0.1:29800
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Low-communication training for PyTorch: DiLoCo and its relatives."""


app.command(epilog=DOCTOR_EXAMPLES)(doctor)
app.command(epilog=REPORT_EXAMPLES)(report)
app.command(epilog=MEMBERS_EXAMPLES)(members)
app.command(epilog=LAUNCH_EXAMPLES, context_settings=LAUNCH_SETTINGS)(launch)
app.command(epilog=REPLAY_EXAMPLES)(replay)
app.add_typer(plan_app, name="plan")
app.add_typer(profile, name="profile")
app.add_typer(bench.app, name="bench")
app.add_typer(serve_app, name="serve")
app.add_typer(keys_app, name="keys")


@app.command(epilog=DEMO_EXAMPLES)
def demo(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: about a minute.")] = False,
    chaos: Annotated[
        bool,
        typer.Option("--chaos", help="Kill, stop and start replicas while they train, instead."),
    ] = False,
    decoupled: Annotated[
        bool,
        typer.Option("--decoupled", help="A slow learner, and one that is killed, instead."),
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Text to learn instead of Python's own sources.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path(
        "demo-results"
    ),
    replicas: Annotated[int, typer.Option(help="Local processes, one replica each.")] = 4,
    steps: Annotated[
        int | None, typer.Option(help="Inner steps of every run, a multiple of --sync-every.")
    ] = None,
    sync_every: Annotated[
        int,
        typer.Option(help="Inner steps between two outer steps; 10 with --chaos or --decoupled."),
    ] = 50,
    gbps: Annotated[float, typer.Option(help="Bandwidth of the emulated link, Gbit/s.")] = 0.5,
    rtt_ms: Annotated[float, typer.Option(help="Round trip of the emulated link, ms.")] = 10.0,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with status 1 unless all claims hold.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; progress and tables go to stderr.")
    ] = False,
) -> None:
    """Train a small language model on local replicas: DDP, FedAvg and DiLoCo side by side.

    With --chaos, train once with elastic membership, while replicas and their registry are killed,
    stopped and started. With --decoupled, train with learners that never wait: one is slow, and one
    is killed.
    """
    from .demo.crew import ReplicaError
    from .demo.settings import OPTIONS, chosen

    began = time.perf_counter()
    with in_sentences(failures=(OSError, ReplicaError)):
        check_folder("--out", out)
        if chaos and decoupled:
            raise ValueError("--chaos and --decoupled exclude each other")
        name = "chaos" if chaos else "decoupled" if decoupled else "comparison"
        given = set(given_options(context)) & {*OPTIONS, "sync_every", "data"}
        settings = chosen(name, quick, {option: context.params[option] for option in given})
        console = new_console(stderr=as_json)
        # The server of decoupled training needs pyzmq, which may be missing.
        run = importlib.import_module(f".demo.{name}", __package__).run
        results = run(settings, console)
        seconds = time.perf_counter() - began
        claims = present(console, results, out, seconds, as_json=as_json)
    if check and not all(claim.holds for claim in claims):
        raise typer.Exit(1)


@app.command(epilog=REGISTRY_EXAMPLES)
def registry(
    context: typer.Context,
    journal: Annotated[
        Path | None,
        typer.Option(help="Folder of the journal; without it a restart forgets all runs."),
    ] = None,
    listen: Listen = "127.0.0.1:29400",
    keys: StoreKeys = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on an open address without keys.")
    ] = False,
    drop_after: Annotated[
        float, typer.Option(help="Seconds after which a silent replica's last beat is dropped.")
    ] = 600.0,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a damaged journal off at the damage, keep the rest beside it, and end.",
        ),
    ] = False,
    relay_port: RelayPort = None,
    http: Http = None,
    http_token: HttpToken = None,
    as_json: AddressAsJson = False,
) -> None:
    """Host the registry at which replicas agree on their group, until Ctrl-C or SIGTERM.

    One registry serves many runs. Training goes on while the registry is away; only changes of the
    group wait. The registry is a store, too: see diloco-comm store.
    """
    with in_sentences():
        check_folder("--journal", journal, may_be_full=True)
    if truncate:
        if http is not None:
            misuse("--http does not go with --truncate, which hosts nothing")
        _truncate(journal)
        return
    options = {"journal": journal, "keys": keys, "insecure": insecure, "drop_after": drop_after}
    host_store(context, listen, relay_port, as_json=as_json, **options)


@app.command(epilog=STORE_EXAMPLES)
def store(
    context: typer.Context,
    listen: Listen = "127.0.0.1:29400",
    relay_port: RelayPort = None,
    keys: StoreKeys = None,
    http: Http = None,
    http_token: HttpToken = None,
    as_json: AddressAsJson = False,
) -> None:
    """Host the store at which replicas find each other, until Ctrl-C or SIGTERM.

    The store must outlive the replicas, which reach it by
    DiLoCo(..., peers=StorePeers("tcp://host:port", ...)). Without keys, anyone who can reach the
    port can write to the store: listen on a network that you trust. With --keys, connections are
    encrypted and replicas need Link("tcp", keys=...), with an allowed key.
    """
    host_store(context, listen, relay_port, as_json=as_json, keys=keys, insecure=True)


def _truncate(journal: Path | None) -> None:
    """Cut a journal off at its damage; unlike a server, this ends with an error after a signal."""
    from diloco_comm.base.log import DamagedLog
    from diloco_comm.elastic.registry.journal import FILE, Journal

    if journal is None or not os.path.lexists(journal / FILE):
        misuse("--truncate needs --journal with the folder of a journal")
    try:
        opened = Journal(journal, truncates=True)
    except (OSError, DamagedLog) as error:
        fail(sentence_of(error))
    opened.close()
    print(opened.cut or f"{opened.path} is not damaged: nothing was cut off")


@app.command(epilog=RELAY_EXAMPLES)
@closed_by_signal()
def relay(
    context: typer.Context,
    listen: Listen = "127.0.0.1:29800",
    connections: Annotated[
        int, typer.Option(min=1, help="Processes and calls at a time; more are closed at once.")
    ] = 1024,
    http: Http = None,
    http_token: HttpToken = None,
    as_json: AddressAsJson = False,
) -> None:
    """Copy bytes between replicas that nobody can dial, until Ctrl-C or SIGTERM.

    Such replicas name the relay by Link("tcp", relay="tcp://host:port"). The relay holds no key:
    with keys it sees sizes and times alone. Whoever reaches the port can use the relay.
    """
    from diloco_comm.monitor.status import Snapshot

    with in_sentences(context.params):
        place = place_of_page(context)
        server = opened_relay(listen, connections)
        with page_beside(place, lambda: Snapshot(facts=relay_facts(server))) as page:
            serve_until_signal(server, announcer(as_json, page))
