"""``diloco-comm plan``: its examples, its JSON, the model files it reads, its sentences."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import check_documented, check_misuse, check_schema, examples, run_cli

import diloco_comm
from diloco_comm_tools.common.commands import as_today
from diloco_comm_tools.plan import command as plan_command
from diloco_comm_tools.plan import estimate as losses
from diloco_comm_tools.plan import request as plan_model
from diloco_comm_tools.plan.command import Prices
from diloco_comm_tools.plan.estimate import make_plan
from diloco_comm_tools.plan.request import CHOOSABLE, Request, Setting, choose

SMALL = ["--params", "1e9", "--layers", "24", "--step-time", "0.1"]
PAID = ["--gbps", 1, "--tokens-per-step", 8192]
SETTING = {
    "method": str,
    "delay": int,
    "wire": str,
    "sync_every": int,
    "fragment_layers": int,
    "utilisation": float,
}
CHOSEN = {
    "setting": SETTING,
    "config": {...: object},
    "imports": str,
    "line": str,
    "bytes_per_day": float,
    "bytes_per_month": float,
    "extra_memory_bytes": float,
    "usd_per_1e9_tokens": ({"gpus": float, "egress": float, "total": float}, None),
    "why": (str, None),
    "loss": (
        {
            "nats": (float, None),
            "terms": {"sync_every": float, "wire": (float, None), "overlap": float},
            "extrapolated": [str],
        },
        None,
    ),
}
GBPS = {key: (float, None) for key in ("0.5", "0.8", "0.9", "0.95", "0.99")}
SCHEMA: dict[str, Any] = {
    "schema": int,
    "request": {
        "params": float,
        "layers": int,
        "step_time": float,
        "workers": int,
        "method": str,
        "sync_every": int,
        "fragment_layers": int,
        "delay": int,
        "rounds": int,
        "wire": str,
        "block_size": int,
        "bits": (float, None),
        "rtt_ms": float,
        "efficiency": (float, None),
    },
    "bits_per_param": float,
    "bandwidth_gbps": GBPS,
    "step_bandwidth_gbps": GBPS,
    "curve": {"gbps": [float], "layer": [float], "step": [float]},
    "by_rtt_ms": [{"rtt_ms": float, "step_bandwidth_gbps": GBPS}],
    "bytes_per_round": float,
    "bytes_per_day": float,
    "extra_memory_bytes": float,
    "wires": [
        {
            "wire": str,
            "bits_per_param": float,
            "bytes_per_round": float,
            "extra_memory_bytes": float,
            "loss_over_fp32": (float, None),
            "utilisation": (float, None),
        }
    ],
    "auto": (str, None),
    "link": (
        {
            "gbps": float,
            "rtt_ms": float,
            "efficiency": float,
            "utilisation": float,
            "layer_utilisation": float,
            "lost_s_per_day": float,
            "bytes_per_day": float,
            "target": float,
            "wires_tried": [str],
            "chosen_wires": [str],
            "settings": [SETTING],
            "chosen": (CHOSEN, None),
        },
        None,
    ),
}


def plan_json(*arguments: object) -> dict[str, Any]:
    ended = run_cli("plan", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


EPILOGS = (
    plan_command.EXAMPLES,
    plan_command.FAILURES_EXAMPLES,
    plan_command.DECOUPLED_EXAMPLES,
    plan_command.PUBLISHED_EXAMPLES,
)
ALL_EXAMPLES = [example for epilog in EPILOGS for example in examples(epilog)]


@pytest.mark.parametrize("arguments", ALL_EXAMPLES, ids=" ".join)
def test_examples_of_the_help_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_cli(*arguments)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out
    if "--plot" in arguments:
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["dp", "diloco", "streaming", "delayed", "eager", "co2"])
def test_json_has_the_documented_schema(method: str) -> None:
    """With all options of the form that scripts use, whether the method has them or not."""
    own = ["--method", method, "--sync-every", 100, "--fragment-layers", 3, "--delay", 1]
    plan = plan_json(*SMALL, *own, "--bits", 13.4, "--gbps", 1)
    check_schema(plan, SCHEMA)
    assert len(plan["curve"]["gbps"]) == len(plan["curve"]["step"]) == 50
    keys = [*SCHEMA, *SCHEMA["request"], *SCHEMA["link"][0], *SCHEMA["curve"]]
    keys += [*SCHEMA["wires"][0], *CHOSEN, *CHOSEN["loss"][0], *CHOSEN["usd_per_1e9_tokens"][0]]
    check_documented(keys, "reference/plan.md")


def test_scripts_get_a_row_of_the_papers_table() -> None:
    """The first example of the paper: 1B, vanilla DiLoCo."""
    own = ["--method", "diloco", "--fragment-layers", 3, "--delay", 1, "--bits", 13.4]
    needed = plan_json(*SMALL, *own)["bandwidth_gbps"]
    assert [round(x, 1) for x in needed.values()] == [1.4, 6.2, 13.3, 23.3, 86.8]


def test_bits_come_from_the_wire_unless_given() -> None:
    assert plan_json(*SMALL)["bits_per_param"] == 8.0625
    assert plan_json(*SMALL, "--method", "dp")["bits_per_param"] == 32
    assert plan_json(*SMALL, "--wire", "int4", "--replicas", 4)["bits_per_param"] == 6.09375
    assert plan_json(*SMALL, "--bits", 5, "--replicas", 4)["bits_per_param"] == 5


def test_the_former_name_of_replicas_works_with_a_note() -> None:
    ended = run_cli("plan", *SMALL, "--json", "--workers", 4)
    assert ended.status == 0
    assert json.loads(ended.out) == plan_json(*SMALL, "--replicas", 4)
    assert ended.err == "diloco-comm: --workers is deprecated: its name is --replicas\n"


@pytest.mark.parametrize(
    ("words", "today"),
    [
        (["serve", "--decoupled", "--status", "a:1"], ["serve", "status", "a:1"]),
        (["serve", "--status=a:1", "--json"], ["serve", "status", "a:1", "--json"]),
        (["serve", "--decoupled", "--snapshot", "s"], ["serve", "decoupled", "--snapshot", "s"]),
        (["plan", "--", "--failures"], ["plan", "--", "--failures"]),
        (["plan", "--workers=4"], ["plan", "--replicas=4"]),
        (["demo", "--decoupled"], ["demo", "--decoupled"]),
        ([], []),
    ],
)
def test_a_former_command_line(words: list[str], today: list[str]) -> None:
    assert as_today(words) == today


@pytest.mark.parametrize("name", ["published", "failures"])
def test_a_former_option_is_the_sub_command_of_its_name(name: str) -> None:
    assert run_cli("plan", f"--{name}", "--json") == run_cli("plan", name, "--json")


def test_the_help_page_is_short_and_the_whole_one_has_all() -> None:
    """The rare options run as well as the others, and stand in the whole page alone."""
    short, whole = run_cli("plan", "--help").out, run_cli("plan", "--help-all").out
    # --help-all and --help stand beside 15 options.
    assert short.count("│ --") == 15 + 2
    assert "--block-size" in whole and "--block-size" not in short
    assert run_cli("plan", "--help").out == short


def test_link_agrees_with_the_totals() -> None:
    plan = plan_json(*SMALL, "--gbps", 1, "--target", 0.5)
    link = plan["link"]
    assert link["lost_s_per_day"] == pytest.approx(86400 * (1 - link["utilisation"]))
    assert link["bytes_per_day"] == pytest.approx(plan["bytes_per_day"] * link["utilisation"])
    assert link["utilisation"] <= link["layer_utilisation"]
    assert all(setting["utilisation"] >= 0.5 for setting in link["settings"])


def test_the_value_of_a_former_option_is_an_argument() -> None:
    """A status that cannot be had: both spellings name the server."""
    address = "tcp://127.0.0.1:1"
    for words in (
        ["--status", address],
        [f"--status={address}"],
        ["--timeout", 1, "--status", address],
    ):
        ended = run_cli("serve", *words, "--timeout", 0.2)
        assert ended.status == 1 and f"the server {address} has not answered" in ended.err


# ------------------------------------------------------------------------ settings for a link


@pytest.mark.parametrize(
    ("gbps", "others", "written"),
    [
        (100, [], 'DiLoCo(model, optimizer, sync_every=10, wire="int4")'),
        (100, ["--wire", "int8"], 'DiLoCo(model, optimizer, sync_every=20, wire="int8")'),
        (
            100,
            ["--choose"],
            'sync_every=10, wire="int4", outer=Nesterov(lr=0.4, momentum=0.9))',
        ),
        (3, [], 'fragments="layers:3", overlap=Streaming(delay=5, alpha=0.5))'),
        (
            3,
            ["--block-size", 64],
            ', block_size=64), fragments="layers:3", overlap=Streaming(delay=5, alpha=0.5))',
        ),
    ],
)
def test_the_line_and_the_file_make_the_same_settings(
    gbps: float, others: list[object], written: str, tmp_path: Path
) -> None:
    """Both are used as they were printed and written."""
    path = tmp_path / "new" / "diloco.json"
    ended = run_cli("plan", *SMALL, "--gbps", gbps, *others, "--write", path)
    assert (ended.status, ended.err) == (0, "")
    lines = [line.strip() for line in ended.out.splitlines()]
    (imported,) = [line for line in lines if line.startswith("from ")]
    (line,) = [line for line in lines if line.startswith("diloco = ")]
    assert line.endswith(written)
    configs = []
    for program in (
        f"{imported}\n{line}",
        f"diloco = DiLoCo(model, optimizer, config={str(path)!r})",
    ):
        layers = [torch.nn.Linear(2, 2) for _ in range(24)]
        names: dict[str, Any] = {
            "DiLoCo": diloco_comm.DiLoCo,
            "model": torch.nn.Sequential(*layers),
        }
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        exec(program, names)
        configs.append(names["diloco"].config())
        names["diloco"].close()
    assert configs[0] == configs[1]
    assert configs[0].items() >= json.loads(path.read_text()).items()
    assert lines[-1] == f"{path} holds the same: DiLoCo(model, optimizer, config={str(path)!r})"


def setting(method: str, delay: int, wire: str, sync_every: int) -> Setting:
    return Setting(method, delay, wire, sync_every, 3, 0.96)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], None),
        ([setting("dp", 0, "int8", 1), setting("eager", 0, "int8", 10)], None),
        ([setting("streaming", 1, "int8", 10), setting("diloco", 0, "int8", 100)], 1),
        ([setting("diloco", 0, "int8", 200), setting("streaming", 5, "int8", 100)], 1),
        ([setting("streaming", 5, "int8", 10), setting("diloco", 0, "int4", 100)], 1),
        ([setting("diloco", 0, "int8", 500), setting("streaming", 5, "int4", 200)], 1),
        ([setting("diloco", 0, "int4", 500), setting("streaming", 5, "int8", 200)], 1),
        ([setting("diloco", 0, "fp32", 10)], None),
    ],
)
def test_the_plainest_setting_is_chosen(settings: list[Setting], expected: int | None) -> None:
    assert choose(settings) == (None if expected is None else settings[expected])


def test_a_link_for_which_there_is_no_setting_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "diloco.json"
    ended = run_cli("plan", *SMALL, "--gbps", 0.001, "--write", path)
    assert ended.status == 1 and not path.exists()
    sentence = "No setting of DiLoCo or Streaming over int4 or int8 that was tried reaches 95%."
    assert f"{sentence} --wire auto tries shorter wires, too." in ended.out
    sentence = f"nothing is written to {path}: no setting that was tried reaches --target"
    assert ended.err == f"diloco-comm: {sentence}\n"


def test_published_tables_as_json() -> None:
    tables = plan_json("published")
    entry = {
        "row": str,
        "model": str,
        "target": float,
        "published_gbps": float,
        "gbps": (float, None),
        "grid_steps": (int, None),
    }
    published: dict[str, Any] = {"streaming_table_4": [entry], "eager_table_5": [entry]}
    measured = {name: float for name in ("gbps", "published", "predicted", "error")}
    published |= {key: [{"row": str, **measured}] for key in ("measured_grid", "intellect_1")}
    check_schema(tables, {"schema": int, "published": published})


# ------------------------------------------------------------------------ cost of the settings

# 1e9 tokens are 1e5 steps of 1e4 tokens. The setting, its utilisation, hours of a GPU and GB sent.
COSTS = [
    # 2.0625 bits for each of 1e9 parameters, every 10 steps: 1e4 rounds, 2.0625 s after 36 s.
    (
        "--step-time 3.6 --gbps 1 --efficiency 1 --target 0.8 --sync-every 10 --wire auto",
        ("diloco", 0, 10),
        36 / 38.0625,
        100.0 * 38.0625 / 36,
        1e4 * 0.2578125,
    ),
    # 4.0625 bits, in eight fragments: each one takes 0.5078 s, and is waited for after 0.36 s.
    (
        "--step-time 0.36 --gbps 1 --efficiency 1 --target 0.4 --wire int4",
        ("streaming", 1, 10),
        3.6 / (3.6 + 4.0625 - 8 * 0.36),
        10.0 * 4.7825 / 3.6,
        1e4 * 0.5078125,
    ),
    # int8 on half of the link: DiLoCo reaches 80% with H=50. Streaming with a delay of 1 does with
    # H=10, but all of H=50 lose no more than DiLoCo; a delay of 5 steps waits for nothing.
    (
        "--step-time 1.8 --gbps 1 --efficiency 0.5 --target 0.8 --wire int8",
        ("streaming", 5, 50),
        1.0,
        50.0,
        2e3 * 1.0078125,
    ),
]


@pytest.mark.parametrize(("words", "setting", "share", "gpu_hours", "sent_gb"), COSTS)
def test_what_settings_cost_by_hand(
    words: str, setting: tuple[str, int, int], share: float, gpu_hours: float, sent_gb: float
) -> None:
    """4 GPUs of 2.5 USD an hour in a replica, and 0.09 USD for a GB."""
    own = ["--tokens-per-step", 10_000, "--gpu-usd-per-hour", 2.5, "--gpus-per-replica", 4]
    own += ["--egress-usd-per-gb", 0.09, *words.split()]
    plan = plan_json("--params", "1e9", "--layers", 24, *own)
    chosen = plan["link"]["chosen"]
    assert tuple(chosen["setting"][key] for key in ("method", "delay", "sync_every")) == setting
    assert chosen["setting"]["utilisation"] == pytest.approx(share)
    usd = chosen["usd_per_1e9_tokens"]
    assert usd["gpus"] == pytest.approx(gpu_hours * 4 * 2.5)
    assert usd["egress"] == pytest.approx(sent_gb * 0.09)
    assert usd["total"] == pytest.approx(usd["gpus"] + usd["egress"])
    sent_a_day = 86400 / plan["request"]["step_time"] * share * sent_gb * 1e9 / 1e5
    assert chosen["bytes_per_day"] == pytest.approx(sent_a_day)
    assert chosen["bytes_per_month"] == pytest.approx(30 * sent_a_day)
    # Outer parameters and momentum, and two payloads.
    payload_bytes = sent_gb / 1e5 * setting[2] * 1e9
    assert chosen["extra_memory_bytes"] == pytest.approx(8e9 + 2 * payload_bytes)


# Traffic dear and machines cheap, the opposite, and both paid.
@pytest.mark.parametrize("usd", [(0.12, 0.0), (0.0, 3.0), (0.09, 2.5)], ids=str)
@pytest.mark.parametrize("gbps", [0.5, 3, 100])
def test_no_listed_setting_with_no_more_loss_is_cheaper_than_the_choice(
    usd: tuple[float, float], gbps: float
) -> None:
    request = Request(1e9, 24, 1.0, rtt_ms=50, efficiency=None)
    prices = Prices(8192, *usd, gpus=8)
    link = make_plan(request, gbps, prices=prices.per_billion_tokens)["link"]
    without = make_plan(request, gbps, with_outer=True)["link"]["chosen"]
    assert link["chosen"]["loss"]["nats"] <= without["loss"]["nats"]
    cost = {}
    for setting in link["settings"]:
        share, made = setting.pop("utilisation"), dict(setting)
        one = replace(request, **made)
        nats = losses.expected(one)["nats"]
        # A wire below four bits has records of H=10 alone.
        known = setting["wire"] in ("fp32", "bf16", "int8", "int4") or one.sync_every == 10
        if setting["method"] in CHOOSABLE and known and nats <= without["loss"]["nats"]:
            cost[str(setting)] = prices.per_billion_tokens(one, share)["total"]
    assert cost and link["chosen"]["usd_per_1e9_tokens"]["total"] <= min(cost.values()) * 1.000001


@pytest.mark.parametrize(
    ("egress", "words", "line", "reason"),
    [
        # Without prices int4. int1r sends a quarter, and its loss is less than Streaming gains.
        (
            0.09,
            "--step-time 3.6 --target 0.8",
            'wire="int1r"',
            "the cheapest of 9 settings that reach 80% and lose no more than the choice without "
            "prices (diloco, H=10, int4: 1,577.08 USD).",
        ),
        # Streaming waits for nothing with H=10, and DiLoCo reaches the target with H=200.
        (
            0,
            "--step-time 0.6 --wire int4",
            "sync_every=10",
            "no settings that reach 95% and lose no more are cheaper.",
        ),
    ],
)
def test_the_choice_by_price_says_why(egress: float, words: str, line: str, reason: str) -> None:
    own = ["--tokens-per-step", 10_000, "--gpu-usd-per-hour", 2.5, "--gpus-per-replica", 4]
    own += ["--gbps", 1, "--egress-usd-per-gb", egress, *words.split()]
    shown = run_cli("plan", "--params", "1e9", "--layers", 24, *own).out
    assert line in shown and f"Chosen by price: {reason}" in shown
    assert "Expected loss over DiLoCo on fp32" in shown


def test_cost_traffic_and_memory_are_printed_for_the_chosen_settings() -> None:
    own = ["--gpu-usd-per-hour", 2.5, "--egress-usd-per-gb", 0.09, "--target", 0.8]
    words = [*"--params 1e9 --layers 24 --step-time 3.6 --efficiency 1".split(), *PAID, *own]
    words += ["--wire", "int4"]
    shown = run_cli("plan", *words).out.split("Chosen for this link (utilisation 100.0%)")[1]
    assert "a replica sends 1.22 TB a day, 36.6 TB in 30 days, and needs 9.02 GB beside" in shown
    # 122,070.3 steps of 3.6 s and 2.5 USD; 12,207.03 times 0.5078125 GB and 0.09 USD.
    assert "1e9 tokens cost 863.08 USD: GPUs 305.18, egress 557.90." in shown


# ------------------------------------------------------------------------ the loss to expect


def test_choose_prints_the_choice_alone() -> None:
    words = [*SMALL, "--gbps", 3, "--rtt-ms", 50]
    ended = run_cli("plan", *words, "--choose")
    assert ended.status == 0 and ended.out.startswith("Chosen for this link")
    assert "Gbit/s needed" not in ended.out
    assert "Expected loss over DiLoCo on fp32 with H=10, by the recorded runs: +0.0" in ended.out
    assert "Extrapolated beyond these runs: 1e+09 parameters" in ended.out
    chosen = plan_json(*words, "--choose")["link"]["chosen"]
    assert chosen["config"]["outer"] == {"name": "Nesterov", "lr": 0.4, "momentum": 0.9}
    assert plan_json(*words)["link"]["chosen"]["loss"] is None
    none = run_cli("plan", *SMALL, "--gbps", 0.001, "--choose")
    assert none.status == 0 and none.out.startswith("No setting of DiLoCo or Streaming")


# ------------------------------------------------------------------------ sizes


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> Path:
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_size_comes_from_safetensors(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.experts.{e}.w": [5, 7] for i in range(3) for e in range(2)}
    path = write_safetensors(tmp_path / "a.safetensors", {"embed.weight": [11, 7], **shapes})
    request = plan_json("--safetensors", path, "--step-time", 1)["request"]
    assert (request["params"], request["layers"]) == (77 + 6 * 35, 3)
    # A number that is given wins over the file.
    request = plan_json("--safetensors", path, "--step-time", 1, "--layers", 2)["request"]
    assert (request["params"], request["layers"]) == (77 + 6 * 35, 2)


def test_size_comes_from_all_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "1.safetensors", {"h.0.w": [10], "wte": [3]})
    write_safetensors(tmp_path / "2.safetensors", {"h.1.w": [10]})
    names = {"h.0.w": "1.safetensors", "wte": "1.safetensors", "h.1.w": "2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert plan_model.from_safetensors(index) == plan_model.Size(23.0, 2)


LLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 77,
}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("kind", "config", "num_params"),
    [
        ("gpt2", {"n_embd": 24, "n_layer": 3, "vocab_size": 50, "n_positions": 16}, 23_304),
        ("llama", LLAMA, 69_360),
        ("llama", LLAMA | BIASES, 66_792),
        ("mistral", LLAMA, 69_360),
        ("mixtral", LLAMA | {"num_local_experts": 4}, 199_536),
        ("qwen2", LLAMA | {"tie_word_embeddings": True}, 65_904),
        ("qwen3", LLAMA | {"head_dim": 16}, 87_888),
    ],
)
def test_size_comes_from_a_model_config(
    tmp_path: Path, kind: str, config: dict[str, Any], num_params: int
) -> None:
    """The numbers are those of the models that transformers 5.23.0 builds."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    assert plan_model.from_config(path) == plan_model.Size(float(num_params), 3)


