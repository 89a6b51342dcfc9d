"""Decoupled training: learners that never wait, and a syncer that merges what a quorum reports.

After arXiv 2604.21428. This package holds the decisions and the merges, and runs them on a virtual
clock; a server and workers over a network are not part of the package.
docs/explanation/decoupled.md has the equations and the settings.
"""
