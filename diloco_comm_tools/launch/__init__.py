"""``diloco-comm launch``: start one replica, and start it again when it ends early."""
