"""``diloco-comm serve``: the server of asynchronous training."""
