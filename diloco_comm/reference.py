"""The operators in plain PyTorch: a short name of ``diloco_comm.ops.reference``."""

from .ops.reference import *  # noqa: F403
