"""Elastic membership: replicas come and go, and the members agree on one line of views."""
