import pytest
from elastic_replicas import Run, registry as registry
from test_elastic_training import run_all
from diloco_comm import Blocking, Streaming

OPT = {
    "blocking": {"overlap": Blocking()},
    "streaming": {"overlap": Streaming(delay=2, alpha=0.5), "fragments": 3},
}


@pytest.mark.parametrize("name", OPT)
def test_smoke(fresh_workers, registry, name):
    ends = run_all(fresh_workers, registry, Run(2, 240, joins={2: 12}, options=OPT[name]), 3)
    for e in ends:
        print(e.views)
    last = ends[0].views[-1]
    assert last.joined == (2,), last
    assert last.copied_bytes == 0
