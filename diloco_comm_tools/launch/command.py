"""The sub-command ``diloco-comm launch``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..common.commands import fail, in_options, misuse
from ..common.outputs import check_folder

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm launch --registry tcp://127.0.0.1:29400 --run llama-1b train.py
diloco-comm launch --registry tcp://10.0.0.5:29400 --key paris.key_secret --run llama train.py
"""
SETTINGS = {"allow_interspersed_args": False}


def launch(
    context: typer.Context,
    registry: Annotated[str, typer.Option(help="Address of the registry, tcp://host:port.")],
    run: Annotated[str, typer.Option(help="Name of the run.")],
    script: Annotated[Path, typer.Argument(help="Python script of each worker.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Workers of this replica on each node.")
    ] = 1,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the replica's number; default: diloco-RUN."),
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Number of the replica; default: a free one.")
    ] = None,
    nnodes: Annotated[
        int, typer.Option(min=1, help="Nodes of this replica, each with a launcher of its own.")
    ] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this node, from 0.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(help="host:port where node 0's launcher listens, with several nodes.")
    ] = "",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts in a row, each soon after the one before.")
    ] = 10,
    key: Annotated[
        Path | None, typer.Option(help="Folder of keys, or a file NAME.key_secret in it.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use another machine's registry without keys.")
    ] = False,
) -> None:
    """Start one replica of an elastic run, and start it again when it ends early.

    The script trains with peers=Elastic(), which finds registry and run by itself. SIGTERM or
    Ctrl-C let the replica leave at its next boundary, a second signal ends it at once. Exit status:
    0 all steps are taken, 69 too few replicas or no registry, 75 too many restarts, 78 other model,
    settings or registry than the run's, 143 the replica has left. A script that ends twice within a
    second of its start with the same status is not started again, and the status is the script's.

    A replica of several nodes has one launcher on each node, with the same options but --node-rank.
    All launchers start their workers together, and end with one status.
    """
    from diloco_comm.elastic.registry import connect

    from .run import Launch, Launcher

    try:
        # Only the form of the address is checked here: the replica waits for the registry.
        connect(registry, run=run, key=key, insecure=insecure).close()
        if not script.is_file():
            misuse(f"there is no script {script}")
        if node_rank >= nnodes:
            misuse(f"--node-rank must be below --nnodes {nnodes}, got {node_rank}")
        if nnodes > 1 and not rdzv_endpoint:
            misuse(f"--nnodes {nnodes} needs --rdzv-endpoint host:port, an address of node 0")
        folder = Path(f"diloco-{run}") if state_dir is None else state_dir
        if nnodes > 1:
            folder /= f"node-{node_rank}"
        check_folder("--state-dir", folder, may_be_full=True)
        launcher = Launcher(
            Launch(
                registry=registry,
                run=run,
                command=[str(script), *(arguments or [])],
                num_workers=nproc_per_node,
                folder=folder.absolute(),
                replica=replica,
                max_restarts=max_restarts,
                key=None if key is None else key.absolute(),
                is_insecure=insecure,
                num_nodes=nnodes,
                node=node_rank,
                endpoint=rdzv_endpoint,
            )
        )
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    except OSError as error:
        fail(f"cannot use {error.filename}: {error.strerror or os.strerror(error.errno or 0)}")
    raise typer.Exit(launcher.run())
