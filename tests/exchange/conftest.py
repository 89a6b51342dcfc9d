"""Processes of one module, without a process group, and a store with keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Crew, Pool
from zygote import Zygote

from diloco_comm.base.service.keys import LinkKeys
from diloco_comm.base.store_host import HostedStore, open_store


@pytest.fixture(scope="module")
def pools(zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    crew = Crew(zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()


@pytest.fixture
def hosted(keys: list[LinkKeys]) -> Iterator[HostedStore]:
    """A store that lets in the keys of a file's fixture ``keys``; the first of them is its own."""
    found = open_store("127.0.0.1", 0, keys[0])
    yield found
    found.store.close()
