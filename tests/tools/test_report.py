"""``diloco-comm report``: one file with everything a bug report needs, and without keys."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from cli_helpers import check_misuse, run_cli

from diloco_comm import __version__
from diloco_comm.base.service.keys import Keys, make_keys
from diloco_comm_tools.report.command import MASK, mask, secrets_of

HF_TOKEN = "hf_" + "aB3" * 11
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"
# A key with the signs that a sentence has, too.
CURVE_KEY = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"
PEM_LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
JWT = "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("DILOCO_COMM_"):
            monkeypatch.delenv(name)
    return tmp_path


def secret_key(path: Path) -> str:
    (found,) = re.findall(r'secret-key = "(.{40})"', path.read_text())
    return found


def test_a_report_has_what_a_reader_asks_and_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(folder / "keys")
    secret = secret_key(folder / "keys" / "worker.key_secret")
    monkeypatch.setenv("DILOCO_COMM_KEY", str(folder / "keys"))
    monkeypatch.setenv("DILOCO_COMM_LANES", "2")
    monkeypatch.setenv("DILOCO_COMM_REGISTRY", "tcp://alice:pw-of-alice@10.0.0.1:29400")
    # No pattern knows the form of this one: its value is masked because of the variable's name.
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse")
    (folder / "diloco.json").write_text(json.dumps({"wire": "int4", "api_key": "unknown form"}))
    (folder / "train.log").write_text(
        "\n".join(f"step {step}" for step in range(50))
        + f"\nlogin {HF_TOKEN} and correct horse\nkey b'{secret}'\nfatal: it broke\n"
    )
    (folder / "diloco-comm-report.txt").write_text("a report from before")
    ended = run_cli(
        *("report", "train.log", "--lines", 5, "--config", "diloco.json", "--no-self-test")
    )
    assert (ended.status, ended.err) == (0, "")
    assert re.fullmatch(
        r"diloco-comm-report\.txt: \d+ lines, \d+ values are masked; read it before you send it\n",
        ended.out,
    )
    path = folder / "diloco-comm-report.txt"
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text()
    for planted in (secret, HF_TOKEN, "pw-of-alice", "correct horse", "unknown form"):
        assert planted not in text
    for wanted in (
        f"diloco_comm {__version__}",
        "DILOCO_COMM_LANES=2",
        f"tcp://{MASK}@10.0.0.1:29400",
        '"wire": "int4"',
        "==== last 5 lines of train.log ====",
        f"login {MASK} and {MASK}",
        f"key b'{MASK}'",
        "step 48",
        "fatal: it broke",
    ):
        assert wanted in text, wanted
    assert "step 47\n" not in text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"HF_TOKEN={HF_TOKEN}", f"HF_TOKEN={MASK}"),
        (f"pushing with {HF_TOKEN}.", f"pushing with {MASK}."),
        (f"wandb: {WANDB_KEY}", f"wandb: {MASK}"),
        ("git clone https://me:ghp@github.com/x", f"git clone https://{MASK}@github.com/x"),
        ("redis://:p4ss@host:1/0", f"redis://{MASK}@host:1/0"),
        ('{"password": "a b c", "n": 1}', f'{{"password": {MASK}, "n": 1}}'),
        ("train.py --hub-token abc --steps 3", f"train.py --hub-token {MASK} --steps 3"),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {MASK}"),
        (f"cookie {JWT}", f"cookie {MASK}"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nnext",
            f"{MASK}\nnext",
        ),
        ("AWS_SECRET_ACCESS_KEY=wJalrXU/K7MD", f"AWS_SECRET_ACCESS_KEY={MASK}"),
        (f"curve_secretkey={CURVE_KEY}", f"curve_secretkey={MASK}"),
        (f"secretkey={CURVE_KEY} sent", f"secretkey={MASK} sent"),
        (f"key={CURVE_KEY}", f"key={MASK}"),
        (f"with ({CURVE_KEY}).", f"with ({MASK})."),
        (f"curve={CURVE_KEY}: refused", f"curve={MASK}: refused"),
        (f"[{CURVE_KEY}]", f"[{MASK}]"),
        ("key = s3cr3t-and-long", f"key = {MASK}"),
        ("secretKey: s3cr3t", f"secretKey: {MASK}"),
        ("AccountKey=abc/d==;Endpoint=x", f"AccountKey={MASK}"),
        ("DB_PASS=1234567 next", f"DB_PASS={MASK} next"),
        ("password=ab,cd;ef next", f"password={MASK} next"),
        ("password=b'a b', next", f"password={MASK}, next"),
        (r"{\"token\": \"ab cd\"}", r"{\"token\": \***"),
        ("Authorization: Token abc", f"Authorization: Token {MASK}"),
        ("authorization=abcdefgh", f"authorization={MASK}"),
        (
            "{'Authorization': 'Custom abc', 'n': 1}",
            f"{{'Authorization': 'Custom {MASK}', 'n': 1}}",
        ),
        ('Authorization: Digest user="u", response="9f8e"', f"Authorization: Digest {MASK}"),
        ("Cookie: a=first; session=second", f"Cookie: {MASK}"),
        ("set-cookie: a=first; Path=/", f"set-cookie: {MASK}"),
        ("tcp://u:p@ss@host:1", f"tcp://{MASK}@host:1"),
        (f"{PEM_LINE}\nAbc=\n-----END PRIVATE KEY-----\nnext", f"{MASK}\n{MASK}\nnext"),
    ],
)
def test_what_has_the_form_of_a_secret_is_masked(text: str, masked: str) -> None:
    assert mask(text) == (masked, masked.count(MASK))


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 512, token=17, max_tokens=4096, tokenizer: gpt2, 8.1e3 tokens/s",
        "tcp://127.0.0.1:29400 is the store, and mail to a@b.org",
        "outer state 0x0123456789abcdef of replica 1, commit e397b56dc289",
        "author: Jane, keys in site/keys, monkey: 3, keyboard = us",
        "diloco_comm/exchange/membership/meeting/rendezvous.py",
        "sorted(x, key=operator.itemgetter(1)), key: model.layers.0.weight, KeyError: 'weight'",
        "[rank0]: File https://download.pytorch.org/whl/cu121/torch-2.7.1-cp311-linux.whl line 12",
        "#5 c10d::TCPStore::doGet(std::string const&) + 0x4d0 (0x7f12ab34cd56 in libtorch_cpu.so)",
        "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 of the model",
        "authorized by the token server; the cookie jar is empty; secrets: none",
    ],
)
def test_what_a_reader_needs_stays(text: str) -> None:
    assert mask(text) == (text, 0)


def test_keys_are_masked_wherever_they_stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(folder)
    monkeypatch.setenv("DILOCO_COMM_KEY", str(folder))
    for path in folder.glob("*.key_secret"):
        keys = Keys.read(path)
        for secret, name in (
            (keys.curve_secret or "", "secret-key"), (keys.link_secret or "", "link-secret"),
        ):  # fmt: skip
            assert secret in secrets_of(os.environ)
            for text in (path.read_text(), f"key {secret}", f"({secret},)", repr(secret.encode())):
                assert secret not in mask(text, [secret])[0]
            assert secret not in mask(f'{name} = "{secret}"')[0]
        assert keys.link_secret not in mask(path.read_text())[0]


def test_a_secret_that_the_report_cuts_is_masked_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a long line, and in a key of more lines than the report has."""
    # Longer than a name of a file may be.
    long_token = "aB3/" + "x9Z+" * 120
    monkeypatch.setenv("AWS_SESSION_TOKEN", long_token)
    body = [PEM_LINE[number:] + PEM_LINE[:number] for number in range(24)]
    key = ["-----BEGIN PRIVATE KEY-----", *body, "Ab9=", "-----END PRIVATE KEY-----"]
    log = [f"step {number}" for number in range(9)]
    log += ["-" * 3990 + " " + HF_TOKEN + " tail", *key, f"sent {long_token}", "last line"]
    (folder / "train.log").write_text("\n".join(log) + "\n")
    for lines in (2, 3, 4, 30):
        ended = run_cli("report", "train.log", "--lines", lines, "--no-self-test")
        assert (ended.status, ended.err) == (0, "")
        text = (folder / "diloco-comm-report.txt").read_text()
        for planted in (HF_TOKEN[:9], long_token[:9], "Ab9=", *(line[:9] for line in body)):
            assert planted not in text, (lines, planted)
        assert text.endswith(f"sent {MASK}\nlast line\n\n")
    assert "step 8" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no.log"], "cannot read no.log: No such file or directory"),
        (["--config", "no.json"], "cannot read no.json: No such file or directory"),
        (["--timeout", "0"], "--timeout must be a positive number, got 0"),
        (["--out", "no.log/x"], "cannot write --out no.log/x"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_sentence(
    folder: Path, arguments: list[str], named: str
) -> None:
    if "--out" in arguments:
        (folder / "no.log").write_text("")
    check_misuse(run_cli("report", "--no-self-test", *arguments), named)
    assert not (folder / "diloco-comm-report.txt").exists()
