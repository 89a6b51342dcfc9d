"""``diloco-comm doctor``: what is installed, and whether it works."""
