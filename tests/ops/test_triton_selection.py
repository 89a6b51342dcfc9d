"""Which implementation runs where; and the tables by which Triton's kernels find the tensors."""

from __future__ import annotations

import os
import runpy
import sys

import pytest
import torch
import triton_cases
from codec_cases import DTYPES, assert_same, fragment, tensors_like
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from test_ops_torch import calls
from triton_cases import interpreted

from diloco_comm import ops
from diloco_comm.ops import implementations as impls
from diloco_comm.ops.wire import WireFormat


def run(program: str) -> str:
    """Run a program in a process where Triton does not interpret; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = run_python("-c", program, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        (
            (7, 5),
            "on cuda:1, a GPU of compute capability 7.5: only tensors on GPUs of 8.0 and",
        ),
        ((8, 0), ""),
        ((12, 0), ""),
    ],
)
def test_an_old_gpu_is_refused_by_its_capability(
    capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the kernels in CUDA nor Triton's run there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = impls.obstacle(torch.device("cuda", 1))
    assert reason.startswith(said) and bool(reason) == bool(said)
    assert impls.obstacle(torch.device("cpu")) == ""
    where = impls.obstacle(torch.device("meta"))
    assert where == "on meta: only tensors on a GPU or in CPU memory are taken"


def test_importing_the_package_imports_no_triton() -> None:
    program = "import sys, diloco_comm, diloco_comm.ops; print('triton' in sys.modules)"
    assert run(program) == "False\n"


@pytest.mark.nightly("11 s; about an installation without triton")
def test_without_triton_there_is_one_sentence() -> None:
    """From Python, and from the dispatcher, through which the engine calls."""
    printed = run(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from diloco_comm import ops\n"
        "print(ops.available_impls('cuda'))\n"
        "x = torch.zeros(4)\n"
        "for call in (lambda: ops.resolve_impl('', 'cuda'),\n"
        "             lambda: torch.ops.diloco_comm_triton.merge(x, [x])):\n"
        "    try:\n"
        "        call()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    impls_there, *sentences = printed.splitlines()
    if not impls.has_cuda_kernels():
        assert impls_there == "()"
        assert sentences == [impls.needs_triton()] * 2
    else:
        assert impls_there == "('cuda',)"
        assert sentences == [impls.needs_triton()]


@pytest.mark.nightly("8 s; about a process without the interpreter")
def test_cpu_tensors_need_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    printed = run(
        "import torch\n"
        "from diloco_comm import ops\n"
        "try:\n"
        "    ops.merge(torch.zeros(4), [torch.zeros(4)], impl='triton')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert printed == (
        "impl 'triton' runs on CUDA tensors, and on CPU tensors only in Triton's interpreter: "
        "set TRITON_INTERPRET=1 before Python starts\n"
    )


def test_no_engine_runs_on_the_interpreter() -> None:
    """Single operators take CPU tensors there; what resolves a name for the engine refuses it."""
    with pytest.raises(ValueError, match=r"impl must be one of reference, .*got 'triton'"):
        ops.resolve_impl("triton")


def test_the_default_on_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own where both are there, else the one that is."""
    monkeypatch.setitem(impls.DEFAULT_ON_CUDA, "reduce", "triton")
    monkeypatch.setattr(impls, "has_triton", lambda: True)
    monkeypatch.setattr(impls, "has_cuda_kernels", lambda index=None: False)
    assert ops.available_impls("cuda") == ("triton",)
    assert ops.resolve_impl("", "cuda", "encode") == "triton"
    with pytest.raises(ValueError, match=r"impl must be one of triton on cuda tensors.*'cuda'"):
        ops.resolve_impl("cuda", "cuda")
    monkeypatch.setattr(impls, "has_cuda_kernels", lambda index=None: True)
    defaults = [ops.resolve_impl("", "cuda", operator) for operator in ("encode", "reduce")]
    assert defaults == ["cuda", "triton"]
    assert ops.resolve_impl("", "cuda") == ""
    assert ops.resolve_impl("triton", "cuda", "encode") == "triton"
    monkeypatch.setattr(impls, "has_triton", lambda: False)
    assert ops.available_impls("cuda") == ("cuda",)
    assert ops.resolve_impl("", "cuda", "reduce") == "cuda"


