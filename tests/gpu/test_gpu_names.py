"""benchmarks/gpu/names.py: names of torch in sources, and those that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_runs import run_benchmark

pytestmark = pytest.mark.usefixtures("forked_programs")

SOURCE = """
from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader{more_import}


class Driver:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def run(self) -> None:
        torch.cuda.synchronize()
        torch.ops.diloco_comm.encode()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = 1
        self.group.{member}()
        {call}
"""


def looked_at(
    tmp_path: Path, more_import: str = "", member: str = "rank", call: str = "pass"
) -> tuple[int, str]:
    text = SOURCE.format(more_import=more_import, member=member, call=call)
    (tmp_path / "source.py").write_text(text)
    done = run_benchmark("gpu.names", tmp_path)
    assert not done.stderr
    return done.returncode, done.stdout


def test_names_that_are_there(tmp_path: Path) -> None:
    status, said = looked_at(tmp_path)
    assert status == 0 and " 0 missing" in said
    assert "ProcessGroup object.rank" in said and "_Options object._timeout" in said


def test_a_name_that_the_source_asks_for_may_be_missing(tmp_path: Path) -> None:
    call = "print(self.group.maybe if hasattr(self.group, 'maybe') else 1)"
    for more in ("", "; hasattr(*self.group.rank())"):
        status, said = looked_at(tmp_path, call=call + more)
        assert status == 0 and " 0 missing" in said, said


def test_the_package_is_read_to_its_end() -> None:
    """A torch for CPUs lacks names of NCCL, so the status says nothing here."""
    done = run_benchmark("gpu.names")
    assert not done.stderr and " names of torch " in done.stdout


def test_the_same_word_in_another_class_is_another_object(tmp_path: Path) -> None:
    other = "\n\n\nclass Other:\n    def run(self) -> None:\n        self.group.worker()"
    status, said = looked_at(tmp_path, call=f"pass{other}")
    assert status == 0 and " 0 missing" in said, said


def test_each_kind_of_name_that_is_not(tmp_path: Path) -> None:
    for change, name in (
        ({"more_import": ", NoSuchLoader"}, "torch.utils.data.NoSuchLoader"),
        ({"call": "dist.ProcessGroup.BackendType.NO_SUCH"}, "BackendType.NO_SUCH"),
        ({"call": "torch.cuda.no_such_call()"}, "torch.cuda.no_such_call"),
        ({"member": "no_such_member"}, "ProcessGroup object.no_such_member"),
    ):
        status, said = looked_at(tmp_path, **change)
        assert status == 1 and said.count(" has no ") == 1, said
        assert said.splitlines()[0].endswith(name)
        assert " 1 missing" in said


def test_nothing_to_look_at_is_no_success(tmp_path: Path) -> None:
    done = run_benchmark("gpu.names", tmp_path)
    assert done.returncode == 1
