"""The demo's results, their table and their plot."""
