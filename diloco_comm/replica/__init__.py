"""What this worker holds, and with which workers of its replica: fragments, shards, hooks."""
