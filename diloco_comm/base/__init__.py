"""What every room uses: errors, checks of arguments, memory, environment, interrupts, traces.

Imports nothing of the package but the extension.
"""
