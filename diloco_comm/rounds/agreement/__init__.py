"""What all replicas must agree on: settings, history, finite values, parameters."""
