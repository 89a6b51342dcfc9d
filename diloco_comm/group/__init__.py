"""Agree on who trains together: records, messages, and one state machine without threads."""
