"""What a user chooses: when rounds overlap with training, and the outer optimizer."""
