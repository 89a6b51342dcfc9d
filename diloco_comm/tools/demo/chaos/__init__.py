"""``diloco-comm demo --chaos``: replicas are killed, stopped and started while they train."""
