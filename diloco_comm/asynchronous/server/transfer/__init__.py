"""Payloads on their way to and from workers."""
