"""``deploy/``: the files agree with the commands, with each other and with the image."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import check_arguments

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = {
    one["metadata"]["name"] + "/" + one["kind"]: one
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
}
JOBSET, TRAINJOB = (
    yaml.safe_load((DEPLOY / "operators" / f"{name}.yaml").read_text())
    for name in ("jobset", "trainjob")
)
SKYPILOT = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
# By kind, without descriptions and without the fields of pods; "sources" says where they are from.
SCHEMAS = json.loads((ROOT / "tests" / "data" / "deploy-schemas.json").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# The words of a command after `diloco-comm`, by the place where the command stands.
Commands = Iterator[tuple[str, list[str]]]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pod of each workload."""
    for name, one in KUBERNETES.items():
        if "template" in one["spec"]:
            yield name, one["spec"]["template"]["spec"]


def jobset_container(name: str) -> dict[str, Any]:
    (job,) = [one for one in JOBSET["spec"]["replicatedJobs"] if one["name"] == name]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


def torchrun_script(words: list[str]) -> list[str]:
    """Return the script behind the options of torchrun or of the launcher, with its arguments."""
    (at,) = [i for i, word in enumerate(words) if word.startswith("examples/")]
    return words[at:]


def probes(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: value for key, value in container.items() if key.endswith("Probe")}


def in_kubernetes() -> Commands:
    for name, pod in pods():
        for container in pod["containers"]:
            yield name, container["args"]
            for key, probe in probes(container).items():
                words = probe.get("exec", {}).get("command", [""])
                if words[0] == "diloco-comm":
                    yield f"{name} {key}", words[1:]


def in_compose() -> Commands:
    for name, service in COMPOSE["services"].items():
        if "entrypoint" not in service:
            yield name, shlex.split(service["command"])
        for line in "\n".join(service["command"] if name == "keys" else []).splitlines():
            if line.startswith("diloco-comm "):
                yield name, shlex.split(line)[1:]
        test = service.get("healthcheck", {}).get("test", [])
        if "diloco-comm" in test:
            yield f"healthcheck of {name}", test[test.index("diloco-comm") + 1 :]


def in_units() -> Commands:
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=/usr/local/bin/diloco-comm (.*)$", unit.read_text(), re.M)
        yield unit.name, shlex.split(line)


def in_operators() -> Commands:
    store = jobset_container("store")
    yield "store of the JobSet", store["args"]
    for line in SKYPILOT["run"].splitlines():
        if "diloco-comm" in line:
            yield "skypilot", shlex.split(line.partition("diloco-comm ")[2])


COMMANDS = {
    **{"kubernetes": in_kubernetes, "compose": in_compose, "systemd": in_units},
    "operators": in_operators,
}


@pytest.mark.parametrize(
    ("where", "number"),
    [("kubernetes", 4), ("compose", 17), ("systemd", len(UNITS)), ("operators", 2)],
)
def test_each_command_has_options_that_exist(where: str, number: int) -> None:
    commands = list(COMMANDS[where]())
    assert len(commands) == number
    for place, words in commands:
        check_arguments(words, f"{where}: {place}")


def option(words: list[str], name: str) -> str:
    """Return the value of an option, in either spelling."""
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return joined[0] if joined else words[words.index(name) + 1]


def test_the_options_of_the_scripts_exist() -> None:
    lines = [shlex.split(COMPOSE["services"][name]["command"]) for name in ("paris", "tokyo")]
    lines = [["examples/two_machines.py", *words] for words in lines]
    lines += [torchrun_script(jobset_container("replica")["command"])]
    lines += [torchrun_script(TRAINJOB["spec"]["trainer"]["args"])]
    for place, words in [*in_kubernetes(), *in_compose(), *in_operators()]:
        if words[0] == "launch":
            lines.append(torchrun_script(words))
            assert place
    assert len(lines) == 8
    for script, *words in lines:
        known = re.findall(r'add_argument\("(--[a-z-]+)"', (ROOT / script).read_text())
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert set(given) <= set(known), script
        assert f"{script} " in DOCKERFILE


def port_of(words: list[str]) -> int:
    return int(option(words, "--listen").rpartition(":")[2])


def test_ports_agree_in_kubernetes() -> None:
    service = KUBERNETES["registry/Service"]["spec"]["ports"][0]
    stateful = KUBERNETES["registry/StatefulSet"]["spec"]
    (container,) = stateful["template"]["spec"]["containers"]
    port = port_of(container["args"])
    assert container["ports"] == [{"name": service["targetPort"], "containerPort": port}]
    assert service["port"] == port
    for probe in probes(container).values():
        if "tcpSocket" in probe:
            assert probe["tcpSocket"] == {"port": service["targetPort"]}
        else:
            address = option(probe["exec"]["command"], "--registry")
            assert address == f"tcp://127.0.0.1:{port}"
    for name in ("replicas/Job", "spot/Job"):
        (replica,) = KUBERNETES[name]["spec"]["template"]["spec"]["containers"]
        assert option(replica["args"], "--registry") == f"tcp://{stateful['serviceName']}:{port}"
    labels = stateful["template"]["metadata"]["labels"]
    assert KUBERNETES["registry/Service"]["spec"]["selector"].items() <= labels.items()


