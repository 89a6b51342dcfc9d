"""The exchange on NCCL: its process group, its streams, one round under way."""
