"""The outer state on its way to a replica that joins, beside training.

Every replica serves (``donor``) and can ask (``newcomer``). The parts of a message are in
``messages``, the keys of a connection in ``keys``.
"""
