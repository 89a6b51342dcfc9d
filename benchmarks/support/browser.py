"""A headless Chromium, driven over a pipe by the DevTools protocol: what a page shows, and logs."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Milliseconds between two polls of the page, and some more.
_PATIENCE_S = 60.0


def find() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser.

    Attributes:
        problems: The errors and warnings that the page's console has shown.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol.

        Raises:
            RuntimeError: If the browser refuses the call.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._from.read(1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        values = found.get("params", {})
        if found.get("method") == "Log.entryAdded":
            self.problems.append(values["entry"]["text"])
        elif found.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif found.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(str(values["args"]))
        return found

    def show(self, address: str, width: int, height: int, *, is_dark: bool = False) -> None:
        """Load a page in a window of so many pixels, and wait until it has shown a status."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=address)
        self.wait_for("document.getElementById('age')?.textContent")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression as soon as the value is true.

        Raises:
            TimeoutError: If that takes longer than a minute.
        """
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if found := self.value(expression):
                return found
            time.sleep(0.1)
        raise TimeoutError(f"{expression} is not true")

    def picture(self) -> bytes:
        """Return what the window shows as PNG."""
        found = self.call("Page.captureScreenshot")
        return base64.b64decode(found["data"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser for the block."""
    path = find()
    assert path is not None, "there is no Chromium on PATH"
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        # Chromium reads descriptor 3 and writes descriptor 4.
        script = f'exec 3<&{their_in} 4>&{their_out}; exec "$@" 2>/dev/null'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", path, *options], pass_fds=(their_in, their_out)
        )
        os.close(their_in)
        os.close(their_out)
        try:
            yield Browser(our_out, our_in)
        finally:
            process.terminate()
            process.wait()
