"""Decide what a process does about views: a pure function of what it has seen.

``step(state, event)`` returns the next state and the actions that the driver carries out. There are
no threads, sockets or clocks here: time is counted in this process's own polls of the registry.
"""

from .peers import silent_members as silent_members
from .state import Settings as Settings
from .state import State as State
from .state import beat_of as beat_of
from .state import start as start
from .step import step as step
