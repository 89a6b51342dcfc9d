"""Run a command whose loopback interface carries its traffic alone, to count bytes on it.

    python -m benchmarks.exchange.private_loopback \
        python -m benchmarks.exchange.all_reduce -g 2 --count-bytes

The command gets a new network namespace (and, without root, a user namespace to be allowed it)
whose only interface is its own ``lo``. Imports nothing heavy: a user namespace can only be made
by a process with one thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1


def enter() -> None:
    """Move this process into a network namespace of its own; OSError when that is not allowed."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNET | (_CLONE_NEWUSER if uid != 0 else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace of our own: {os.strerror(number)}")
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _bring_up(b"lo")


def _bring_up(name: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", name, 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        request = struct.pack("16sH14x", name, flags | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    try:
        enter()
    except OSError as error:
        print(f"# skipped: {error}")
        return 77
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
