"""``--http`` of the four commands that host something, as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_helpers import check_documented, check_misuse, run_cli
from commands import CLI, serving_command

from benchmarks.support.simulated_host import SimulatedHost, key_of, record_of
from diloco_comm.elastic.registry import connect
from diloco_comm.group.beats import name_of
from diloco_comm.monitor.openmetrics import OF_HOST

pytestmark = pytest.mark.usefixtures("forked_programs")


class Hosted(NamedTuple):
    """A command that runs, and the JSON that it has announced."""

    process: subprocess.Popen[str]
    announced: dict[str, str]

    def get(self, path: str, **headers: str) -> str:
        request = urllib.request.Request(self.announced["http"] + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def facts(self) -> set[str]:
        return set(json.loads(self.get("status.json"))["facts"])


@contextmanager
def hosted(*arguments: object) -> Iterator[Hosted]:
    command = [*CLI, *arguments, "--listen", "127.0.0.1:0", "--json"]
    with serving_command(command, stderr=subprocess.PIPE) as (process, line):
        yield Hosted(process, json.loads(line))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def facts_of(prefix: str) -> set[str]:
    return {one.name for one in OF_HOST if one.name.startswith(prefix)} - {"host_runs"}


def test_a_registry_shows_records_beats_and_figures() -> None:
    one, record = SimulatedHost(), record_of(1, [3])
    one.post("llama", key_of(3), rounds=7)
    one.beat("llama", key_of(3), phase="exchange")
    with hosted("registry", "--http", "0") as found:
        check_documented(found.announced, "how-to/monitor.md")
        registry = connect(found.announced["address"], run="llama", timeout_s=60)
        assert registry.swap(b"", record.to_bytes())
        registry.beat(name_of(key_of(3)), one.beats()[0][2])
        registry.post(name_of(key_of(3)), one.posted()[0][2])
        # The answer to this call says that the post before has arrived.
        registry.beat("", b"")
        # A status is a second old at most, and may be of the moment before the beat.
        while (
            not (runs := json.loads(found.get("status.json"))["runs"])
            or not (runs[0]["members"][0]["phase"])
        ):
            time.sleep(0.1)
        (run,) = runs
        assert (run["run"], run["view"]["number"], run["view"]["members"]) == ("llama", 1, [3])
        assert run["members"][0]["phase"] == "exchange"
        assert run["members"][0]["figures"]["rounds"] == 7
        assert 'diloco_rounds_total{run="llama",replica="3"} 7\n' in found.get("metrics")
        assert found.facts() == facts_of("host_")
        assert "<table" not in found.get("") and "page.js" in found.get("")
        registry.close()


def test_a_store_and_its_relay_have_one_page() -> None:
    with hosted("store", "--relay-port", "0", "--http", "localhost:0") as found:
        assert found.facts() == facts_of("host_") | facts_of("relay_")
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(60) == 0
        assert f"the page is at {found.announced['http']}" in found.process.stderr.read()


def test_a_relay_shows_those_that_wait() -> None:
    with hosted("relay", "--http", "0") as found:
        assert found.facts() == facts_of("relay_")
        assert "\ndiloco_relay_waiting 0\n" in found.get("metrics")


@pytest.mark.parametrize("options", [(), ("decoupled",)])
def test_a_server_shows_its_model(options: tuple[str, ...]) -> None:
    with hosted("serve", *options, "--http", "0") as found:
        assert found.facts() == facts_of("server_")
        report = json.loads(found.get("status.json"))["report"]
        assert report["parameters"] == 0 and report["lost"] == 0


def test_the_page_of_a_server_has_no_folder(tmp_path: Path) -> None:
    with hosted("serve", "--snapshot", tmp_path, "--http", "0") as found:
        text = found.get("status.json")
        assert json.loads(text)["report"]["storage"] and str(tmp_path) not in text


def test_a_token_is_asked_for_and_never_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    with hosted("store", "--http", "0.0.0.0:0", "--http-token", token) as found:
        port = found.announced["http"].rpartition(":")[2]
        here = found._replace(announced={"http": f"http://127.0.0.1:{port}"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            here.get("status.json")
        report = here.get("status.json", Authorization="Bearer correct-horse-battery")
        found.process.send_signal(signal.SIGTERM)
        text = "".join(found.process.communicate()) + report
        assert "correct-horse" not in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["registry", "--http", "0.0.0.0:80"], ["0.0.0.0:80 can be reached", "--http-token"]),
        (["store", "--http", "70000"], ["--http must be a port from 0", "got '70000'"]),
        (["relay", "--http-token", "token"], ["--http-token", "needs --http"]),
        (["serve", "--http", "0", "--http-token", "nowhere"], ["nowhere cannot be read"]),
        (["registry", "--http", "0", "--truncate"], ["--http", "which hosts nothing"]),
    ],
)
def test_misuse_is_one_sentence(arguments: list[str], named: list[str]) -> None:
    check_misuse(run_cli(*arguments, "--listen", "127.0.0.1:0"), *named)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in ("store", "relay", "serve"):
            ended = run_cli(command, "--listen", "127.0.0.1:0", "--http", port)
            assert ended.status == 1
            assert re.search(rf"diloco-comm: cannot serve --http at .* {port}: Addr", ended.err)
