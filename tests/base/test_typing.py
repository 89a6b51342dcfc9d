"""The types of the package, as a user's program sees them."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from commands import run_command

from diloco_comm.exchange.exchange import Exchange, ExchangeOptions
from diloco_comm.methods.outer import _BY_NAME, OuterName
from diloco_comm.methods.overlap import OVERLAPS, OverlapName
from diloco_comm.ops.wire import WIRES, WireName

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "data" / "typed_programs"
# Six words of each program, and a wrong word for each.
WRONG: dict[str, list[tuple[str, str]]] = {
    "typed_plain": [
        ("sync_every=100", 'sync_every="100"'),
        ("sync_every=100", "sync_evry=100"),
        ("peers=mesh", "peers=2"),
        ("norms=True", 'norms="yes"'),
        ("lr=0.7", "rate=0.7"),
        ("step: int", "step: str"),
    ],
    "typed_jobs": [
        ("sync_every=100, ", ""),
        ('init="check"', 'init="chek"'),
        ("Delayed(5)", '"late"'),
        ('outer="sgd"', 'outer="sdg"'),
        ("replica=0", "number=0"),
        ('change_group("survivors")', "change_group(survivors=True)"),
    ],
    "typed_elastic": [
        ('overlap="blocking"', 'overlap="block"'),
        ("HeavyBall(lr=0.7)", "Link()"),
        ("Link(timeout=60)", "Link(time_out=60)"),
        ("total_steps=1000", 'total_steps="all"'),
        ("peers=elastic", "membership=elastic"),
        ("diloco.is_done", "diloco.is_over"),
    ],
    "typed_resume": [
        ('peers="alone"', 'peers="lone"'),
        ("Eager()", "Eager"),
        ("Adam(lr=0.1)", '"adamw"'),
        ('config=saved["config"]', "config=3"),
        ('checks="warn"', 'checks="ignore"'),
        ('offload="cpu"', 'offload="disk"'),
    ],
    "typed_streaming": [
        ('"int4", block_size', '"int5", block_size'),
        ("block_size=64", "blocksize=64"),
        ("error_feedback=True", 'error_feedback="yes"'),
        ('NonFinite("skip"', 'NonFinite("ignore"'),
        ('"rest": "int4"', '"rest": "int5"'),
        ('link="tcp"', 'link="udp"'),
    ],
    "typed_presets": [
        (", weight=lambda: 32.0", ""),
        ("local_sgd(model, optimizer, sync_every=10, ", "local_sgd(model, optimizer, "),
        ('wire="bf16"', 'wire="b16"'),
        ("Wire(seed=3)", "Wire(seed='3')"),
        ("Link(lanes=2)", "Link(lanes=1.5)"),
        ('nonfinite="skip"', 'on_nonfinite="skip"'),
    ],
    "typed_asynchronous": [
        ('    server="tcp://127.0.0.1:29500",\n', ""),
        ('"int4"', '"int5"'),
        ("link=Link(timeout=60.0)", "timeout=60.0"),
        ('nonfinite="skip"', 'nonfinite="reset"'),
        ('name="a"', "name=3"),
        ("version: int", "version: str"),
    ],
    "typed_decoupled": [
        ("tokens=8192", 'tokens="many"'),
        ('rounding="stochastic"', 'rounding="random"'),
        ("wire=Wire(", "wire=Link("),
        ("seed=3", "sed=3"),
        ("link=Link(timeout=60.0)", 'link="tcp"'),
        ("flush(30.0)", 'flush("30")'),
    ],
    "typed_huggingface": [
        ("sync_every=100", 'sync_every="100"'),
        ('evaluate="outer"', 'evaluate="inner"'),
        ('Wire("int4")', 'Wire("int5")'),
        ("of=2", "num_replicas=2"),
        ("sync_every=30", "sync_evry=30"),
        ('link="gloo"', 'link="glue"'),
    ],
    "typed_lightning": [
        ("sync_every=100", "sync_every=None"),
        ("outer=Nesterov(0.7, 0.9)", "outer=0.7"),
        ("0.7, 0.9", "0.7, beta=0.9"),
        ("Streaming()", "Streaming(tau=1)"),
        ('figures="all"', 'figures="each"'),
        ("overlap=", "overlaps="),
    ],
}
# The files whose wrong word stands where a class of torch may stand.
NEED_TORCH = {"typed_plain_2.py", "typed_resume_0.py"}


def written(folder: Path) -> set[str]:
    """Write the programs into a folder; return the names of the files with a wrong word."""
    good, bad = set(), set()
    for path in sorted(PROGRAMS.glob("*.py")):
        text = path.read_text()
        shutil.copy(path, folder)
        good.add(path.name)
        for number, (right, wrong) in enumerate(WRONG[path.stem]):
            assert right in text, (path.stem, right)
            bad.add(f"{path.stem}_{number}.py")
            (folder / f"{path.stem}_{number}.py").write_text(text.replace(right, wrong, 1))
    assert (len(good), len(bad)) == (10, 60)
    return bad


def of_mypy(folder: Path, *, reads_torch: bool) -> Iterator[str]:
    """Yield the names of the files with an error, by ``mypy --strict``."""
    # Reading the trainers, and torch, takes minutes.
    skipped = ["transformers", "accelerate", "lightning", *["torch"] * (not reads_torch)]
    config = folder / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = True\n"
        + "".join(
            f"[mypy-{name}.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
            for name in skipped
        )
        + "[mypy-diloco_comm.*]\nfollow_imports = silent\n"
    )
    files = map(str, sorted(folder.glob("*.py")))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary"]
    command += ["--cache-dir", str(folder / "cache"), "--scripts-are-modules", *files]
    run = run_command(command, cwd=ROOT, timeout=600)
    assert run.stderr == ""
    for line in run.stdout.splitlines():
        if ": error: " in line:
            yield Path(line.partition(":")[0]).name


def of_pyright(folder: Path) -> Iterator[str]:
    """Yield the names of the files with an error, by pyright's strict mode."""
    config = {
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT)],
        # The method ``step`` of torch's optimizers has no types.
        "reportUnknownMemberType": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = ["pyright", "--project", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    run = run_command(command, cwd=folder, timeout=600)
    for found in json.loads(run.stdout)["generalDiagnostics"]:
        if found["severity"] == "error":
            yield Path(found["file"]).name


def test_mypy_that_skips_torch_finds_wrong_words(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    bad = written(tmp_path)
    assert set(of_mypy(tmp_path, reads_torch=False)) == bad - NEED_TORCH


@pytest.mark.nightly("mypy reads torch, for a minute and longer")
@pytest.mark.timeout(600)
def test_programs_have_no_errors_and_each_wrong_word_is_found(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    bad = written(tmp_path)
    assert set(of_mypy(tmp_path, reads_torch=True)) == bad


@pytest.mark.nightly("pyright reads torch; it is no requirement of the tests")
@pytest.mark.timeout(600)
def test_pyright_finds_each_wrong_word(tmp_path: Path) -> None:
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    bad = written(tmp_path)
    assert set(of_pyright(tmp_path)) == bad


def test_the_options_of_an_exchange_are_its_arguments() -> None:
    passed = inspect.signature(Exchange).parameters.keys() - {"store", "replica", "members"}
    assert ExchangeOptions.__optional_keys__ == passed - {"name", "board"}


def test_the_names_for_type_checkers_are_all_names() -> None:
    assert get_args(WireName) == WIRES
    for literal, table in ((OverlapName, OVERLAPS), (OuterName, _BY_NAME)):
        assert get_args(literal) == (*table, *(name.lower() for name in table))
