"""The folders from which tests and their processes import."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1]
ROOT = SUPPORT.parents[1]
FOLDERS = [str(ROOT), str(SUPPORT), *sorted(str(path) for path in SUPPORT.glob("[a-z]*/"))]
