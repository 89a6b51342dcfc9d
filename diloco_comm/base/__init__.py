"""Shared by all rooms: errors, checks of arguments, memory, environment, interrupts, traces.

This room imports nothing of the package but the C++ extension.
"""
