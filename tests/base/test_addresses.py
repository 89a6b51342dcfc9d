"""Where a link listens, and where the others find it: every wrong choice is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_comm.base.service.addresses import (
    check_link,
    link_places,
    name_of_place,
    parse_address,
    proxy_of,
    shown_proxy,
    tcp_address,
    with_scheme,
)

LISTEN = 'listen must be host:port with a port from 0 to 65535, such as "0.0.0.0:29700", got'
DIALLED = (
    'must be tcp://host:port with a port from 1 to 65535, such as "tcp://192.0.2.1:29400", got'
)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("0.0.0.0:29700", ("0.0.0.0", 29700)),
        ("[::]:0", ("::", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("node-3.example.com:1", ("node-3.example.com", 1)),
    ],
)
def test_a_place(place: str, expected: tuple[str, int]) -> None:
    assert parse_address("listen", place, listens=True) == expected
    assert name_of_place(*expected) == place
    address = tcp_address(*expected)
    assert address == with_scheme(place) == with_scheme(address)
    assert parse_address("listen", address, listens=True) == expected
    if expected[1]:
        assert parse_address("store", place) == parse_address("store", address) == expected
    else:
        with pytest.raises(ValueError, match="with a port from 1 to 65535"):
            parse_address("store", address)


@pytest.mark.parametrize(
    "place",
    [
        "h",
        "h:",
        ":1",
        "h:x",
        "h:-1",
        "h:65536",
        "::1:5",
        "[::1]",
        "http://h:1",
        "tcp:h:1",
        "tcp://tcp://h:1",
        "tcp://h:1/path",
        "",
        "a b:1",
        "h:1 ",
        "u@h:1",
    ],
)
def test_what_is_no_place(place: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address("listen", place, listens=True)
    assert str(caught.value) == f"{LISTEN} {place!r}"
    for given in (place, f"tcp://{place}") if "tcp:" not in place else (place,):
        with pytest.raises(ValueError) as caught:
            parse_address("store", given)
        assert str(caught.value) == f"store {DIALLED} {given!r}"


def test_another_scheme_is_written_out() -> None:
    assert parse_address("registry", "etcd://h:1", scheme="etcd") == ("h", 1)
    for given in ("h:1", "tcp://h:1"):
        with pytest.raises(ValueError, match=r'such as "etcd://192\.0\.2\.1:29400", got'):
            parse_address("registry", given, scheme="etcd")


@pytest.mark.parametrize("place", [29700, None, b"h:1"])
def test_a_place_is_a_string(place: Any) -> None:
    with pytest.raises(TypeError, match=r'such as "0\.0\.0\.0:29700", got'):
        parse_address("listen", place, listens=True)


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [
        (None, None),
        (None, ""),
        ("", None),
        ("", ""),
        ("0.0.0.0:0", None),
        ("0.0.0.0:29700", "203.0.113.5:80"),
    ],
)
def test_choices_that_go_together(listen: str | None, advertise: str | None) -> None:
    check_link("tcp", listen, advertise)


@pytest.mark.parametrize(
    ("backend", "listen", "advertise", "sentence"),
    [
        (None, "h:1", None, """listen='h:1' needs link=Link(backend="tcp"), got no backend"""),
        ("nccl", None, "", """advertise='' needs link=Link(backend="tcp"), got backend='nccl'"""),
        ("tcp", "h:1", "g:0", f"advertise {DIALLED} 'g:0'"),
        ("tcp", "h:1", "g", f"advertise {DIALLED} 'g'"),
        (
            "tcp", "[::]:1", "[::]:1",
            "advertise must name a host that the others can dial, got '[::]:1'",
        ),
        (
            "tcp", "", "g:1",
            "advertise='g:1' needs listen= with the port to which that address leads, "
            "got listen=''",
        ),
        (
            "tcp", None, "g:1",
            "advertise='g:1' needs listen= with the port to which that address leads, "
            "got no listen",
        ),
        (
            "tcp", "h:0", "g:1",
            "advertise='g:1' needs listen= with the port to which that address leads, "
            "got listen='h:0'",
        ),
        (
            "tcp", "h:1", "",
            """advertise="" says that no replica can dial this one, and listen='h:1' that some """
            "can: leave one of the two out",
        ),
    ],
)  # fmt: skip
def test_choices_that_do_not_go_together(
    backend: str | None, listen: str | None, advertise: str | None, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        check_link(backend, listen, advertise)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("backend", "place", "named"),
    [
        ("gloo", {}, "relay='r:1' needs link=Link(backend=\"tcp\"), got backend='gloo'"),
        ("tcp", {"listen": "h:1"}, "listen='h:1' says that some can"),
        ("tcp", {"advertise": "h:1"}, "advertise='h:1' says that some can"),
    ],
)
def test_a_relay_is_for_processes_without_an_address(
    backend: str, place: dict[str, str], named: str
) -> None:
    nowhere: dict[str, str | None] = {"listen": None, "advertise": None}
    check_link("tcp", **{**nowhere, **dict.fromkeys(place, "")}, relay="r:1")
    with pytest.raises(ValueError) as caught:
        check_link(backend, **{**nowhere, **place}, relay="r:1")
    assert named in str(caught.value)


def test_a_relay_has_a_port() -> None:
    with pytest.raises(ValueError, match="relay must be "):
        check_link("tcp", None, None, relay="relay.example")
    assert link_places(None, None, lambda: "192.0.2.7", "r:1") == ("", "")


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        (None, None, ("192.0.2.7:0", "192.0.2.7:0")),
        (None, "", ("", "")),
        ("", None, ("", "")),
        ("", "", ("", "")),
        ("0.0.0.0:29700", None, ("0.0.0.0:29700", "192.0.2.7:29700")),
        ("[::]:0", None, ("[::]:0", "192.0.2.7:0")),
        ("[::1]:5", None, ("[::1]:5", "[::1]:5")),
        ("0.0.0.0:29700", "203.0.113.5:80", ("0.0.0.0:29700", "203.0.113.5:80")),
        ("tcp://h:1", "tcp://[::1]:80", ("h:1", "[::1]:80")),
    ],
)
def test_places_of_a_link(
    listen: str | None, advertise: str | None, expected: tuple[str, str]
) -> None:
    assert link_places(listen, advertise, lambda: "192.0.2.7") == expected


def test_the_own_host_is_asked_only_where_it_counts() -> None:
    def own_host() -> str:
        raise AssertionError("was asked")

    assert link_places("h:1", None, own_host) == ("h:1", "h:1")
    assert link_places("0.0.0.0:1", "g:1", own_host) == ("0.0.0.0:1", "g:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:3128", ("http", "h", 3128, None, "")),
        ("socks5://[::1]:1080/", ("socks5", "::1", 1080, None, "")),
        ("http://u:p%40s%2Fs%3A@h:1", ("http", "h", 1, "u", "p@s/s:")),
        ("socks5://u@192.0.2.7:1", ("socks5", "192.0.2.7", 1, "u", "")),
        ("socks5://a%3Ab:c@h:1", ("socks5", "h", 1, "a:b", "c")),
    ],
)
def test_a_proxy(text: str, expected: tuple[Any, ...]) -> None:
    found = proxy_of(text)
    assert found == expected
    assert (
        repr(found)
        == str(found)
        == f"{text.partition('://')[0]}://" + name_of_place(*expected[1:3])
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("h:3128", "h:3128"),
        ("https://h:3128", "https://h:3128"),
        ("http://h", "http://h"),
        ("http://h:0", "http://h:0"),
        ("http://u:sesame@h:65536", "http://...@h:65536"),
        ("http://u:se/sa#me@h:80", "http://...@h:80"),
        ("http://u:sesame", "http://u:..."),
        ("u:sesame@h:80", "...@h:80"),
        ("http://u:ses@me@h:80", "http://...@h:80"),
        ("http://u:sesame@h:80/path", "http://...@h:..."),
    ],
)
def test_what_is_no_proxy_is_shown_without_the_password(text: str, shown: str) -> None:
    assert shown_proxy(text) == shown
    with pytest.raises(ValueError) as caught:
        check_link("tcp", None, None, proxy=text)
    assert str(caught.value).endswith(f"stand before the host, got {shown!r}")


def test_the_environment_has_the_password_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_PROXY_PASSWORD", "p%40/s:")
    assert proxy_of("http://u@h:1") == ("http", "h", 1, "u", "p%40/s:")
    # A password in the text counts, also an empty one; without a user there is none.
    assert proxy_of("http://u:q@h:1") == ("http", "h", 1, "u", "q")
    assert proxy_of("http://u:@h:1") == ("http", "h", 1, "u", "")
    assert proxy_of("http://h:1") == ("http", "h", 1, None, "")
    monkeypatch.setenv("DILOCO_COMM_PROXY_PASSWORD", "sesame\n")
    with pytest.raises(ValueError) as caught:
        proxy_of("http://u@h:1")
    assert str(caught.value) == (
        "the password in DILOCO_COMM_PROXY_PASSWORD must have at most 255 bytes, and no control "
        "characters"
    )


def test_the_user_of_a_proxy_has_limits() -> None:
    for text in ("http://u:a%0Ab@h:1", f"socks5://{'u' * 256}:p@h:1"):
        with pytest.raises(ValueError, match="at most 255 bytes, and no control characters"):
            proxy_of(text)
    with pytest.raises(ValueError, match="has a colon"):
        proxy_of("http://a%3Ab:c@h:1")
    with pytest.raises(TypeError, match="proxy must be a string, got bytes"):
        check_link("tcp", None, None, proxy=b"http://u:sesame@h:1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"proxy='http://...@h:1' needs link=Link"):
        check_link("gloo", None, None, proxy="http://u:sesame@h:1")
