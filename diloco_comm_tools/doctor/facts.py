"""``diloco-comm doctor``: facts of the installation and this machine, and errors in them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import re
import socket
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diloco_comm import __version__, ops
from diloco_comm.base import env
from diloco_comm.ops.implementations import served_by

from ..common import reports

PACKAGES = ("numpy", "triton", "nvtx", "pyzmq", "matplotlib", "transformers", "lightning", "peft")
SHORT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """An error, a warning of a common mistake, or advice (``level``), with a remedy."""

    level: str
    what: str
    remedy: str


def examine() -> dict[str, Any]:
    """Return the facts of this machine as JSON types; no process is started."""
    return {
        "versions": _versions(),
        "extension": _extension(),
        "processor": _processor(),
        "gpu": _gpu(),
        "network": _network(),
        "settings": _settings(),
    }


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Return the errors and warnings about the facts of one machine."""
    return [
        *_judge_extension(facts),
        *_judge_gpu(facts),
        *_judge_settings(facts),
        *_judge_network(facts),
    ]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "diloco_comm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _extension() -> dict[str, Any]:
    """Return facts of the C++ extension, which importing this package has loaded."""
    spec = importlib.util.find_spec("diloco_comm._C")
    path = None if spec is None else spec.origin
    available = list(ops.available_impls())
    try:
        chosen = ops.resolve_impl() or available[-1]
    except ValueError as error:
        return {"path": path, "error": str(error), "implementations": available, "default": None}
    return {"path": path, "error": None, "implementations": available, "default": chosen}


def _processor() -> dict[str, Any]:
    found = reports.machine()
    return {
        "model": found["cpu"],
        "features": found["isa"],
        "threads": torch.get_num_threads(),
        **{name: found[name] for name in ("architecture", "cores", "memory_gib")},
    }


def _gpu() -> dict[str, Any]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": _nccl_version(),
        "devices": [_gpu_name(idx) for idx in devices],
        "operators": [served_by(idx) for idx in devices],
    }


def _gpu_name(idx: int) -> str:
    try:
        return torch.cuda.get_device_name(idx)
    except RuntimeError:  # An error of the driver: ``served_by`` says it in another sentence.
        return f"GPU {idx}"


def _nccl_version() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _network() -> dict[str, Any]:
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = None
    return {
        "hostname_resolves_to": address,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "nccl_interface": os.environ.get("NCCL_SOCKET_IFNAME"),
    }


def _settings() -> dict[str, Any]:
    """Return the environment variables that change this package or the collectives."""
    wanted = re.compile(
        r"DILOCO_COMM_|NCCL_|TORCH_NCCL_|CUDA_DEVICE_MAX_CONNECTIONS|GLOO_|OMP_NUM_THREADS|MASTER_"
    )
    try:
        timeout_s: float | None = env.timeout_s()
    except ValueError:
        timeout_s = None
    found = {name: value for name, value in sorted(os.environ.items()) if wanted.match(name)}
    if env.PROXY_PASSWORD in found:
        found[env.PROXY_PASSWORD] = "***"
    return {"timeout_s": timeout_s, "environment": found}


def _judge_extension(facts: dict[str, Any]) -> list[Finding]:
    error = facts["extension"]["error"]
    if error is None:
        return []
    return [Finding("error", error, "name one of these, or unset the variable")]


def _judge_gpu(facts: dict[str, Any]) -> list[Finding]:
    gpu = facts["gpu"]
    remedy = "train on another device, or install or set what the sentence asks for"
    return [
        Finding("error", f"GPU {idx}, {name}, is {sentence}", remedy)
        for idx, (name, sentence) in enumerate(zip(gpu["devices"], gpu["operators"], strict=True))
        if sentence.startswith("not served")
    ]


def _judge_settings(facts: dict[str, Any]) -> list[Finding]:
    found = []
    environment = facts["settings"]["environment"]
    known = set(re.findall(r"DILOCO_COMM_\w+", env.__doc__ or ""))
    for name in environment:
        if name.startswith(env.PREFIX) and name not in known:
            remedy = f"the variables are {', '.join(sorted(known))}"
            found.append(Finding("warning", f"nothing reads {name}", remedy))
    timeout_s = facts["settings"]["timeout_s"]
    if timeout_s is None:
        text = environment.get("DILOCO_COMM_TIMEOUT_S")
        what = f"DILOCO_COMM_TIMEOUT_S must be a positive number, got {text!r}"
        found.append(Finding("error", what, "give seconds, or unset it for 1800"))
    elif timeout_s < SHORT_TIMEOUT_S:
        what = f"an exchange fails after {timeout_s:g} s"
        remedy = "a replica may come a whole round later than its peers: allow some minutes"
        found.append(Finding("warning", what, remedy))
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        what = "CUDA_DEVICE_MAX_CONNECTIONS=1: the exchange's streams wait behind the training's"
        remedy = "unset it, unless the training's own overlap needs it"
        found.append(Finding("warning", what, remedy))
    return found


def _judge_network(facts: dict[str, Any]) -> list[Finding]:
    network = facts["network"]
    wanted = network["gloo_interface"]
    if wanted is not None:
        missing = [name for name in wanted.split(",") if name not in network["interfaces"]]
        if missing:
            what = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which does not exist"
            remedy = f"this machine has {', '.join(network['interfaces'])}"
            return [Finding("error", what, remedy)]
        return []
    address = network["hostname_resolves_to"]
    if address is None:
        what = "this host's name does not resolve, so gloo finds no address of its own"
        return [Finding("warning", what, "set GLOO_SOCKET_IFNAME to the interface of the peers")]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        what = f"this host's name resolves to {address}: gloo will listen where no other host is"
        return [Finding("warning", what, "set GLOO_SOCKET_IFNAME to the interface of the peers")]
    return []


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    """Return findings as JSON types, errors first."""
    return [asdict(finding) for finding in sorted(findings, key=lambda f: f.level != "error")]
