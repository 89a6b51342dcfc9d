"""What every server of this package needs: keys, ZeroMQ sockets, the lock of its folder.

``sockets`` and the servers' part of ``keys`` need pyzmq, the extra ``[async]``.
"""
