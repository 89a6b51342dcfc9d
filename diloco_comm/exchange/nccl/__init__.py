"""Exchanges over NCCL: the process group, its connections, and exchanges on streams."""
