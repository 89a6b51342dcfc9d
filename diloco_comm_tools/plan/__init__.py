"""``diloco-comm plan``: which settings fit a link and a model."""
