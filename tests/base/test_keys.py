"""A folder of keys: its files and their modes, who is let in."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.auth
from commands import run_command

from diloco_comm import _C
from diloco_comm.base.service.keys import (
    Allowed,
    AllowedWatch,
    Guard,
    Keys,
    LinkKeys,
    allow,
    make_keys,
    make_pairs,
    protect_server,
    protect_worker,
    read_secret,
    remove,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def old_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair as versions before 0.2 did: with the keys of ZeroMQ alone."""
    folder.mkdir(exist_ok=True)
    public, secret = (Path(path) for path in zmq.auth.create_certificates(folder, name))
    secret.chmod(0o600)
    return public, secret


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("serves", [False, True], ids=["link", "serve"])
def test_a_pair_holds_the_keys_of_a_link_and_those_of_a_server(
    tmp_path: Path, serves: bool
) -> None:
    folder = tmp_path / "keys"
    before = os.umask(0)
    try:
        public, secret = make_pairs(folder, ["paris"], serves=serves)
    finally:
        os.umask(before)
    assert {public, secret} == {folder / "paris.key", folder / "paris.key_secret"}
    assert set(tree(folder)) == {"paris.key", "paris.key_secret"}
    assert (mode(folder), mode(secret), mode(public)) == (0o700, 0o600, 0o644)
    shown, hidden = Keys.read(public), Keys.read(secret)
    assert (shown.curve, shown.link) == (hidden.curve, hidden.link)
    assert shown.curve_secret is None and shown.link_secret is None
    assert hidden.link_secret is not None and hidden.link_secret not in public.read_text()
    assert _C.link_public_key(bytes.fromhex(hidden.link_secret)).hex() == shown.link
    if not serves:
        assert (hidden.curve, hidden.curve_secret) == ("", None)
        assert "curve" not in public.read_text() + secret.read_text()
        return
    # ZeroMQ reads its keys there, and no other ones.
    curve, curve_secret = zmq.auth.load_certificate(secret)
    assert (curve.decode(), curve_secret) == (shown.curve, (hidden.curve_secret or "").encode())
    assert zmq.auth.load_certificate(public) == (curve, None)
    assert zmq.curve_public(curve_secret) == curve
    assert zmq.auth.load_certificates(folder) == {curve: True}


def test_the_public_key_of_a_seed_is_that_of_the_standard() -> None:
    """The first two of RFC 8032, 7.1."""
    for seed, public in (
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        ),
    ):
        assert _C.link_public_key(bytes.fromhex(seed)).hex() == public


def test_pairs_differ_and_are_not_made_twice(tmp_path: Path) -> None:
    make_pairs(tmp_path, ["paris", "tokyo", "paris"], serves=True)
    paris, tokyo = (Keys.read(tmp_path / f"{name}.key_secret") for name in ("paris", "tokyo"))
    for name in ("curve", "curve_secret", "link", "link_secret"):
        assert getattr(paris, name) != getattr(tokyo, name)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"tokyo.key_secret exists: remove it to make a new one"):
        make_pairs(tmp_path, ["lima", "tokyo"])
    for name in ("", ".", "..", "a/b", "/a", ".hidden", "a\nb"):
        with pytest.raises(ValueError, match=f"plain name, got {re.escape(repr(name))}"):
            make_pairs(tmp_path, ["lima", name])
    assert tree(tmp_path) == before


def test_keygen_makes_the_same_pairs_and_lets_them_in(tmp_path: Path) -> None:
    make_keys(tmp_path, ["paris"])
    for name in ("server", "paris"):
        assert Keys.read(tmp_path / f"{name}.key_secret").link_secret
    assert set(tree(tmp_path / "allowed")) == {"paris.key"}
    # A pair that was removed is made anew, and the new one is let in.
    old = Keys.read(tmp_path / "paris.key")
    (tmp_path / "paris.key_secret").unlink()
    make_keys(tmp_path, ["paris"])
    new = Keys.read(tmp_path / "paris.key")
    assert new.link != old.link and Keys.read(tmp_path / "allowed/paris.key") == new


