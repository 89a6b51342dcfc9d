"""Processes of one module, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Crew, Pool
from zygote import Zygote


@pytest.fixture(scope="module")
def pools(zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    crew = Crew(zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()
