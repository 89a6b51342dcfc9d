"""Which replicas exchange: rendezvous, beats, verdicts, and the change to the next epoch."""
