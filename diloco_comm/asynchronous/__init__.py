"""Asynchronous Local-SGD: a server owns the shared model, workers come and go.

Equations and settings: docs/asynchronous.md.
Importing it needs no transport; ``AsyncServer`` and ``AsyncDiLoCo`` need pyzmq, the extra
``[async]``.
"""
