"""What the demo shows: the results of its runs, as a table and as a plot."""
