"""Requests to etcd's HTTP gateway: JSON, one connection, the next member if one does not answer."""

from __future__ import annotations

import http.client
import json
import select
import ssl
import time
from typing import Any

Json = dict[str, Any]

# The longest beats of 1024 members, in base64.
_MAX_ANSWER_BYTES = 1 << 25


class GatewayError(Exception):
    """No answer, or an error for an answer; the text is the end of a sentence."""


class Refused(GatewayError):
    """etcd answered with an error."""


class Gateway:
    """Talk to one cluster; one thread at a time.

    Args:
        hosts: Host and port of each member that may be asked.
        tls: For HTTPS; None for HTTP.
    """

    def __init__(self, hosts: list[tuple[str, int]], tls: ssl.SSLContext | None) -> None:
        self._hosts, self._tls = hosts, tls
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: Json, deadline: float, *, may_repeat: bool = True) -> Json:
        """Return the answer to a request.

        Args:
            deadline: Time of ``time.monotonic`` after which the request fails.
            may_repeat: The request may be sent again to another member, if one does not answer.

        Raises:
            Refused: If etcd answers with an error.
            GatewayError: If no member answers in time.
        """
        problem = GatewayError("has not answered in time")
        for num_left in range(len(self._hosts), 0, -1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            is_sent = False
            try:
                connection = self._connect(left_s / num_left)
                is_sent = True
                return _exchange(connection, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                self._hosts.append(self._hosts.pop(0))
                problem = GatewayError(f"has not answered: {error or type(error).__name__}")
                if is_sent and not may_repeat:
                    break
        raise problem

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        """Return the open connection, or a new one to the first member in the list."""
        connection = self._connection
        if connection is not None and _is_idle(connection):
            connection.sock.settimeout(seconds)
            return connection
        self.close()
        host, port = self._hosts[0]
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        self._connection = connection
        connection.connect()
        return connection

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_idle(connection: http.client.HTTPConnection) -> bool:
    """Whether a connection is open, and nothing waits to be read: not even its end."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _exchange(connection: http.client.HTTPConnection, path: str, body: Json) -> Json:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    with connection.getresponse() as response:
        text = response.read(_MAX_ANSWER_BYTES)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if response.status != 200 or not isinstance(answer, dict):
            reason = answer.get("error") if isinstance(answer, dict) else response.reason
            raise Refused(f"refuses {path}: status {response.status}, {reason}")
        return answer
