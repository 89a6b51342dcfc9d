"""Where a link listens, and where the others find it: every wrong choice is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_comm.base.service.addresses import (
    check_link,
    link_places,
    name_of_place,
    parse_place,
)

FORM = '"host:port" with a port from'


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
    assert parse_place("listen", place) == expected
    assert name_of_place(*expected) == place


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
        "tcp://h:1",
        "a b:1",
        "h:1 ",
        "u@h:1",
    ],
)
def test_what_is_no_place(place: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_place("listen", place)
    assert str(caught.value) == f"listen must be {FORM} 0 to 65535, got {place!r}"


@pytest.mark.parametrize("place", [29700, None, b"h:1"])
def test_a_place_is_a_string(place: Any) -> None:
    with pytest.raises(TypeError, match='must be a string "host:port", got'):
        parse_place("listen", place)


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
        ("tcp", "h:1", "g:0", f"advertise must be {FORM} 1 to 65535, got 'g:0'"),
        ("tcp", "h:1", "g", f"advertise must be {FORM} 1 to 65535, got 'g'"),
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