def registered() -> set[str]:
    """Name the operators that torch knows of the extension, less those for benchmarks."""
    names = [name.removeprefix("diloco_comm::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("diloco_comm::")]  # fmt: skip
    return {name for name in names if not name.startswith("_")}


def test_every_operator_has_a_default_on_cuda_tensors() -> None:
    assert set(impls.DEFAULT_ON_CUDA) == registered() - set(impls.CPU_ONLY)
    assert set(impls.DEFAULT_ON_CUDA.values()) <= set(impls.IMPLEMENTATIONS["cuda"])


def test_an_operator_takes_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function of the module asks for the default of its own name."""
    monkeypatch.setattr(impls, "has_triton", lambda: True)
    monkeypatch.setattr(impls, "has_cuda_kernels", lambda index=None: True)
    monkeypatch.setitem(impls.DEFAULT_ON_CUDA, "norms", "triton")
    chosen = []
    real = impls.resolve_impl

    def resolve(impl: str, device: str, operator: str, index: int | None) -> str:
        chosen.append(real(impl, "cuda", operator, index))
        return "reference"

    monkeypatch.setattr(ops, "resolve_impl", resolve)
    x = torch.zeros(4)
    ops._chosen.cache_clear()
    try:
        ops.merge(x, [x.clone()])
        ops.norms(x, [x.clone()], torch.zeros(2, dtype=torch.float64))
        ops.norms(x, [x.clone()], torch.zeros(2, dtype=torch.float64), impl="cuda")
    finally:
        ops._chosen.cache_clear()
    assert chosen == ["cuda", "triton", "cuda"]


def test_the_environment_means_the_device_that_has_the_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(impls, "has_triton", lambda: True)
    monkeypatch.setenv("DILOCO_COMM_IMPL", "scalar")
    assert (ops.resolve_impl(), ops.resolve_impl("", "cuda")) == ("scalar", "")
    monkeypatch.setenv("DILOCO_COMM_IMPL", "triton")
    assert (ops.resolve_impl(), ops.resolve_impl("", "cuda")) == ("", "triton")
    monkeypatch.setenv("DILOCO_COMM_IMPL", "sse9")
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="got 'sse9'"):
            ops.resolve_impl("", device)


def test_every_operator_serves_cuda_tensors() -> None:
    assert registered() == {*impls.OPERATORS, *impls.CPU_ONLY}
    for name in impls.OPERATORS:
        for namespace in ("diloco_comm", "diloco_comm_triton"):
            full = f"{namespace}::{name}"
            assert torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"), full


def test_ids_are_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks name tests by their ids."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_a_gpu = runpy.run_path(triton_cases.__file__)["IMPLS"]
    assert [param.id for param in on_a_gpu] == triton_cases.IMPLS == ["triton"]


@pytest.mark.nightly("up to 4 s each in the interpreter; test_ops_torch checks the same operators")
@interpreted
@pytest.mark.parametrize("name", [name for name in calls() if name in impls.OPERATORS])
def test_opcheck(name: str) -> None:
    """Schema, fake tensors, and the dispatcher's way of passing arguments."""
    pytest.importorskip("triton", reason="needs Triton")
    args, kwargs = calls(70)[name]
    kwargs.pop("residual", None)
    operator = getattr(torch.ops.diloco_comm_triton, name).default
    if name != "norms":
        torch.library.opcheck(operator, args, kwargs)
    operator(*args, **kwargs)


# Tables. Their addresses are never read here.


def brute_force(tensors: list[torch.Tensor], run_elements: int, tile: int) -> list[tuple]:
    """Say for each tile which elements of which tensors it has."""
    owners = [(t, i) for t, tensor in enumerate(tensors) for i in range(tensor.numel())]
    rows = []
    for run_begin in range(0, len(owners), run_elements):
        run = owners[run_begin : run_begin + run_elements]
        rows += [run[at : at + tile] for at in range(0, run_elements, tile)]
    return rows


@given(data=st.data())
def test_tiles_say_where_their_elements_lie(data: st.DataObject) -> None:
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    tensors = tensors_like(data.draw(st.integers(0, 300)), data.draw(st.integers(0, 99)))
    run_elements, tile = data.draw(st.sampled_from([(32, 32), (64, 32), (96, 64), (512, 64)]))
    rows, segments = tables.build_tiles(tensors, run_elements, tile)
    filled = [tensor for tensor in tensors if tensor.numel()]
    numbers = {id(tensor): i for i, tensor in enumerate(filled)}
    truth = brute_force(tensors, run_elements, tile)
    assert len(rows) == len(truth)
    for (where, kind), elements in zip(rows.tolist(), truth, strict=True):
        touched = list(dict.fromkeys(t for t, _ in elements))
        first = tensors[touched[0]] if touched else None
        if kind >= 0:
            assert len(touched) == 1 and len(elements) == tile and where % 16 == 0
            assert where == first.data_ptr() + elements[0][1] * first.element_size()
            assert kind == tables.DTYPES[first.dtype]
        else:
            assert -1 - kind == len(touched)
            assert not touched or where == numbers[id(first)]
    begin = 0
    for tensor, row in zip(filled, segments.tolist(), strict=True):
        number = tables.DTYPES[tensor.dtype]
        assert row == [begin, begin + tensor.numel(), tensor.data_ptr(), number]
        begin += tensor.numel()


def test_whole_tiles_of_aligned_tensors_are_direct() -> None:
    """A model of ordinary shapes is read by address, all but the ends of runs."""
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    tensors = [torch.zeros(4096 * n, dtype=DTYPES[n % 3]) for n in range(1, 7)]
    rows, _ = tables.build_tiles(tensors, 4096 * 7, 2048)
    assert (rows[:, 1] >= 0).all()


@interpreted
def test_tables_are_made_once_and_again_when_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    made = []
    real = tables.build_tiles
    monkeypatch.setattr(tables, "build_tiles", lambda *args: made.append(1) or real(*args))
    outer, params = torch.arange(40.0), [torch.zeros(20), torch.zeros(4, 5)]
    for _ in range(3):
        ops.merge(outer, params, impl="triton")
    assert len(made) == 1
    params[1] = torch.zeros(5, 4).t()  # elsewhere, or the same place in another order
    ops.merge(outer, params, impl="triton")
    assert len(made) == 2
    assert torch.equal(params[1], torch.arange(20.0, 40.0).view(5, 4).t())
    shorter = [params[0][:10], params[1]]  # the same addresses
    ops.merge(outer[10:], shorter, impl="triton")
    assert len(made) == 3 and torch.equal(params[0][:10], torch.arange(10.0, 20.0))


@interpreted
def test_old_tables_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    # A row of a tile and two of segments for each fragment.
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 3 * 8 * (2 + 2 * 4))
    outer = torch.arange(20.0)
    params = [list(torch.zeros(20).split(10)) for _ in range(5)]
    for each in params:
        ops.merge(outer, each, impl="triton")
    assert len(tables._tables) == 3
    assert all(torch.equal(torch.cat(each), outer) for each in params)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lone_tensor_needs_no_tables(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh buffers are decoded into in every round: none may make the host wait for a copy."""
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    monkeypatch.setattr(tables, "make_tiles", None)
    monkeypatch.setattr(tables, "find_tiles", None)
    case = fragment(5000, WireFormat("int8", 256), num_runs=2)
    params = [torch.linspace(-1, 1, 5000).to(dtype).view(50, 100).t()]
    results = []
    for impl in ("triton", "reference"):
        own, payload = [params[0].clone()], case.payload()
        out, norm = [torch.zeros(100, 50, dtype=dtype)], torch.zeros(2, dtype=torch.float64)
        ops.encode(case.outer, own, payload, 0, 5000, *case.form, impl=impl)
        terms = ([payload], [1.0], 0, 5000, *case.form)
        ops.outer_step(case.outer.clone(), None, own, *terms, "sgd", 0.5, alpha=0.5, impl=impl)
        ops.decode([payload], [0.5], out, *terms[2:], impl=impl)
        ops.norms(case.outer[:300], [own[0].flatten()[:300]], norm, impl=impl)
        results.append((payload, own[0], out[0], norm))
    for actual, expected in zip(*results, strict=True):
        assert_same(actual, expected, f"triton with one {dtype} tensor")


def test_a_capture_of_tensors_never_met_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = pytest.importorskip("diloco_comm.kernels.launch", reason="needs Triton")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call them once before the capture"):
        tables.make_tiles([torch.zeros(4)], torch.device("cuda", 0), 32, 32)


@interpreted
def test_one_launch_whatever_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = pytest.importorskip("diloco_comm.kernels.operators", reason="needs Triton")
    launched = []
    monkeypatch.setattr(operators, "launch", lambda *args, **meta: launched.append(args[1]))
    case = fragment(9000, WireFormat("int8", 32), num_runs=4)
    params = [torch.zeros(30) for _ in range(300)]
    payload, run = case.payload(), case.layout.run_elements
    for begin in (0, run, 2 * run):  # chunks
        ops.encode(case.outer, params, payload, begin, begin + run, *case.form, impl="triton")
    ops.decode([payload], [1.0], params, 0, 9000, *case.form, impl="triton")
    assert len(launched) == 4
