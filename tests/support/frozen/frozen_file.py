"""The file of frozen bits: made by this program, compared by ``tests/frozen``.

    python tests/support/frozen/frozen_file.py                          # compares
    python tests/support/frozen/frozen_file.py --write --add NAME       # NAME is new
    python tests/support/frozen/frozen_file.py --write --change NAME    # NAME may differ, or end

``PYTHONPATH`` must name the repository and the folders of ``tests/support``. A name may hold
wildcards. A name that matches no such entry is refused, and so is an entry without a name.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from frozen_runs import Bits, Layers, run_entries
from frozen_table import EVENTS, Setting, deaths, finals, make_table, others
from frozen_virtual import VIRTUAL, run_virtual
from workers import Crew, Pool
from zygote import Zygote

from diloco_comm import DiLoCo, ops

FILE = Path(__file__).parents[2] / "data" / "frozen.json"
IMPLS = [impl for impl in ops.available_impls() if impl != "reference"]
# Rows in one job of the worker processes, and the number of these processes.
NUM_ROWS, NUM_WORKERS = 20, 3
_RUNS = itertools.count()


# ------------------------------------------------------------------------------------- the file


def load() -> dict[str, Bits]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(entries: Mapping[str, Bits]) -> None:
    """Write one entry a line, in order of the names."""
    texts = {name: json.dumps(bits, separators=(",", ": ")) for name, bits in entries.items()}
    lines = [f"{json.dumps(name)}: {texts[name]}" for name in sorted(texts)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(found: Bits | str, expected: Bits) -> list[str]:
    """Say in which kinds of bits two entries differ, and where; of a text, the text.

    Arguments are compared as the settings that ``DiLoCo`` makes of them.
    """
    if isinstance(found, str):
        return [found]
    found, expected = with_settings(found), with_settings(expected)
    pairs = [(kind, found.get(kind), expected.get(kind)) for kind in expected]
    return [
        f"{kind}: {difference(a, b)}"
        for kind, a, b in pairs
        if a != b and not (kind == "payloads" and lacks_only_failed(a, b))
    ]


def lacks_only_failed(found: Any, expected: list[list[str]]) -> bool:
    """Whether payloads are missing only of attempts at rounds that failed and were sent again.

    A replica that notices the failure of one fragment early does not encode the next one.
    """
    return len(found or []) == len(expected) and all(
        set(own) <= set(known) and counted(own) == counted(known)
        for own, known in zip(found, expected, strict=True)
    )


def counted(payloads: list[str]) -> list[str]:
    """Keep the last payload of each fragment and round; texts are ``fragment.round:digest``."""
    last = {text.partition(":")[0]: i for i, text in enumerate(payloads)}
    return [text for i, text in enumerate(payloads) if last[text.partition(":")[0]] == i]


def difference(found: Any, expected: Any) -> str:
    """Name the first place at which two nested values differ."""
    if isinstance(found, list) and isinstance(expected, list):
        pairs = itertools.zip_longest(found, expected)
        place, values = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"[{place}] {difference(*values)}"
    if isinstance(found, dict) and isinstance(expected, dict):
        pairs = [(key, found.get(key), expected.get(key)) for key in {**found, **expected}]
        return ", ".join(f"{key} {difference(a, b)}" for key, a, b in pairs if a != b)
    return f"{found!r} instead of {expected!r}"


def with_settings(bits: Bits) -> Bits:
    configs = [settings_of(json.dumps(config)) for config in bits.get("config", [])]
    return {**bits, "config": configs}


@functools.cache
def settings_of(config: str) -> Bits:
    """Return the settings that ``DiLoCo`` makes of saved arguments, in their present names."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCo(model, optimizer, config=json.loads(config), peers="alone") as diloco:
        return diloco.config()


# ---------------------------------------------------------------------------------------- the runs


def is_virtual(name: str) -> bool:
    return name.startswith(("async ", "decoupled "))


def is_death(name: str) -> bool:
    return " death-" in name


def all_names(known: Iterable[str] = ()) -> list[str]:
    """Name all entries: rows of the table that are known already stay in it."""
    rows = [Setting.parse(name) for name in known if not is_virtual(name)]
    table = make_table(row for row in rows if row.event in EVENTS)
    return [*(row.name for row in [*table, *finals(), *deaths(), *others()]), *VIRTUAL]


def in_rotation(names: Iterable[str], shift: int = 0) -> dict[str, str]:
    """Give each name one of the implementations that this machine has."""
    return {name: IMPLS[(place + shift) % len(IMPLS)] for place, name in enumerate(names)}