def test_a_replica_has_a_worker_for_each_gpu_and_a_number_of_its_own() -> None:
    runs = set()
    for name in ("replicas/Job", "spot/Job"):
        spec = KUBERNETES[name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert option(container["args"], "--nproc-per-node") == str(gpus)
        # Kubernetes takes other numbers of a Job with indices for an error.
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert container["env"][-1]["name"] == "DILOCO_COMM_REPLICA"
        runs.add(option(container["args"], "--run"))
    assert len(runs) == 1
    assert KUBERNETES["replicas/Job"]["spec"]["completions"] <= 1000


CHECKED = [("JobSet", JOBSET), ("TrainJob", TRAINJOB), ("SkyPilot", SKYPILOT)]
CHECKED += [(one["kind"], one) for one in KUBERNETES.values() if one["kind"] in SCHEMAS]


@pytest.mark.parametrize(("kind", "one"), CHECKED)
def test_fields_exist(kind: str, one: dict[str, Any]) -> None:
    """Services and workloads of Kubernetes were validated by hand, as the page says."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind])
    assert [error.message for error in validator.iter_errors(one)] == []
    (error,) = validator.iter_errors(one | {"sepc": {}})
    assert "sepc" in error.message


def test_the_nodes_of_a_jobset_find_each_other() -> None:
    name, spec = JOBSET["metadata"]["name"], JOBSET["spec"]
    (replica,) = [one for one in spec["replicatedJobs"] if one["name"] == "replica"]
    words, job = jobset_container("replica")["command"], replica["template"]["spec"]
    assert option(words, "--nnodes") == str(job["completions"]) == str(job["parallelism"])
    assert option(words, "--replicas") == str(replica["replicas"])
    # JobSet names the pods so, and makes a headless service of its own name.
    assert option(words, "--master-addr") == f"{name}-replica-$(REPLICA)-0.{name}"
    port = port_of(jobset_container("store")["args"])
    assert option(words, "--store") == f"tcp://{name}-store-0-0.{name}:{port}"
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["replica"]


def test_policies_name_the_pods_of_the_run() -> None:
    labels = [KUBERNETES[name]["spec"]["template"]["metadata"]["labels"] for name, _ in pods()]
    selectors = [
        (one["spec"].get("podSelector") or one["spec"]["selector"])["matchLabels"]
        for name, one in KUBERNETES.items()
        if name.endswith(("/NetworkPolicy", "/PodDisruptionBudget"))
    ]
    assert len(selectors) == 3
    for selector in selectors:
        assert any(selector.items() <= one.items() for one in labels), selector


def test_the_keys_that_a_command_reads_are_mounted() -> None:
    for name, pod in pods():
        secrets = {one["name"]: one["secret"] for one in pod["volumes"] if "secret" in one}
        (container,) = pod["containers"]
        (mount,) = [one for one in container["volumeMounts"] if one["name"] in secrets]
        for probe in probes(container).values():
            words = probe.get("exec", {}).get("command", [])
            if "diloco-comm" in words:
                paths = [item["path"] for item in secrets[mount["name"]]["items"]]
                key = Path(option(words, "--key"))
                assert str(key.parent) == mount["mountPath"] and key.name in paths
        folder = "--keys" if name == "registry/StatefulSet" else "--key"
        key = Path(option(container["args"], folder))
        paths = [item["path"] for item in secrets[mount["name"]]["items"]]
        assert str(key.parent) == mount["mountPath"] and key.name in paths
        assert "allowed/server.key" in paths


def test_each_volume_of_a_container_exists() -> None:
    for name, pod in pods():
        claims = KUBERNETES[name]["spec"].get("volumeClaimTemplates", [])
        volumes = {one["name"] for one in pod["volumes"]}
        volumes |= {one["metadata"]["name"] for one in claims}
        (container,) = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_ports_agree_in_compose() -> None:
    services = COMPOSE["services"]
    ports = {}
    for name in ("store", "relay", "registry"):
        ports[name] = port_of(shlex.split(services[name]["command"]))
        assert re.search(rf"\b{ports[name]}\b", str(services[name]["healthcheck"]["test"]))
    for name in ("paris", "tokyo"):
        words = shlex.split(services[name]["command"])
        assert option(words, "--store") == f"tcp://store:{ports['store']}"
        assert option(words, "--relay") == f"tcp://relay:{ports['relay']}"
    replica = shlex.split(services["replica"]["command"])
    assert option(replica, "--registry") == f"tcp://registry:{ports['registry']}"


def test_the_sites_of_compose_meet_at_store_and_relay_only() -> None:
    networks = {
        site: {name for name, one in COMPOSE["services"].items() if site in one.get("networks", [])}
        for site in ("paris", "tokyo")
    }
    assert networks["paris"] & networks["tokyo"] == {"store", "relay"}
    assert "paris" not in networks["tokyo"] and "tokyo" not in networks["paris"]


def test_pods_run_as_the_user_of_the_image() -> None:
    (user,) = re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.M)
    for _, pod in pods():
        assert pod["securityContext"]["runAsUser"] == int(user)
        assert pod["securityContext"]["fsGroup"] == int(user)
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_image_is_built_of_files_that_exist() -> None:
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M)
    files = [file for line in lines for file in line.split()]
    assert len(files) > 8
    assert [file for file in files if not (ROOT / file).exists()] == []
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    assert [one for one in files if not any(Path(one).is_relative_to(at) for at in let_in)] == []


def test_units_have_ports_of_their_own() -> None:
    ports = [port_of(words) for _, words in in_units() if words[0] != "launch"]
    assert len(ports) == len({*ports}) == 3


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = Path(sys.executable).with_name("diloco-comm")
    for unit in UNITS:
        text = unit.read_text().replace("/usr/local/bin/diloco-comm", str(command))
        (tmp_path / unit.name).write_text(text)
    (tmp_path / "diloco-replica@demo.service").symlink_to("diloco-replica@.service")
    units = [str(file) for file in sorted(tmp_path.glob("*.service")) if "@." not in file.name]
    ended = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    # Units of the machine that are not ours may be wrong.
    ours = [line for line in ended.stderr.splitlines() if "diloco" in line]
    assert (len(units), ours) == (4, [])
