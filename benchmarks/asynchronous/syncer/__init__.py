"""The speed of decoupled training: steps of learners, latency of commits, merges, messages."""
