"""What a person sees from outside: the figures of each replica, metrics and a page over HTTP."""
