"""The C++ extension. Importing it registers ``torch.ops.diloco_comm.*`` (see ``ops.py``)."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store

MAX_REPLICAS: int

def empty_pages(num_bytes: int) -> Tensor: ...
def connect_store(host: str, port: int, timeout_s: float) -> Store: ...
def bounded_store(store: Store, limit_s: float) -> Store: ...
def minor_faults() -> int: ...
def make_schedule(
    num_chunks: int, num_phases: int, num_lanes: int, window: int
) -> list[tuple[str, int, int]]: ...
def find_mismatch(headers: list[Header]) -> str: ...
def find_bad_elements(
    numbers: list[tuple[int, int]], replicas: list[int]
) -> tuple[str, list[int]]: ...

class Header:
    wire: str
    flags: int
    block_size: int
    num_elements: int
    num_chunks: int
    layout_hash: int
    fragment: int
    round: int
    sync_every: int
    num_fragments: int
    inner_step: int
    blob_bytes: int
    source_rank: int
    weight: float
    outer_lr: float
    gap: float
    def __init__(self, kind: str) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def replica(self) -> int: ...
    @property
    def epoch(self) -> int: ...

class Plan:
    def __init__(
        self,
        num_elements: int,
        num_runs: int,
        run_elements: int,
        run_bytes: int,
        wire: str,
        block_size: int,
        code_offset: int,
        code_bits: int,
        world_size: int,
        num_lanes: int,
        window: int,
        impl: str,
    ) -> None: ...

class Failure:
    @property
    def kind(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def replicas(self) -> list[int]: ...
    @property
    def inner_steps(self) -> list[int]: ...

class Job:
    def wait(self, seconds: float) -> bool: ...
    def wait_landed(self, runs: int, seconds: float) -> int: ...
    def block_caller(self) -> None: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def failure(self) -> Failure | None: ...
    @property
    def headers(self) -> list[Header]: ...
    @property
    def weights(self) -> list[float]: ...
    @property
    def blobs(self) -> list[Tensor]: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def encode_seconds(self) -> float: ...
    @property
    def num_bad_encoded(self) -> int | None: ...
    @property
    def counters(self) -> dict[str, int]: ...

class DeviceQueue:
    def __init__(self, device: torch.device) -> None: ...

class ChunkLoader:
    def __init__(self, device: torch.device) -> None: ...
    def load(self, hosts: list[Tensor], begin: int, end: int) -> list[Tensor]: ...
    def release(self, hosts: list[Tensor], begin: int, end: int, is_written: bool) -> None: ...
    def finish(self) -> None: ...

# (queue, payload, result, count of bad elements): the device's buffers, and the loader of outer.
Staging = tuple[DeviceQueue, Tensor, Tensor | None, Tensor, ChunkLoader | None]

class Engine:
    def __init__(self, replica: int, timeout_s: float, report_patience_s: float) -> None: ...
    def attach(
        self,
        epoch: int,
        rank: int,
        replicas: list[int],
        groups: list[ProcessGroupGloo],
        store: Store,
        prefix: str,
    ) -> None: ...
    def start(
        self,
        plan: Plan,
        header: Header,
        payload: Tensor,
        result: Tensor | None,
        outer: Tensor | None,
        params: list[Tensor],
        encode_key: int,
        reduce_key: int,
        residual: Tensor | None,
        new_residual: Tensor | None,
        reduce_residual: Tensor | None,
        new_reduce_residual: Tensor | None,
        bad: Tensor | None,
        staging: Staging | None,
        is_overlapped: bool,
    ) -> Job: ...
    def submit(
        self,
        header: Header,
        blob: Tensor | None = None,
        sends: list[tuple[int, Tensor]] = ...,
        recvs: list[tuple[int, Tensor]] = ...,
    ) -> Job: ...
    def reserve_staging(self, num_bytes: int) -> None: ...
    def emulate_link(self, gbps: float, rtt_ms: float) -> None: ...
    def inject_fault(
        self,
        action: str = "",
        stage: str = "",
        chunk: int = -1,
        num_peers: int = 0,
        max_delay_us: float = 0.0,
        seed: int = 0,
    ) -> None: ...
    def close(self, patience_s: float, inner_step: int) -> None: ...
    def check_process(self) -> None: ...
    @property
    def dead_reason(self) -> str: ...
