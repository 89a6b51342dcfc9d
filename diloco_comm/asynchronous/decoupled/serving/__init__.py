"""The syncer's server: its socket, the model it serves, its files."""
