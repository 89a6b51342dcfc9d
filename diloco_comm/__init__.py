"""Communication backend for low-communication training in PyTorch."""

from __future__ import annotations

__version__ = "0.1.0"
