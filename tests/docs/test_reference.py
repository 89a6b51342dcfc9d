"""The pages name arguments that exist, with the defaults that they have."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from choice_groups import HOMES
from pages import PAGES, ROOT

import diloco_comm
from diloco_comm import Blocking, DiLoCo, Elastic, Nesterov
from diloco_comm import asynchronous as async_names
from diloco_comm.asynchronous import AsyncDiLoCo
from diloco_comm.base import env
from diloco_comm.options import DEFAULTS

PUBLIC: dict[str, Any] = {
    name: getattr(module, name) for module in (diloco_comm, async_names) for name in module.__all__
}
# Arguments whose defaults the table describes, or that have none.
IN_WORDS = {
    *("feedback_decay", "impl", "config", "backend", "offload", "offsets", "chunk_bytes"),
    *("model", "optimizer", "sync_every", "block_size", "listen", "advertise", "link_keys"),
}
# By default from the environment, and of the process.
FROM_THE_LAUNCHER = {"registry", "run", "replica", "key", "insecure", "name"}
UNITS = {"s": 1.0, "min": 60.0}
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

# The page and the heading of the other tables of arguments.
OTHER_TABLES: dict[str, tuple[Callable[..., Any], str]] = {
    "how-to/elastic.md": (Elastic, "## The arguments of `Elastic`"),
    "explanation/asynchronous.md": (AsyncDiLoCo, "## The worker's arguments and calls"),
}


def rows_of_arguments() -> Iterator[tuple[list[str], str]]:
    """Yield the arguments and the default of each row of the table in docs/reference/api.md.

    The rows of groups of choices are yielded by their names in a configuration.
    """
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    table = text.split("## The arguments of `DiLoCo`\n", 1)[1].split("\n\n")[1]
    for line in table.splitlines()[2:]:
        names, default, _ = re.split(r"(?<!\\)\|", line.strip("|"), maxsplit=2)
        yield re.findall(r"`(\w+)`", names), default.replace("`", "").strip()
    section = text.split("### Groups of choices\n", 1)[1]
    table = next(block for block in section.split("\n\n") if block.startswith("|"))
    for line in table.splitlines()[2:]:
        choice, default, _, old = re.split(r"(?<!\\)\|", line.strip("|"))
        kind, field = re.findall(r"`(\w+)\.(\w+)`", choice)[0]
        (name,) = re.findall(r"`(\w+)`", old)
        assert HOMES[name] == (kind_of(kind), field)
        if name != "wire":
            yield [name], default.replace("`", "").strip()


def kind_of(name: str) -> str:
    return {"StorePeers": "peers"}.get(name, name.lower())


def used_defaults() -> dict[str, Any]:
    """Return what a ``DiLoCo`` of one replica takes for the arguments that are not given."""
    model = torch.nn.Linear(3, 1)
    parameters = inspect.signature(DiLoCo.__init__).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    with DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=3) as diloco:
        found |= diloco.config()
    found |= {"timeout": env.timeout_s(), "join_timeout": env.join_timeout_s()}
    found["suspect_after"] = env.suspect_after_s()
    return DEFAULTS | {"link": None} | found | {"nonfinite": found["on_nonfinite"]}


def value_of(text: str) -> Any:
    """Return the value that a default in the table stands for."""
    if found := re.fullmatch(r"(\d+) (s|min)", text):
        return int(found[1]) * UNITS[found[2]]
    if found := re.fullmatch(r"(Blocking|Nesterov)(\(.*\))", text):
        made = {"Blocking": Blocking, "Nesterov": Nesterov}[found[1]](*ast.literal_eval(found[2]))
        return made.config()
    return None if text in ("", "none") else ast.literal_eval(text)


def test_the_table_has_all_arguments_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    used, named = used_defaults(), set()
    for names, default in rows_of_arguments():
        named |= set(names)
        told = default.split(", ") if default.count(", ") == len(names) - 1 > 0 else [default]
        for name, text in zip(names, told * (len(names) if len(told) == 1 else 1), strict=True):
            if (
                name in IN_WORDS
                or used.get(name) is inspect.Parameter.empty
                or name == "sync_every"
            ):
                continue
            assert used[name] == value_of(text), name
    # A sentence below the table names the arguments that became ``peers``.
    assert named == used.keys() - {"self", "group", "mesh", "membership"}


@pytest.mark.parametrize("page", OTHER_TABLES)
def test_the_other_tables_have_all_arguments_with_their_defaults(page: str) -> None:
    kind, title = OTHER_TABLES[page]
    parameters = {
        name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()
    }
    section = (ROOT / "docs" / page).read_text().split(f"{title}\n", 1)[1]
    table = next(block for block in section.strip().split("\n\n") if block.startswith("|"))
    named = []
    for line in table.splitlines()[2:]:
        names, default, _ = re.split(r"(?<!\\)\|", line.strip("|"), maxsplit=2)
        told = default.replace("`", "").strip().split(", ")
        found = re.findall(r"`(\w+)`", names)
        for name, text in zip(found, told * len(found), strict=False):
            named.append(name)
            if name not in FROM_THE_LAUNCHER and parameters[name] is not inspect.Parameter.empty:
                assert parameters[name] == value_of(text), name
    assert sorted(named) == sorted(parameters)


def calls_in_words() -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that stand between backquotes in the text of a page, with their places."""
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for text in CODE.findall(line):
                try:
                    parsed = ast.parse(text.strip(), mode="eval")
                except SyntaxError:
                    continue
                for node in ast.walk(parsed):
                    if isinstance(node, ast.Call):
                        yield f"{page.relative_to(ROOT)}:{number}: {text}", node


def called(node: ast.Call) -> Callable[..., Any] | None:
    """Return the function or class of this package that a call names; None for any other."""
    if isinstance(node.func, ast.Name):
        return PUBLIC.get(node.func.id)
    is_ours = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    if is_ours and node.func.value.id == "diloco":
        return getattr(DiLoCo, node.func.attr)
    return None


def test_calls_in_the_text_name_arguments_that_exist() -> None:
    wrong, num_checked = [], 0
    for place, node in calls_in_words():
        function = called(node)
        if function is None:
            continue
        parameters = inspect.signature(function).parameters
        for keyword in node.keywords:
            num_checked += 1
            if keyword.arg is not None and keyword.arg not in parameters:
                wrong.append(f"{place}: there is no {keyword.arg}=")
    assert wrong == [] and num_checked > 30


MAKERS = {
    *("DiLoCo", "fedavg", "local_sgd", "streaming_diloco", "eager_diloco", "co2"),
    *("DiLoCoCallback", "attach", "semi_sync_training"),
}


def programs() -> Iterator[tuple[str, str]]:
    """Yield the Python of the pages and the examples, with the place of each."""
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            yield str(page.relative_to(ROOT)), code
    for path in (ROOT / "examples").rglob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()


def test_programs_group_their_choices() -> None:
    """No program gives a choice without its group, which is an error."""
    single, num_checked = [], 0
    choices = HOMES.keys() - {"wire", "name"} | {"group", "mesh", "membership"}
    for place, code in programs():
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in MAKERS:
                num_checked += 1
                single += [f"{place}: {name}({k.arg}=)" for k in node.keywords if k.arg in choices]
    assert single == [] and num_checked > 20
