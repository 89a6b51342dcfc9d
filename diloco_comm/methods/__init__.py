"""The choices of a user: when rounds overlap with training, and the outer optimizer."""
