"""``diloco-comm demo --decoupled``: learners of unequal speed, one of which is killed."""
