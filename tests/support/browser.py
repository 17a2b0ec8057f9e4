"""A headless Chromium, driven through the pipe of its DevTools protocol: no package, no port, no driver."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--mute-audio",
)
TIMEOUT_S = 60
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    "Enter": 13,
}


def chromium() -> str | None:
    """The browser's path; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser. `errors` has what its console and its scripts complained of, `requests` all URLs."""

    def __init__(self, executable: str, profile: Path) -> None:
        read, child_write = os.pipe()
        child_read, write = os.pipe()
        self._log = (profile / "chromium.log").open("wb")
        script = f'exec "$@" 3<&{child_read} 4>&{child_write}'
        command = [
            "bash",
            "-c",
            script,
            "chromium",
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(child_read, child_write), stdout=self._log, stderr=self._log
        )
        os.close(child_read)
        os.close(child_write)
        self._write, self._read = os.fdopen(write, "wb"), read
        os.set_blocking(read, False)
        self._pending, self._last, self._session = b"", 0, ""
        self._answers: dict[int, dict[str, Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loads = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):  # it may be gone already
            self._call("Browser.close")
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._write.close()
        os.close(self._read)
        self._log.close()

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a file; what was heard from the page before is forgotten."""
        self._call("Page.navigate", url="about:blank")
        self.errors.clear()
        self.requests.clear()
        loads = self._loads
        self._call("Page.navigate", url=page.resolve().as_uri() + fragment)
        deadline = time.monotonic() + TIMEOUT_S
        while not (self._loads > loads and self.evaluate("document.readyState") == "complete"):
            assert time.monotonic() < deadline, f"{page} does not load"
            self._receive()
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, so that what was asked for is drawn."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """The size of the window; below 500 pixels it is a phone."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.settle()

    def prefer(self, scheme: str) -> None:
        """What the system asks for: light or dark."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        """A key on what has the focus."""
        known: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
        typed = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **known, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **known)
        self.settle()

    def mouse(self, kind: str, x: float, y: float) -> None:
        """mouseMoved, mousePressed or mouseReleased, with the left button where one is meant."""
        button = "none" if kind == "mouseMoved" else "left"
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)
        self.settle()

    def click(self, selector: str) -> None:
        """Scroll to an element and click its middle."""
        box = self.box(selector)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is on the screen, after scrolling to it."""
        name = json.dumps(selector)
        self.evaluate(f"document.querySelector({name}).scrollIntoView({{block: 'center'}})")
        self.settle()
        box: dict[str, float] = self.evaluate(
            f"document.querySelector({name}).getBoundingClientRect().toJSON()"
        )
        return box

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page, as PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        deadline = time.monotonic() + TIMEOUT_S
        while self._last not in self._answers:
            assert time.monotonic() < deadline, f"no answer to {method}"
            self._receive()
        answer = self._answers.pop(self._last)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> None:
        try:
            chunk = os.read(self._read, 1 << 20)
        except BlockingIOError:
            time.sleep(0.005)
            return
        assert chunk, f"the browser has ended: {Path(self._log.name).read_text(errors='replace')[-2000:]}"
        *messages, self._pending = (self._pending + chunk).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._notice(message["method"], message["params"])

    def _notice(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
