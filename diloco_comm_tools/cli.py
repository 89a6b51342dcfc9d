"""Entry point of the command ``diloco-comm``; the sub-commands are in ``app.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

from diloco_comm.base.interrupts import Stopped, stoppable

EXTRA = ("typer", "rich")
EXTENSION = "diloco_comm._C"


def main() -> None:
    """Run the command line, or print one sentence about a wrong option or a missing package."""
    # Beside an error that a command tells in one sentence, torch would print the stack of its C++
    # code. The programs that launch and profile start keep torch's default.
    if sys.argv[1:2] not in (["launch"], ["profile"]):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        import typer

        from .app import app
        from .common.commands import as_today
    except ModuleNotFoundError as error:
        _explain(error)
    # Typer's own name for the class differs between its versions.
    usage_error: Any = typer.BadParameter.__base__
    try:
        with stoppable():
            sys.exit(app(as_today(sys.argv[1:]), standalone_mode=False))
    except Stopped as stopped:
        print(f"diloco-comm: ended by {stopped.name}", file=sys.stderr)
        raise
    except ImportError as error:
        _explain(error)
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            print(f"diloco-comm: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except OSError as error:
        # Sub-commands handle the errors of files that options name. An error without a file name
        # comes from writing to stdout.
        if error.filename is not None:
            raise
        print(f"diloco-comm: the output cannot be written: {error.strerror}", file=sys.stderr)
        # Otherwise the interpreter flushes again at its end, and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _explain(error: ImportError) -> None:
    """End with the sentence about a missing package, or about an extension that does not load."""
    if error.name == EXTENSION:
        sys.exit(f"diloco-comm: {error}")
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA:
        raise error
    sys.exit(f"diloco-comm needs {package}, which is not installed: pip install 'diloco_comm[cli]'")


if __name__ == "__main__":
    main()
