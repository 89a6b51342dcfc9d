"""``diloco-comm demo``: several replicas on this machine, and a table of their results."""
