"""Measurements of diloco_comm, run from the checkout: ``python -m benchmarks.ROOM.NAME``."""
