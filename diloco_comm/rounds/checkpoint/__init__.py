"""Saving and loading outer state, with the rounds that are under way."""
