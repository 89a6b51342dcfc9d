"""Which replicas exchange: they follow the agreement of their group from epoch to epoch."""
