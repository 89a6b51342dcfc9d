"""Decide when an update is applied and what a worker does next; pure code on any clock."""
