"""Asynchronous Local-SGD: a server owns the shared model, workers come and go.

docs/explanation/asynchronous.md has the equations and the settings. This package imports
without pyzmq; ``AsyncServer`` and ``AsyncDiLoCo`` need pyzmq, the extra ``[async]``.
"""
