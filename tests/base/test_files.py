"""Files on a full disk, above a limit, and in checkpoints: one sentence, and nothing half."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from small_disk import mounted

from diloco_comm.base.files import load_state, newest_whole, save_state, whole_file

SMALL, LARGE = torch.zeros(100), torch.zeros(200_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "disk", "256k") as folder:
        yield folder


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_state_on_a_full_disk_leaves_nothing_and_says_how_much_is_free(small_disk: Path) -> None:
    file = small_disk / "checkpoint-2" / "diloco.pt"
    save_state("the state", {"outer": SMALL}, small_disk / "checkpoint-1" / "diloco.pt")
    with pytest.raises(OSError) as caught:
        save_state("the state", {"outer": LARGE}, file)
    said = re.fullmatch(
        r"cannot write the state (.*): No space left on device, (\d+) bytes are free",
        str(caught.value),
    )
    assert said is not None and said[1] == str(file)
    assert 0 <= int(said[2]) < LARGE.nbytes
    assert everything_in(small_disk) == ["diloco.pt"]
    # A file that was there before stays as it was.
    with pytest.raises(OSError, match="bytes are free"):
        save_state("the state", {"outer": LARGE}, small_disk / "checkpoint-1" / "diloco.pt")
    kept = load_state(small_disk / "checkpoint-1" / "diloco.pt", "")
    assert torch.equal(kept["outer"], SMALL)
    assert newest_whole(file) == small_disk / "checkpoint-1"


def test_what_a_tool_writes_on_a_full_disk(small_disk: Path) -> None:
    file = small_disk / "results.json"
    with pytest.raises(OSError, match=r"cannot write --json .*: No space .*, \d+ bytes are free"):
        with whole_file("--json", file) as partial:
            partial.write_text("x" * 500_000)
    assert everything_in(small_disk) == []
    # Through a link, and to a file that was there before.
    file.write_text("old results")
    link = small_disk / "link.json"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(OSError, match=f"cannot write --json {path}: No space"):
            with whole_file("--json", path) as partial:
                partial.write_text("x" * 500_000)
        assert file.read_text() == "old results" and link.is_symlink()
    with whole_file("--json", link) as partial:
        partial.write_text("new results")
    assert file.read_text() == "new results" and link.is_symlink()


def test_a_device_and_an_open_file_keep_their_places(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as shown:
        for path in (Path("/dev/null"), Path(f"/dev/fd/{shown.fileno()}")):
            with whole_file("--json", path) as file:
                assert file == path
                file.write_text("results")
        assert shown.read() == b"results"
    assert Path("/dev/null").is_char_device()
    assert everything_in(tmp_path) == ["shown"]


def save_above_a_limit(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_state("the state", {"outer": LARGE}, folder / "diloco.pt")
    except OSError as error:
        return str(error)
    return "saved"


def test_a_file_above_the_limit_of_the_process(tmp_path: Path) -> None:
    with get_context("fork").Pool(1) as pool:
        said = pool.apply(save_above_a_limit, (tmp_path,))
    assert said == f"cannot write the state {tmp_path / 'diloco.pt'}: File too large"
    assert everything_in(tmp_path) == []


def test_an_error_of_the_block_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="its own"):
        with whole_file("the state", tmp_path / "diloco.pt") as partial:
            partial.write_text("half")
            raise RuntimeError("its own")
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_the_newest_checkpoint_that_is_whole_is_named(tmp_path: Path, damage: str) -> None:
    for step in (9, 20, 100):
        save_state("the state", {"outer": SMALL}, tmp_path / f"checkpoint-{step}" / "diloco.pt")
    save_state("the state", {"outer": SMALL}, tmp_path / "best-500" / "diloco.pt")
    last = tmp_path / "checkpoint-100" / "diloco.pt"
    if damage == "missing":
        last.unlink()
    elif damage == "flipped":
        for file in (last, tmp_path / "checkpoint-30" / "diloco.pt"):
            save_state("the state", {"outer": SMALL}, file)
            content = bytearray(file.read_bytes())
            at = content.index(bytes(SMALL.nbytes)) + SMALL.nbytes // 2
            content[at] ^= 64
            file.write_bytes(content)
            # torch reads it in silence.
            assert torch.count_nonzero(torch.load(file)["outer"]) == 1
    else:
        last.write_bytes(last.read_bytes()[:-200])
    said = "is not there" if damage == "missing" else "is not whole"
    with pytest.raises(ValueError) as caught:
        load_state(last, "give its folder")
    assert str(caught.value) == (
        f"training goes on from a checkpoint, but {last} {said}: the newest checkpoint "
        f"that is whole is {tmp_path / 'checkpoint-20'}: give its folder"
    )
    for step in (9, 20):
        (tmp_path / f"checkpoint-{step}" / "diloco.pt").unlink()
    with pytest.raises(ValueError, match=f"{said}: give its folder"):
        load_state(last, "give its folder")
