"""Entry point of the command ``diloco-comm``; the sub-commands are in ``app.py``."""

from __future__ import annotations

import sys

EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line, or say in one sentence what has to be installed for it."""
    try:
        from .app import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        sys.exit(
            f"diloco-comm needs {package}, which is not installed: pip install 'diloco_comm[cli]'"
        )


if __name__ == "__main__":
    main()
