"""Whether the CUDA kernels run on a device: the driver is asked once, else Triton serves.

The emulation answers in the driver's place (tests/cpp/emulated_cuda.cpp): a test gives it, by
ctypes, the answers about a device that no call has used. ``test_cuda_build.py`` asks the real
runtime, with a driver that is too old.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import run_python
from emulated import LIBRARY, needs_library

from diloco_comm.ops import implementations as impls

# Devices of the emulated driver, by number: versions of the runtime and the driver, architecture.
ANSWERS = {
    "the driver is newer": (20, 12090, 13020, 900, ""),
    "the driver is of the same major version": (21, 12090, 12000, 900, ""),
    "the driver is too old": (
        22, 13000, 12080, 0,
        "the driver is for CUDA 12.8, and the CUDA kernels need a driver for CUDA 13.0 or newer",
    ),
    "there is no driver": (
        23, 12090, 0, 0,
        "there is no driver of CUDA, and the CUDA kernels need a driver for CUDA 12.0 or newer",
    ),
    "the device is older than the kernels": (
        24, 13000, 13000, 750,
        "the device is sm_75, and the CUDA kernels are for sm_80, sm_86, sm_89, sm_90, sm_100, "
        "sm_120",
    ),
    "the device is between two generations": (
        25, 13000, 13000, 1100,
        "the device is sm_110, and the CUDA kernels are for sm_80, sm_86, sm_89, sm_90, sm_100, "
        "sm_120",
    ),
    "the device is of a known generation": (26, 13000, 13000, 1030, ""),
    "the device is later than all kernels": (27, 13000, 13000, 1300, ""),
}  # fmt: skip


def driver() -> ctypes.CDLL:
    """Return the emulation's driver, loaded beside its operators."""
    torch.ops.load_library(str(LIBRARY))
    return ctypes.CDLL(str(LIBRARY))


@needs_library
@pytest.mark.parametrize("case", ANSWERS)
def test_one_sentence_says_what_was_found_and_what_is_needed(case: str) -> None:
    device, *answer, sentence = ANSWERS[case]
    driver().emulate_device(device, *answer)
    assert impls._sentence(*torch.ops.diloco_comm_emulated._cuda_support(device)) == sentence


@needs_library
def test_threads_ask_the_driver_once_for_each_device() -> None:
    asked = driver()
    before = asked.num_probes()
    for device in (40, 41):
        asked.emulate_device(device, 13000, 12000, 0)
    ask = torch.ops.diloco_comm_emulated._cuda_support
    with ThreadPoolExecutor(8) as threads:
        facts = list(threads.map(ask, [40, 41] * 20))
    assert asked.num_probes() == before + 2
    assert facts == [facts[0]] * 40 and facts[0][:4] == [0, 13000, 12000, 0]


@needs_library
def test_triton_serves_a_device_that_the_kernels_do_not_run_on() -> None:
    """All tensors of a CPU are on the emulation's device -1."""
    pytest.importorskip("triton", reason="needs Triton")
    program = (
        "import ctypes, torch\n"
        "from diloco_comm import ops\n"
        f"torch.ops.load_library({str(LIBRARY)!r})\n"
        f"ctypes.CDLL({str(LIBRARY)!r}).emulate_device(-1, 13000, 13000, 700)\n"
        "merge = torch.ops.diloco_comm_emulated.merge\n"
        "out = torch.zeros(3)\n"
        "merge(torch.arange(3.0), [out], 0.0, '')\n"
        "merge(torch.arange(3.0), [out], 0.0, 'triton')\n"
        "print(out.tolist())\n"
        "try:\n"
        "    merge(torch.arange(3.0), [out], 0.0, 'emulated')\n"
        "except ValueError as error:\n"
        "    print(str(error).splitlines()[0])\n"
    )
    done = run_python("-c", program, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    values, refused = done.stdout.splitlines()
    assert values == "[0.0, 1.0, 2.0]"
    assert refused == "impl 'emulated' does not run here: `diloco-comm doctor` says why"


@pytest.mark.skipif(impls.has_cuda_kernels(), reason="the extension has CUDA kernels")
def test_an_extension_without_kernels_says_so() -> None:
    reason = "the extension was built without CUDA kernels"
    assert impls.cuda_obstacle() == reason
    assert reason in impls.needs_triton() and impls.served_by(0).endswith(f"because {reason}")
