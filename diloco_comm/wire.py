"""The wire formats: a short name of ``diloco_comm.ops.wire``."""

from .ops.wire import *  # noqa: F403
