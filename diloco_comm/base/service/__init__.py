"""What every server of this package needs: keys, ZeroMQ sockets, the lock of its folder.

``curve`` and ``sockets`` need pyzmq, the extra ``[async]``.
"""
