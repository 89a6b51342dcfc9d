"""The package without its C++ extension says what to do; with it, all that the CPU runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from commands import run_python

import diloco_comm
import diloco_comm.kernels
import diloco_comm_tools
from diloco_comm import _C, __version__, ops
from diloco_comm.base import extension


@pytest.mark.nightly("5 s; they differ in the line that needs the extension", but=["a name"])
@pytest.mark.parametrize(
    "line",
    [
        "from diloco_comm import DiLoCo",
        "import diloco_comm.ops",
        "import diloco_comm; diloco_comm.ops",
        "from diloco_comm import _C",
    ],
    ids=["a name", "the operators", "an attribute", "the extension"],
)
def test_without_the_extension_there_is_one_sentence(line: str) -> None:
    program = (
        "import sys\n"
        "sys.modules['diloco_comm._C'] = None\n"
        "try:\n"
        f"    {line}\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error, sep='|')\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    kind, sentence = done.stdout.rstrip("\n").split("|")
    assert kind == "ImportError"
    assert "\n" not in sentence
    assert sentence.startswith("the C++ extension of diloco_comm is not built for this Python and")
    assert f"torch {torch.__version__}" in sentence and "pip install" in sentence


def copy_of_the_package(folder: Path, changed: dict[bytes, bytes]) -> None:
    """Copy the package, with other bytes of equal number in its extension."""
    package = Path(diloco_comm.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, folder / "diloco_comm", ignore=ignored)
    tools = Path(diloco_comm_tools.__file__).parent
    shutil.copytree(tools, folder / "diloco_comm_tools", ignore=ignored)
    kernels = Path(diloco_comm.kernels.__file__).parent
    shutil.copytree(kernels, folder / "diloco_comm/kernels", ignore=ignored, dirs_exist_ok=True)
    (library,) = (folder / "diloco_comm").glob("_C.*.so")
    content = library.read_bytes()
    for old, new in changed.items():
        assert old in content and len(old) == len(new)
        content = content.replace(old, new)
    library.write_bytes(content)


def error_of_the_import(folder: Path) -> str:
    program = (
        "try:\n"
        "    import diloco_comm; diloco_comm.DiLoCo\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print(diloco_comm.__file__)\n"
    )
    done = run_python("-c", program, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, done.stdout + done.stderr
    return done.stdout.rstrip("\n")


def run_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the package of a folder, which has a console script as pip writes it."""
    (folder / "diloco-comm").write_text(
        "import sys\n"
        "from diloco_comm_tools.cli import main\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main())\n"
    )
    return run_python(*words, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})


HERE = extension.minor_version(torch.__version__)
OTHER = HERE.translate(str.maketrans("0123456789", "1234567890"))
MARK = b"is built for torch "
# A function of torch that another version does not have.
CHECK_FAIL = b"_ZN3c106detail14torchCheckFailE"
GONE = CHECK_FAIL.replace(b"Fail", b"Gone")


@pytest.mark.nightly("4 s each", but=["does not load"])
@pytest.mark.parametrize("loads", [True, False], ids=["loads", "does not load"])
def test_an_extension_for_another_torch_is_one_sentence(loads: bool, tmp_path: Path) -> None:
    """An extension for another torch is not loaded, even if it could be loaded."""
    changed = {MARK + HERE.encode(): MARK + OTHER.encode()}
    copy_of_the_package(tmp_path, changed if loads else {**changed, CHECK_FAIL: GONE})
    assert error_of_the_import(tmp_path) == (
        f"the C++ extension of diloco_comm is built for torch {OTHER}, and this is torch "
        f"{torch.__version__}: install torch {OTHER} (`pip install 'torch=={OTHER}.*'`), or build "
        "the extension for this one (`pip install --no-build-isolation --force-reinstall "
        "--no-deps .` in its sources)"
    )


@pytest.mark.nightly("7 s; an absent extension and one for another torch stay")
def test_an_extension_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    """The torch has the same version but other functions, as a user's own build may have."""
    copy_of_the_package(tmp_path, {CHECK_FAIL: GONE})
    sentence = error_of_the_import(tmp_path)
    assert sentence.startswith("the C++ extension of diloco_comm is not built for this Python and")
    assert "undefined symbol" in sentence


