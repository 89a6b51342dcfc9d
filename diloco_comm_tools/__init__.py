"""The sub-commands of the ``diloco-comm`` command line."""
