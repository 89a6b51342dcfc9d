"""A replica that joins copies the outer state of others over the link, beside training.

Each replica's ``StateSource`` answers in C++. Here is the side of the replica that joins.
"""
