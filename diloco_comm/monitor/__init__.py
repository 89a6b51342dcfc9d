"""A run seen from outside: the figures of each replica, metrics and a page over HTTP."""