def by_size(names: Iterable[str]) -> list[str]:
    """Put rows of three replicas first, then of one, which the last worker has, then of two."""
    return sorted(names, key=lambda name: (3, 1, 2).index(Setting.parse(name).world))


def run_rows(
    pool_of: Callable[..., Pool], entries: Mapping[str, str], **options: Any
) -> dict[str, Bits | str]:
    """Run entries, each with its implementation; return the bits of each, or why there are none.

    Args:
        pool_of: Makes a pool of so many persistent processes.
        entries: Implementations by name; no entry has a death.
        options: Options of ``run_entries``.
    """
    virtual = [name for name in entries if is_virtual(name)]
    workers = [name for name in entries if name.endswith(" workers")]
    rows = by_size(entries.keys() - {*virtual, *workers})
    found: dict[str, Bits | str] = {name: run_virtual(name, entries[name]) for name in virtual}
    for begin in range(0, len(rows), NUM_ROWS):
        pairs = [(name, entries[name]) for name in rows[begin : begin + NUM_ROWS]]
        found |= collect(pool_of(NUM_WORKERS, init_group=False), pairs, **options)
    pairs = [(name, entries[name]) for name in workers]
    return found | (collect(pool_of(4), pairs, **options) if pairs else {})


def run_death(pool_of: Callable[..., Pool], name: str, impl: str, **options: Any) -> Bits | str:
    """Train one row in processes of its own; the last replica is killed."""
    setting = Setting.parse(name)
    pool = pool_of(setting.num_processes, init_group=False)
    return collect(pool, [(name, impl)], killed=setting.killed, **options)[name]


def collect(
    pool: Pool,
    pairs: Sequence[tuple[str, str]],
    killed: Collection[int] = (),
    address: tuple[str, int] | str | None = None,
    **options: Any,
) -> dict[str, Bits | str]:
    """Let a pool train rows; put together what the replicas of each have.

    Args:
        address: The address of the rows' store, see ``run_entries``; None: the pool's store.
    """
    lists = pool.run(
        run_entries,
        address or pool.store,
        f"run {next(_RUNS)}",
        pairs,
        timeout=100,
        expect_exit=set(killed),
        **options,
    )
    present = [bits for rank, bits in enumerate(lists) if rank not in killed]
    rows = zip(pairs, *present, strict=True)
    return {name: joined([one for one in bits if one is not None]) for (name, _), *bits in rows}


def joined(replicas: Sequence[Bits | str]) -> Bits | str:
    """Return a list over the replicas for each kind of bits; one value if all are equal."""
    for bits in replicas:
        if isinstance(bits, str):
            return bits
    kinds = {kind: [bits[kind] for bits in replicas] for kind in replicas[0]}  # type: ignore[index]
    return {kind: values[:1] if same(values) else values for kind, values in kinds.items()}


def same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def run_all(names: Sequence[str]) -> dict[str, Bits | str]:
    """Run all entries, in processes that are made for it."""
    zygote = Zygote()
    impls = in_rotation(names)
    crew = Crew(zygote)
    found = run_rows(crew.pool, {name: impls[name] for name in names if not is_death(name)})
    crew.close()
    for name in filter(is_death, names):
        crew = Crew(zygote)
        found[name] = run_death(crew.pool, name, impls[name])
        crew.close()
    zygote.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--change", nargs="*", default=[], help="entries that may differ, or end")
    parser.add_argument("--add", nargs="*", default=[], help="entries that are not in the file")
    options = parser.parse_args()
    known = load()
    names = all_names(known)
    found = run_all(names)
    failed = [name for name in names if isinstance(found[name], str)]
    changed = {name: differences(found[name], known[name]) for name in known if name in found}
    told = {name: found[name] for name in failed}
    told |= {name: "; ".join(texts) for name, texts in changed.items() if texts}
    told |= {name: "is no entry any more" for name in known if name not in found}
    for name, text in told.items():
        print(f"{name}: {text}")
    new = found.keys() - known
    without = [*unmatched(told, options.change), *unmatched(new, options.add), *failed]
    idle = [*unmatched(options.change, told), *unmatched(options.add, new)]
    if without or idle:
        sys.exit(
            f"of {len(names)} entries these fail, differ without --change, or are new without "
            f"--add: {without}; these names match no such entry: {idle}"
        )
    if options.write:
        save(
            {name: found[name] if name in told else known.get(name, found[name]) for name in names}
        )
    print(f"{len(names)} entries; {len(told)} differ, and {len(new)} are new")


def unmatched(these: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the names without a counterpart, where either may be a pattern."""
    return [a for a in these if not any(fnmatchcase(a, b) or fnmatchcase(b, a) for b in others)]


if __name__ == "__main__":
    main()