@pytest.mark.parametrize("name", ["paris.key", "paris.key_secret"])
def test_a_pair_from_before_0_2_is_named(tmp_path: Path, name: str) -> None:
    old_pair(tmp_path, "paris")
    with pytest.raises(ValueError) as caught:
        Keys.read(tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name} holds no link-key: it is damaged, or of a version before 0.2, and this "
        "version reads pairs of 0.2: `diloco-comm keys make` of 0.2 adds that key to both files"
    )


def test_a_pair_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    make_pairs(tmp_path, ["paris"])
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="key_secret exists: remove it to make a new one"):
        make_pairs(tmp_path, ["tokyo", "paris"])
    assert tree(tmp_path) == before


# ------------------------------------------------------------------------------ who is let in


def test_public_files_are_allowed_and_removed(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make_pairs(here, ["paris"])
    make_pairs(there, ["tokyo", "lima"])
    files = [there / "tokyo.key", there / "lima.key"]
    assert allow(here, files) == [here / "allowed" / file.name for file in files]
    assert tree(here / "allowed") == {file.name: file.read_bytes() for file in files}
    # The same file again, and one of the copies itself, change nothing.
    allow(here, [files[0], here / "allowed" / "lima.key"])
    assert remove(here, "tokyo") == here / "allowed" / "tokyo.key"
    assert set(tree(here)) == {"paris.key", "paris.key_secret", "allowed/lima.key"}
    for name in ("tokyo", "../paris", ""):
        with pytest.raises(ValueError, match=f"has no {name}: it names lima"):
            remove(here, name)
    remove(here, "lima")
    with pytest.raises(ValueError, match="it names nobody"):
        remove(here, "lima")


def test_a_key_may_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = link_folder(tmp_path)
    make_pairs(tmp_path / "there", ["monitor", "kyoto"])
    files = [tmp_path / "there" / f"{name}.key" for name in ("monitor", "kyoto")]
    keys = LinkKeys.read(folder)
    assert keys.readers.present(at_once=True) == frozenset() and not caplog.records
    assert allow(folder, files, reads_only=True) == [folder / "readers" / f.name for f in files]
    links = {bytes.fromhex(Keys.read(file).link) for file in files}
    assert keys.readers.present(at_once=True) == links
    assert not links & keys.allowed.present(at_once=True)
    # A key has one place, and a name one key.
    with pytest.raises(ValueError, match=r"readers/kyoto.key holds the same keys as kyoto.key: re"):
        allow(folder, files[1:])
    with pytest.raises(ValueError, match=r"allowed/tokyo.key holds the same keys as tokyo.key: re"):
        allow(folder, [tmp_path / "there" / "tokyo.key"], reads_only=True)
    make_pairs(tmp_path / "other", ["tokyo"])
    with pytest.raises(ValueError, match=r"allowed/tokyo.key holds other keys: remove it first"):
        allow(folder, [tmp_path / "other" / "tokyo.key"], reads_only=True)
    with pytest.raises(ValueError, match="a key that only reads is no replica, got replica 3"):
        allow(folder, files, [3], reads_only=True)
    assert remove(folder, "kyoto") == folder / "readers" / "kyoto.key"
    assert len(keys.readers.present(at_once=True)) == 1
    # The last keys stay while the folder is away, as with the allowed keys.
    (folder / "readers").rename(folder / "away")
    assert len(keys.readers.present(at_once=True)) == 1 and "readers is gone" in caplog.text


def test_files_that_let_nobody_in_are_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make_pairs(there, ["tokyo", "lima", "secret"])
    (there / "lima.key").replace(there / "other.key")
    (there / "secret.key_secret").replace(there / "secret.key")
    (there / "text.key").write_text("no keys")
    (there / "wrong.key").write_text(
        (there / "tokyo.key").read_text().replace('link-key = "', "&g")
    )
    with pytest.raises(ValueError, match=f"there is no folder {here}: `diloco-comm keys make`"):
        allow(here, [there / "tokyo.key"])
    make_pairs(here, ["paris"])
    allow(here, [there / "tokyo.key"])
    (there / "again.key").write_bytes((there / "tokyo.key").read_bytes())
    (there / "other").mkdir()
    (there / "other.key").rename(there / "other" / "tokyo.key")
    before = tree(here)
    for file, text in (
        ("tokyo.key_secret", "public keys are in a file NAME.key"),
        ("secret.key", "holds secret keys: give the file NAME.key"),
        ("text.key", "is no file of keys: it holds no link-key"),
        ("again.key", "holds the same keys as again.key: remove it first"),
        ("other/tokyo.key", "holds other keys: remove it first"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            allow(here, [there / "tokyo.key", there / file])
        assert "\n" not in str(caught.value) and tree(here) == before
    with pytest.raises(OSError, match="No such file"):
        allow(here, [there / "nobody.key"])


@pytest.mark.parametrize("line", ["link-key", "public-key"])
def test_a_damaged_key_is_named(tmp_path: Path, line: str) -> None:
    make_pairs(tmp_path, ["paris"], serves=True)
    path = tmp_path / "paris.key"
    path.write_text(re.sub(f'{line} = "..', f'{line} = "', path.read_text()))
    with pytest.raises(ValueError, match=f"{path} is no file of keys: {line} is not a key"):
        Keys.read(path)


def test_allowed_keys_are_those_in_the_folder_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock stands still: the looks are within the same second.
    clock = SimpleNamespace(monotonic=lambda: 1.0)
    monkeypatch.setattr("diloco_comm.base.service.keys.time", clock)
    make_pairs(tmp_path, ["paris", "tokyo"])
    allow(tmp_path, [tmp_path / "paris.key", tmp_path / "tokyo.key"])
    paris, tokyo = (Keys.read(tmp_path / f"{name}.key").link for name in ("paris", "tokyo"))
    allowed = Allowed(tmp_path / "allowed", lambda keys: keys.link.encode())
    assert allowed.present() == {paris.encode(), tokyo.encode()}
    remove(tmp_path, "tokyo")
    # A look within the same second is no look, unless it is asked for.
    assert len(allowed.present()) == 2
    assert allowed.present(at_once=True) == {paris.encode()} == allowed.present()


# ---------------------------------------------------------------------- keys bound to replicas


def test_a_key_is_bound_to_replicas_and_bound_again(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    file, copy = tmp_path / "there" / "tokyo.key", folder / "allowed" / "tokyo.key"
    tokyo = Keys.read(file)
    for numbers, found in (([3, 1, 3], (1, 3)), ([0], (0,)), ([2**31 - 1], (2**31 - 1,))):
        assert allow(folder, [file], numbers) == [copy]
        assert Keys.read(copy) == dataclasses.replace(tokyo, replicas=found)
        # ZeroMQ skips the line.
        assert zmq.auth.load_certificate(copy) == (tokyo.curve.encode(), None)
    # The copy itself may be given, and the numbers in a file that others have sent do not count.
    allow(folder, [copy], [5])
    assert Keys.read(copy).replicas == (5,)
    allow(folder, [copy])
    assert copy.read_bytes() == file.read_bytes()
    allow(folder, [file], [5])
    remove(folder, "tokyo")
    allow(folder, [file])
    assert Keys.read(copy) == tokyo
    assert set(tree(folder / "allowed")) == {"tokyo.key"}


def test_numbers_that_no_replica_has_are_refused(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    before = tree(folder)
    for files, numbers, text in (
        ([tmp_path / "there" / "tokyo.key"], [1, -1], "replica must be an integer of at least 0"),
        ([tmp_path / "there" / "tokyo.key"], [2**31], "replica must be at most 2147483647"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            allow(folder, files, numbers)
        assert tree(folder) == before and "\n" not in str(caught.value)


DAMAGED = [
    'replicas = "1, 3',
    "replicas = 1",
    'replicas = ""',
    'replicas = "1, "',
    'replicas = "-1"',
    'replicas = "1.5"',
    f'replicas = "{"1" * 5000}"',
    'replicas: "1"',
    "replicas",
    'replica = "1"',
    'Replicas = "1"',
    '\ufeffreplicas = "1"',
    'replicas = "1"\nreplicas = "1"',
    '\x00replicas = "1"',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_binding_lets_a_key_take_part_under_no_number(tmp_path: Path, line: str) -> None:
    folder = link_folder(tmp_path)
    copy = folder / "allowed" / "tokyo.key"
    copy.write_text(line + "\n" + copy.read_text())
    keys = LinkKeys.read(folder)
    (key,) = keys.allowed.present()
    for number in (0, 1, 3):
        why = keys.refusal_of(number, key, 0)
        assert f"to no replica (the line replicas in {copy} is damaged)" in why
        assert f"takes part as replica {number}" in why and why.isprintable()
    # All that knows no numbers takes the key as before.
    assert Keys.read(copy).curve == Keys.read(tmp_path / "there" / "tokyo.key").curve
    allow(folder, [copy], [1])
    assert Keys.read(copy).replicas == (1,)


def test_a_torn_file_of_a_bound_key_lets_nobody_in(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    copy = folder / "allowed" / "tokyo.key"
    allow(folder, [tmp_path / "there" / "tokyo.key"], [1])
    whole = copy.read_bytes()
    allowed = LinkKeys.read(folder).allowed
    (key,) = allowed.present()
    for end in range(len(whole)):
        copy.write_bytes(whole[:end])
        assert not allowed.present(at_once=True) or allowed.bindings(key) == {copy: (1,)}, end
    copy.write_bytes(whole)
    assert allowed.present(at_once=True) and allowed.bindings(key) == {copy: (1,)}


def test_a_binding_is_read_again_with_the_folder(tmp_path: Path) -> None:
    folder, there = link_folder(tmp_path), tmp_path / "there"
    keys = LinkKeys.read(folder)
    (key,) = keys.allowed.present()
    paths = folder / "allowed" / "tokyo.key", folder / "allowed" / "copy.key"

    def refused(*numbers: int) -> list[int]:
        keys.allowed.present(at_once=True)
        return [number for number in numbers if keys.refusal_of(number, key, 0)]

    assert refused(0, 1, 2) == []
    allow(folder, [there / "tokyo.key"], [1, 2])
    assert refused(0, 1, 2) == [0]
    why = keys.refusal_of(0, key, 7)
    assert f"the allowed keys of replica 7 bind the key tokyo.key ({key.hex()})" in why
    assert "to replicas 1, 2, and the owner of that key takes part as replica 0" in why
    assert f"`diloco-comm keys allow {folder} {paths[0]} --replica 0` on the host of" in why
    # Two files of one key both count; `keys allow` makes no second file.
    paths[1].write_text(paths[0].read_text().replace("1, 2", "2, 3"))
    assert refused(0, 1, 2, 3) == [0, 1, 3]
    paths[1].unlink()
    remove(folder, "tokyo")
    assert refused(0, 1, 2) == []
    allow(folder, [there / "tokyo.key"], [0])
    assert refused(0, 1, 2) == [1, 2]
    # The last numbers stay where the folder is gone.
    (folder / "allowed").rename(folder / "gone")
    assert refused(0, 1, 2) == [1, 2]


def test_the_own_key_may_be_bound(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    LinkKeys.read(folder).check_own(0)
    allow(folder, [folder / "paris.key"], [1, 3])
    LinkKeys.read(folder).check_own(3)
    with pytest.raises(ValueError, match=r"bind the key paris.key .* to replicas 1, 3, and"):
        LinkKeys.read(folder).check_own(0)


# --------------------------------------------------------------------------- the keys of a link


def link_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_pairs(folder, ["paris"])
    make_pairs(tmp_path / "there", ["tokyo"], serves=True)
    allow(folder, [tmp_path / "there" / "tokyo.key"])
    return folder


def test_a_link_takes_the_pair_in_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    tokyo = Keys.read(tmp_path / "there" / "tokyo.key").link or ""
    for place in (folder, str(folder), folder / "paris.key_secret"):
        found = LinkKeys.read(place)
        assert found.seed.hex() == Keys.read(folder / "paris.key_secret").link_secret
        assert found.folder == folder and found.allowed.present() == {bytes.fromhex(tokyo)}


def _open(folder: Path) -> None:
    (folder / "paris.key_secret").chmod(0o640)


def _another(folder: Path) -> None:
    make_pairs(folder, ["lima"])


def _no_secret(folder: Path) -> None:
    (folder / "paris.key_secret").unlink()


def _unreadable(folder: Path) -> None:
    _no_secret(folder)
    (folder / "paris.key_secret").mkdir(mode=0o700)


def _old(folder: Path) -> None:
    old_pair(folder, "paris")


def _nobody(folder: Path) -> None:
    remove(folder, "tokyo")


def _no_allowed(folder: Path) -> None:
    _nobody(folder)
    (folder / "allowed").rmdir()


def _old_allowed(folder: Path) -> None:
    _nobody(folder)
    old_pair(folder.parent / "older", "lima")[0].replace(folder / "allowed" / "lima.key")


def _no_seed(folder: Path) -> None:
    path = folder / "paris.key_secret"
    path.write_text(re.sub(" *link-secret.*\n", "", path.read_text()))


def _damaged(folder: Path) -> None:
    path = folder / "paris.key_secret"
    path.write_text(path.read_text().replace('link-secret = "', 'link-secret = "x'))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_open, r"others than the owner may use .*, which has mode 640: run `chmod 600 .*secret`"),
        (_another, r"holds lima.key_secret, paris.key_secret: give keys= the file of this process"),
        (_no_secret, r"holds no file NAME.key_secret: `diloco-comm keys make FOLDER NAME`"),
        (_unreadable, r"paris.key_secret cannot be read: Is a directory"),
        (_old, r"paris.key_secret holds no link-key: it is damaged, or of a version before"),
        (_no_seed, r"paris.key_secret holds no link-secret: restore the file, or make a new pair"),
        (
            _nobody,
            r"holds no key of a link, so that nobody could connect: .*`diloco-comm keys allow",
        ),
        (_no_allowed, r"holds no key of a link"),
        (_old_allowed, r"holds no key of a link"),
        (_damaged, r"is no file of keys: link-secret is not a key"),
    ],
)
def test_keys_that_a_link_cannot_use_are_one_sentence(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    folder = link_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ValueError, match=text) as caught:
        LinkKeys.read(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lima.key_secret", "there is no .*lima.key_secret: `diloco-comm keys make FOLDER NAME`"),
        ("paris.key", "keys must be a folder or a file NAME.key_secret, got '.*paris.key'"),
        ("none", "keys must be a folder or a file NAME.key_secret, got '.*none'"),
    ],
)
def test_a_place_that_holds_no_keys(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinkKeys.read(link_folder(tmp_path) / name)


def test_an_older_key_among_the_allowed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = link_folder(tmp_path)
    old_pair(tmp_path / "older", "lima")[0].replace(folder / "allowed" / "lima.key")
    assert len(LinkKeys.read(folder).allowed.present()) == 1
    (line,) = [one.getMessage() for one in caplog.records]
    assert "lima.key lets nobody in: " in line and "of a version before 0.2, and this" in line


# ------------------------------------------------------------------------- the modes of secrets


def _of_a_link(folder: Path) -> object:
    return LinkKeys.read(folder / "server.key_secret")


def _of_a_server(folder: Path) -> object:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return protect_server(context, socket, folder).stop()


def _of_a_client(folder: Path) -> object:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        return protect_worker(socket, folder, "server")


READERS = [_of_a_link, _of_a_server, _of_a_client]


def test_a_pair_of_a_link_alone_is_none_of_a_server(tmp_path: Path) -> None:
    made_by = "make the pairs? with `diloco-comm keys make --serve`"
    make_keys(tmp_path, ["tokyo"])
    for name in ("server", "tokyo"):
        (tmp_path / f"{name}.key_secret").unlink()
    make_pairs(tmp_path, ["server", "tokyo"])
    for read in (_of_a_server, _of_a_client):
        with pytest.raises(ValueError, match=f"server.key_secret holds no key of a.*{made_by}"):
            read(tmp_path)
    for path in (tmp_path / "allowed").iterdir():
        path.unlink()
    (tmp_path / "server.key_secret").unlink()
    make_pairs(tmp_path, ["server"], serves=True)
    allow(tmp_path, [tmp_path / "tokyo.key"])
    with pytest.raises(ValueError, match=f"allowed holds no key of a server's client: {made_by}"):
        _of_a_server(tmp_path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("wrong", [0o604, 0o644, 0o660, 0o620, 0o640, 0o444, 0o441])
def test_a_secret_that_others_may_use_is_refused_at_each_door(
    tmp_path: Path, read: Callable[[Path], object], wrong: int
) -> None:
    make_keys(tmp_path, ["tokyo"])
    read(tmp_path)
    secret = tmp_path / "server.key_secret"
    secret.chmod(wrong)
    text = f"others than the owner may use {secret}, which has mode {wrong:03o}: run `chmod 600 "
    with pytest.raises(ValueError, match=re.escape(text)):
        read(tmp_path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("wrong", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_change_is_refused_at_each_door(
    tmp_path: Path, read: Callable[[Path], object], wrong: int
) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, ["tokyo"])
    for each in [folder] if read is _of_a_client else [folder, folder / "allowed"]:
        read(folder)
        before = mode(each)
        each.chmod(wrong)
        with pytest.raises(ValueError) as caught:
            read(folder)
        assert str(caught.value) == (
            f"others than the owner may write {each}, which has mode {wrong:03o}: run `chmod go-w "
            f"{each}`"
        )
        each.chmod(before)


def test_a_folder_of_readers_that_others_may_change_is_refused(tmp_path: Path) -> None:
    folder = link_folder(tmp_path)
    make_pairs(tmp_path / "there", ["lima"])
    allow(folder, [tmp_path / "there" / "lima.key"], reads_only=True)
    assert len(LinkKeys.read(folder).readers.present()) == 1
    (folder / "readers").chmod(0o775)
    with pytest.raises(ValueError, match=f"write {folder}/readers, which has mode 775: run `chmod"):
        LinkKeys.read(folder)


def test_a_public_key_of_a_server_that_others_may_change_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path)
    public = tmp_path / "server.key"
    public.chmod(0o664)
    with pytest.raises(
        ValueError, match=f"may write {public}, which has mode 664: run `chmod go-w"
    ):
        _of_a_client(tmp_path)


# A client lets nobody in.
READ = [(read, name) for read in READERS for name in (".", "server.key_secret")]
READ += [(_of_a_link, "allowed"), (_of_a_server, "allowed")]


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another owner need root")
@pytest.mark.parametrize(("read", "name"), READ)
def test_what_belongs_to_another_user_is_refused_at_each_door(
    tmp_path: Path, read: Callable[[Path], object], name: str
) -> None:
    make_keys(tmp_path, ["tokyo"])
    os.chown(tmp_path / name, 10001, 10001)
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / name} belongs to user 10001, and must belong to root or to user 0, whom this "
        f"process runs as: run `chown 0 {tmp_path / name}`"
    )


def test_the_umask_opens_no_folder(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys", ["tokyo"])
    finally:
        os.umask(before)
    for read in READERS:
        read(tmp_path / "keys")


def _as_user(user: int, groups: list[int], what: Callable[[], object]) -> str:
    """Return the error of a function that a child process of another user calls, "" for none."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            what()
        except BaseException as error:
            said = str(error)
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said


def open_to_all(folder: Path) -> None:
    """Let other users reach a folder of this test's."""
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.getuid() and each.stat().st_mode & 0o005 != 0o005:
            each.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another owner need root")
def test_a_secret_as_kubernetes_mounts_it_is_taken(tmp_path: Path) -> None:
    """A pod with fsGroup: links to files of mode 0440 that are root's, and the pod's group's."""
    open_to_all(tmp_path)
    make_keys(tmp_path / "made", ["tokyo"])
    (tmp_path / "made").rename(tmp_path / "..data")
    (tmp_path / "keys").symlink_to("..data")
    for path in (tmp_path / "..data", *(tmp_path / "..data").rglob("*")):
        os.chown(path, 0, 10001)
        path.chmod(0o750 if path.is_dir() else 0o440)
    folder = tmp_path / "keys"
    for read in READERS:
        read(folder)
    secret = folder / "server.key_secret"
    assert _as_user(10001, [], lambda: read_secret(secret)) == ""
    assert _as_user(10002, [10001], lambda: LinkKeys.read(secret)) == ""
    # A group of another process, and an owner who could have closed the file.
    (tmp_path / "..data").chmod(0o755)
    assert "cannot be read: Permission denied" in _as_user(10003, [], lambda: read_secret(secret))
    os.chown(secret, 10001, 10001)
    refused = _as_user(10001, [], lambda: read_secret(secret))
    assert f"others than the owner may use {secret}, which has mode 440" in refused


MOUNTED = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 7
exec "$2" -c '
import sys
from pathlib import Path
from diloco_comm.base.service.keys import LinkKeys
LinkKeys.read(Path(sys.argv[1]) / "server.key_secret")' "$1"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
@pytest.mark.fresh_interpreter
def test_the_mode_of_a_folder_does_not_count_where_nobody_can_write(tmp_path: Path) -> None:
    """Kubernetes mounts a Secret at a folder of mode 1777, and read-only."""
    make_keys(tmp_path, ["tokyo"])
    for folder in (tmp_path, tmp_path / "allowed"):
        folder.chmod(0o1777)
    with pytest.raises(ValueError, match="others than the owner may write"):
        _of_a_link(tmp_path)
    command = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(tmp_path), sys.executable]
    ended = run_command(command)
    if ended.returncode == 7 or "unshare" in ended.stderr:
        pytest.skip("this system lets nobody mount")
    assert (ended.returncode, ended.stderr) == (0, "")


# --------------------------------------------------------- a folder that cannot be read for now


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Let this process open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def curve(keys: Keys) -> bytes:
    return keys.curve.encode()


@pytest.fixture(params=["server", "link"])
def in_allowed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Allowed]:
    """The keys that a server, or a link, lets in: lima, nice and tokyo."""
    make_keys(tmp_path, ["lima", "nice", "tokyo"])
    if request.param == "link":
        yield LinkKeys.read(tmp_path / "lima.key_secret").allowed
        return
    with zmq.Context() as context:
        guard = Guard(context, tmp_path / "allowed")
        yield guard.allowed
        guard.stop()


def test_a_key_that_is_removed_while_no_descriptor_is_left_counts_at_once(
    in_allowed: Allowed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New keys, and changed ones, wait for a descriptor."""
    folder = tmp_path / "allowed"
    lima, nice, tokyo = (folder / f"{name}.key" for name in ("lima", "nice", "tokyo"))
    before = in_allowed.present(at_once=True)
    assert len(before) == 3
    make_pairs(tmp_path / "other", ["oslo", "tokyo"], serves=True)
    shutil.copy(tmp_path / "other" / "oslo.key", folder)
    os.replace(tmp_path / "other" / "tokyo.key", tokyo)
    lima.unlink()
    with no_descriptor():
        for _ in range(3):
            left = in_allowed.present(at_once=True)
            assert left < before and len(left) == 2
        nice.unlink()
        assert len(in_allowed.present(at_once=True)) == 1
        # The folder itself is gone: the last keys stay.
        folder.rename(tmp_path / "away")
        assert len(in_allowed.present(at_once=True)) == 1
        (tmp_path / "away").rename(folder)
    busy, gone = [record.getMessage() for record in caplog.records]
    assert busy.startswith(f"the folder {folder} cannot be read (Too many open files)")
    assert gone.startswith(f"the folder {folder} is gone: the clients that it named before stay")
    after = in_allowed.present(at_once=True)
    assert len(after) == 2 and not after & before


def test_a_key_whose_file_cannot_be_read_again_stays_and_holds_no_other_up(
    in_allowed: Allowed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "allowed"
    before = in_allowed.present(at_once=True)
    # Reading a folder as a file is an error for root too.
    for name in ("lima.key", "oslo.key"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
    for _ in range(3):
        assert in_allowed.present(at_once=True) == before
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{folder}/lima.key cannot be read (Is a directory): its last keys stay"
    assert said[1].startswith(f"{folder}/oslo.key lets nobody in: ") and len(said) == 2
    remove(tmp_path, "tokyo")
    left = in_allowed.present(at_once=True)
    assert left < before and len(left) == 2
    (folder / "lima.key").rmdir()
    assert len(in_allowed.present(at_once=True)) == 1
    shutil.copy(tmp_path / "lima.key", folder)
    assert in_allowed.present(at_once=True) == left
    assert len(caplog.records) == 2


def test_a_folder_that_others_may_change_keeps_its_last_keys(
    in_allowed: Allowed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "allowed"
    before = in_allowed.present(at_once=True)
    make_pairs(tmp_path / "other", ["oslo"], serves=True)
    folder.chmod(0o775)
    shutil.copy(tmp_path / "other" / "oslo.key", folder)
    for _ in range(3):
        assert in_allowed.present(at_once=True) == before
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"others than the owner may write {folder}, which has mode 775: run `ch")
    assert line.endswith("; until then the last keys stay")
    folder.chmod(0o755)
    assert len(in_allowed.present(at_once=True)) == 4


def test_an_allowed_key_that_others_may_change_lets_nobody_in(
    in_allowed: Allowed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "allowed"
    before = in_allowed.present(at_once=True)
    make_pairs(tmp_path / "other", ["oslo", "tokyo"], serves=True)
    for name in ("oslo.key", "tokyo.key"):
        shutil.copy(tmp_path / "other" / name, folder)
        (folder / name).chmod(0o664)
    for _ in range(3):
        assert in_allowed.present(at_once=True) == before
    oslo, tokyo = [record.getMessage() for record in caplog.records]
    assert oslo.endswith(f"run `chmod go-w {folder}/oslo.key`; until then this file lets nobody in")
    assert tokyo.endswith(f"run `chmod go-w {folder}/tokyo.key`; until then its last keys stay")
    for name in ("oslo.key", "tokyo.key"):
        (folder / name).chmod(0o644)
    after = in_allowed.present(at_once=True)
    assert len(after) == 4 and len(after & before) == 2


def test_trouble_that_comes_and_goes_is_said_once_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers decide when a process has no descriptor, and so must not fill the log."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("diloco_comm.base.service.keys.time", clock)
    make_keys(tmp_path)
    allowed = Allowed(tmp_path / "allowed", curve)
    assert len(allowed.present()) == 1

    def said_at(seconds: float, *, is_readable: bool) -> list[str]:
        caplog.clear()
        clock.monotonic = lambda: seconds
        with nullcontext() if is_readable else no_descriptor():
            assert len(allowed.present()) == 1
        return [record.getMessage() for record in caplog.records]

    for begin in (110.0, 140.0):
        (line,) = said_at(begin, is_readable=False)
        assert "cannot be read (Too many open files)" in line
        for second in range(1, 9):
            assert said_at(begin + second, is_readable=second % 2 == 0) == []
        assert said_at(begin + 16.0, is_readable=True) == []
        (line,) = said_at(begin + 18.0, is_readable=True)
        assert line == f"{tmp_path}/allowed can be read again"
        assert said_at(begin + 29.0, is_readable=True) == []


def _looks_of_a_link(folder: Path) -> Callable[[], frozenset[bytes]]:
    keys = LinkKeys.read(folder / "lima.key_secret")
    link = _C.Link("127.0.0.1:0", "127.0.0.1:0", keys.seed)
    watch = AllowedWatch(keys, link, "keys")
    # The watch holds no link.
    return lambda link=link: watch.look()  # type: ignore[misc]


def _looks_of_a_server(folder: Path) -> Callable[[], frozenset[bytes]]:
    guard = Guard(zmq.Context(), folder / "allowed")
    return lambda: guard.allowed.present(at_once=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root")
@pytest.mark.parametrize("looks_of", [_looks_of_a_link, _looks_of_a_server])
@pytest.mark.parametrize("closed", ["keys", "keys/allowed"])
def test_the_last_keys_stay_while_a_folder_is_closed(
    tmp_path: Path, looks_of: Callable[[Path], Callable[[], frozenset[bytes]]], closed: str
) -> None:
    open_to_all(tmp_path)
    make_keys(tmp_path / "keys", ["lima", "tokyo"])

    def look() -> None:
        present = looks_of(tmp_path / "keys")
        before = present()
        assert len(before) == 2
        (tmp_path / closed).chmod(0)
        assert present() == before

    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 10001, 10001)
    assert _as_user(10001, [], look) == ""


def test_a_folder_of_keys_that_is_gone_for_a_moment_locks_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path)
    with zmq.Context() as context:
        guard = Guard(context, tmp_path / "allowed")
        try:
            (key,) = guard.allowed.present()
            (tmp_path / "allowed").rename(tmp_path / "away")
            for _ in range(2):
                guard.allowed._look_at = 0.0
                assert guard.callback("*", key)
            (line,) = [one.getMessage() for one in caplog.records]
            assert "is gone: the clients that it named before stay allowed" in line
            (tmp_path / "allowed").mkdir()
            guard.allowed._look_at = 0.0
            assert not guard.callback("*", key)
        finally:
            guard.stop()
