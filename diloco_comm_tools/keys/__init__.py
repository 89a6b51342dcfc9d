"""``diloco-comm keys``: the keys of registry, servers and links."""
