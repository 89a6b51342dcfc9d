"""``diloco-comm registry`` and ``diloco-comm members``: the registry of elastic membership."""
