"""What the server keeps on disk: snapshots, the journal of updates, the lock of the folder."""
