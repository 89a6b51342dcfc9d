"""Replicas that come and go: the chain of views, the registry that holds it, and who decides."""
