"""Decoupled training: learners that never wait, and a syncer that merges what a quorum reports.

After arXiv 2604.21428. The modules of this package hold the decisions and the merges, and run them
on a virtual clock; ``server`` and ``attached`` are the syncer's server and the learners over a
network. docs/explanation/decoupled.md has the equations and the settings.
"""