@pytest.mark.nightly("8 s; the first tier has the sentence of the package")
@pytest.mark.parametrize("is_whole", [True, False], ids=["of another torch", "broken"])
def test_the_command_without_its_extension_is_one_sentence(is_whole: bool, tmp_path: Path) -> None:
    """As pip's script and as a module; what needs no extension runs without the extension."""
    copy_of_the_package(tmp_path, {MARK + HERE.encode(): MARK + OTHER.encode()})
    if not is_whole:
        # Taken away, it would be looked for where an editable installation has it.
        next((tmp_path / "diloco_comm").glob("_C.*.so")).write_bytes(b"")
    means = f"built for torch {OTHER}" if is_whole else "not built for this Python and torch"
    for words in (["diloco-comm", "doctor"], ["-u", "-m", "diloco_comm_tools.cli", "doctor"]):
        ended = run_command(tmp_path, *words)
        assert (ended.returncode, ended.stdout) == (1, "")
        line = rf"diloco-comm: the C\+\+ extension of diloco_comm is {means}[^\n]+\n"
        assert re.fullmatch(line, ended.stderr), ended.stderr
        ended = run_command(tmp_path, *words[:-1], "--version")
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.nightly("4 s; the first tier has the refusal of another torch")
def test_a_patch_release_of_torch_runs_the_extension(tmp_path: Path) -> None:
    patch = f"{MARK.decode()}{HERE}.".encode()
    (library,) = Path(diloco_comm.__file__).parent.glob("_C.*.so")
    content = library.read_bytes()
    begin = content.index(patch)
    own = content[begin : begin + len(patch) + 1]
    copy_of_the_package(tmp_path, {own: own[:-1] + (b"8" if own[-1:] == b"9" else b"9")})
    assert error_of_the_import(tmp_path) == str(tmp_path / "diloco_comm/__init__.py")


def test_the_extension_tells_what_it_is_built_for() -> None:
    assert re.fullmatch(rf"diloco_comm is built for torch {HERE}\.\d+", _C.built_for)


@pytest.mark.parametrize(
    ("version", "minor"),
    [("2.13.0+cpu", "2.13"), ("2.6.1", "2.6"), ("2.14.0a0+git12ab", "2.14"), ("2.9+cu1", "2.9")],
)
def test_minor_versions(version: str, minor: str) -> None:
    assert extension.minor_version(version) == minor


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="/proc/cpuinfo of an x86-64 machine",
)
def test_the_implementations_are_those_that_the_processor_runs() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    needed = {
        "scalar": set(),
        "avx2": {"avx2", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    }
    runs = {impl for impl, wanted in needed.items() if wanted <= flags}
    assert set(ops.available_impls()) - {"reference"} == runs


@pytest.mark.nightly("7 s; about torch, which is pinned")
def test_torch_keeps_no_default_group_that_is_made_before_the_first_use() -> None:
    """A group in a default argument lives until the interpreter's end, and aborts it."""
    program = (
        "import inspect, torch, torch.distributed as dist, diloco_comm\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "diloco_comm.DiLoCo\n"
        "from torch.distributed.nn.functional import all_reduce\n"
        "print(inspect.signature(all_reduce).parameters['group'].default)\n"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stdout + done.stderr


# -------------- The names of the package: they come with their first use, and torch comes with them


def test_every_public_name_is_there() -> None:
    for name in diloco_comm.__all__:
        assert getattr(diloco_comm, name).__name__ == name
    assert dir(diloco_comm) == sorted(diloco_comm.__all__)
    with pytest.raises(AttributeError, match="'diloco_comm' has no attribute 'Diloco'"):
        diloco_comm.Diloco  # noqa: B018


@pytest.mark.parametrize(
    "line",
    [
        "from diloco_comm import *",
        "import diloco_comm.ops",
        "diloco_comm.ops",
        "diloco_comm.DiLoCo",
    ],
)
def test_torch_comes_with_the_first_name(line: str) -> None:
    program = (
        "import sys, diloco_comm\n"
        "assert 'torch' not in sys.modules\n"
        f"{line}\n"
        "import torch\n"
        "assert torch.ops.diloco_comm.encode and diloco_comm.DiLoCo.__name__ == 'DiLoCo'\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