# ------------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--params and --layers"),
        (["--params", "1e9"], "--params and --layers"),
        (["--params", "1e9", "--layers", 24], "--step-time"),
        ([*SMALL, "--params", -1], "--params must be a positive number, got -1"),
        ([*SMALL, "--params", "nan"], "--params must be a positive number, got nan"),
        ([*SMALL, "--layers", 0], "--layers must be at least 1, got 0"),
        ([*SMALL, "--step-time", 0], "--step-time must be a positive number, got 0"),
        ([*SMALL, "--replicas", 1], "--replicas must be at least 2, got 1"),
        ([*SMALL, "--method", "gossip"], "--method must be one of dp, diloco"),
        ([*SMALL, "--wire", "int3"], "--wire must be one of fp32"),
        ([*SMALL, "--wire", "auto"], "--wire auto needs --gbps"),
        ([*SMALL, "--wire", "auto", "--bits", 2, "--gbps", 1], "--wire auto and --bits exclude"),
        ([*SMALL, "--wire", "auto", "--method", "eager", "--gbps", 1], "for --method diloco and s"),
        ([*SMALL, "--block-size", 100], "--block-size must be one of"),
        (
            [*SMALL, "--wire", "sub8", "--block-size", 64],
            "wire sub8 has blocks of 1024, got --block-size 64",
        ),
        ([*SMALL, "--sync-every", 10**9], "--sync-every must be at most 1000000"),
        ([*SMALL, "--sync-every", 0], "--sync-every must be at least 1, got 0"),
        ([*SMALL, "--fragment-layers", 25], "--fragment-layers must be between 0 and --layers 24"),
        ([*SMALL, "--method", "streaming", "--delay", 100], "below --sync-every 100, got 100"),
        ([*SMALL, "--efficiency", 0], "--efficiency must be above 0 and at most 1, got 0"),
        ([*SMALL, "--efficiency", 1.1], "--efficiency must be above 0 and at most 1, got 1.1"),
        ([*SMALL, "--choose"], "--choose needs --gbps: the bandwidth of the link"),
        ([*SMALL, "--gbps", 1, "--choose", "--wires"], "settings alone: leave out --wires"),
        ([*SMALL, "--gpu-usd-per-hour", 2], "--gpu-usd-per-hour needs --gbps"),
        (
            [*SMALL, "--gbps", 1, "--egress-usd-per-gb", 1],
            "--egress-usd-per-gb needs --tokens-per-step: the tokens of one replica's inner step",
        ),
        (
            [*SMALL, "--gbps", 1, "--tokens-per-step", 8],
            "--tokens-per-step needs --egress-usd-per-gb or --gpu-usd-per-hour",
        ),
        (
            [*SMALL, *PAID, "--egress-usd-per-gb", -1],
            "--egress-usd-per-gb must be a number of at least 0, got -1",
        ),
        ([*SMALL, *PAID, "--gpu-usd-per-hour", "nan"], "must be a number of at least 0, got nan"),
        (
            [*SMALL, *PAID, "--egress-usd-per-gb", 1, "--gpus-per-replica", 8],
            "--gpus-per-replica needs --gpu-usd-per-hour: the price of a GPU",
        ),
        (
            [*SMALL, *PAID, "--gpu-usd-per-hour", 1, "--gpus-per-replica", 0],
            "--gpus-per-replica must be at least 1, got 0",
        ),
        (
            [*SMALL, "--gbps", 1, "--gpu-usd-per-hour", 1, "--tokens-per-step", 0],
            "--tokens-per-step must be at least 1, got 0",
        ),
        ([*SMALL, "--syncer-gbps", 2], "No such option: --syncer-gbps"),
        ([*SMALL, "--bits", 0], "--bits must be a positive number, got 0"),
        ([*SMALL, "--rtt-ms", -1], "--rtt-ms must be a number of at least 0, got -1"),
        ([*SMALL, "--gbps", 0], "--gbps must be a positive number, got 0"),
        ([*SMALL, "--target", 0.9], "--target needs --gbps: the bandwidth of the link"),
        ([*SMALL, "published"], "stands before published: write the options of published behind"),
        (["published", "--gbps", 1], "No such option: --gbps"),
        ([*SMALL, "--gbps", 1, "--target", 1], "--target must be between 0 and 1, got 1"),
        ([*SMALL, "--params", "7X"], "must be a number such as 25e6, 350M, 7B or 1.5T, got '7X'"),
        ([*SMALL, "--params", "B"], "must be a number such as 25e6, 350M, 7B or 1.5T, got 'B'"),
        ([*SMALL, "--plot", f"{__file__}/x.png"], "cannot write --plot"),
        ([*SMALL, "--write", "x.json"], "--write needs --gbps: the bandwidth of the link"),
        (["--safetensors", "/no/such", "--step-time", 1], "cannot read /no/such: No such file"),
    ],
)
def test_impossible_requests_are_one_sentence(arguments: list[object], named: str) -> None:
    check_misuse(run_cli("plan", *arguments), named)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.safetensors", b"", "no valid header"),
        ("a.safetensors", b"\xff" * 16, "no valid header"),
        ("a.safetensors", struct.pack("<Q", 20) + b"{", "no valid header"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "no valid header"),
        ("a.safetensors", struct.pack("<Q", 2) + b"{}", "names no layers"),
        ("a.index.json", b"{}", "no weight_map"),
        ("a.index.json", b"\xff\xfe", "is not"),
    ],
)
def test_foreign_weights_are_one_sentence(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    check_misuse(run_cli("plan", "--safetensors", path, "--step-time", 1), name, named)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[]", "not a JSON object"),
        ("{}", "no model_type"),
        ("x", "not JSON"),
        ('{"model_type": "bert"}', "only gpt2, llama"),
        ('{"model_type": "gpt2"}', "lacks 'n_embd'"),
        ('{"model_type": "gpt2", "n_embd": "x", "n_layer": 1}', "not numbers"),
    ],
)
def test_foreign_config_is_one_sentence(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    check_misuse(run_cli("plan", "--model-config", path, "--step-time", 1), named)
