"""Replicas meet on a store, find out which of them live, and agree on the next group."""
