"""``diloco-comm profile``: record a trace, and report how much of the exchange is hidden."""
