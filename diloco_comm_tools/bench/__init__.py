"""``diloco-comm bench``: exchange, outer step, and the choice of settings."""
