"""``diloco-comm bench``: operators, exchange, outer step, and the choice of settings."""
