"""The environment variables of this package; an argument wins over the environment.

| variable | meaning |
|---|---|
| ``DILOCO_COMM_IMPL`` | implementation of the operators, on devices that have it |
| ``DILOCO_COMM_TIMEOUT_S`` | seconds an exchange may take before it fails (default 1800) |
| ``DILOCO_COMM_JOIN_TIMEOUT_S`` | seconds a change of the group waits for silent members (60) |
| ``DILOCO_COMM_SUSPECT_AFTER_S`` | seconds without a beat after which a peer is given up (30) |
| ``DILOCO_COMM_CHUNK_BYTES`` | bytes of a chunk on the wire (default: by size) |
| ``DILOCO_COMM_LANES`` | pairs of process groups, hence connections, for the chunks (default 1) |
| ``DILOCO_COMM_REPORT_S`` | seconds a failed exchange listens for signs of the others (default 3) |
| ``DILOCO_COMM_REPLICA`` | this replica's number, for ``Elastic`` (default: a free one) |
| ``DILOCO_COMM_REGISTRY`` | address of the registry, for ``Elastic`` |
| ``DILOCO_COMM_RUN`` | name of the run, for ``Elastic`` (default "default") |
| ``DILOCO_COMM_KEY`` | keys of the connection to the registry, for ``Elastic`` |
| ``DILOCO_COMM_INSECURE`` | 1 allows another machine's registry without keys, for ``Elastic`` |
| ``DILOCO_COMM_PROXY_PASSWORD`` | password of a proxy that is given with a user alone |
| ``DILOCO_COMM_STATE_DIR`` | folder of this replica; set by ``diloco-comm launch`` |
| ``DILOCO_COMM_CONFIG`` | JSON file of arguments for ``DiLoCo``, as ``config=`` |
| ``DILOCO_COMM_BACKEND_WIRE`` | wire of large all-reduces of the backend "diloco" (int8) |
| ``DILOCO_COMM_BACKEND_MIN_BYTES`` | least bytes, as fp32, of a large all-reduce (1048576) |
| ``DILOCO_COMM_NVTX`` | 0 turns NVTX ranges off where the ``nvtx`` package is installed |
| ``DILOCO_COMM_PROFILE`` | folder for a trace of each rank; set by ``diloco-comm profile run`` |
| ``DILOCO_COMM_PROFILE_SKIP`` | optimizer steps to skip before the recording (default 10) |
| ``DILOCO_COMM_PROFILE_STEPS`` | optimizer steps to record (default 20) |
"""

from __future__ import annotations

import os

PREFIX = "DILOCO_COMM_"
IMPL = PREFIX + "IMPL"
PROXY_PASSWORD = PREFIX + "PROXY_PASSWORD"


def impl() -> str:
    """Return the requested implementation of the operators, or "" for the default."""
    return os.environ.get(IMPL, "")


def timeout_s() -> float:
    """Return the default deadline of one exchange in seconds."""
    return _number("TIMEOUT_S", 1800.0)


def join_timeout_s() -> float:
    """Return the seconds that a change of the group waits for silent members."""
    return _number("JOIN_TIMEOUT_S", 60.0)


def suspect_after_s() -> float:
    """Return the seconds of silence after which a peer is given up."""
    return _number("SUSPECT_AFTER_S", 30.0)


def gloo_interface() -> str:
    """Return gloo's network interfaces, from gloo's own variable, or ""."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def chunk_bytes() -> int | None:
    """Return the chunk size in bytes, or None to choose by the payload's size."""
    value = int(_number("CHUNK_BYTES", 0))
    return value or None


def lanes() -> int:
    """Return the default number of lanes."""
    return int(_number("LANES", 1))


def report_s() -> float:
    """Return the seconds for which a failed exchange waits for signs of life of the others."""
    return _number("REPORT_S", 3.0)


def replica() -> int | None:
    """Return the number of this replica, or None."""
    text = os.environ.get(PREFIX + "REPLICA")
    if text is not None and not text.isdecimal():
        raise ValueError(f"{PREFIX}REPLICA must be a number of a replica, from 0, got {text!r}")
    return None if text is None else int(text)


def registry() -> str:
    """Return the address of the registry, or ""."""
    return os.environ.get(PREFIX + "REGISTRY", "")


def run() -> str:
    """Return the name of the run with elastic membership."""
    return os.environ.get(PREFIX + "RUN", "") or "default"


def registry_key() -> str | None:
    """Return the folder or file of the registry's keys, or None."""
    return os.environ.get(PREFIX + "KEY") or None


def is_insecure() -> bool:
    """Return whether another machine's registry may be used without keys."""
    return os.environ.get(PREFIX + "INSECURE", "0") == "1"


def proxy_password() -> str:
    """Return the password of the proxy, or ""."""
    return os.environ.get(PROXY_PASSWORD, "")


def state_dir() -> str:
    """Return the folder of this replica, which ``diloco-comm launch`` has set, or ""."""
    return os.environ.get(PREFIX + "STATE_DIR", "")


def config_path() -> str:
    """Return the file with arguments of ``DiLoCo``, or ""."""
    return os.environ.get(PREFIX + "CONFIG", "")


def backend_wire() -> str:
    """Return the wire format of large all-reduces of the backend "diloco"."""
    return os.environ.get(PREFIX + "BACKEND_WIRE", "int8")


def backend_min_bytes() -> int:
    """Return the least size in bytes, as fp32, of an all-reduce that is encoded."""
    return int(_number("BACKEND_MIN_BYTES", 1 << 20))


def use_nvtx() -> bool:
    """Return whether NVTX ranges may be opened."""
    return os.environ.get(PREFIX + "NVTX", "1") != "0"


def profile_folder() -> str:
    """Return the folder to write traces to, or "" for none."""
    return os.environ.get(PREFIX + "PROFILE", "")


def profile_steps() -> tuple[int, int]:
    """Return how many optimizer steps to skip, and how many to record after them."""
    return int(_number("PROFILE_SKIP", 10)), int(_number("PROFILE_STEPS", 20))


def _number(name: str, default: float) -> float:
    text = os.environ.get(PREFIX + name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{PREFIX}{name} must be a positive number, got {text!r}")
    return value
