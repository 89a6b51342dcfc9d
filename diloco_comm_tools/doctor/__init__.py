"""``diloco-comm doctor``: show what is installed, and test whether it works."""
