"""The server's files: snapshots, the journal of updates, the lock of the folder."""
