"""A headless Chromium, driven over the WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with its chromedriver on this machine" if not (CHROMIUM and DRIVER) else ""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One window."""

    def __init__(self, base: str, session: str) -> None:
        self._url = f"{base}/session/{session}"

    def open(self, url: str) -> None:
        """Go to `url`."""
        _call("POST", f"{self._url}/url", {"url": url})

    def script(self, text: str) -> Any:
        """Run JavaScript that ends in a return statement."""
        return _call("POST", f"{self._url}/execute/sync", {"script": text, "args": []})

    def text(self) -> str:
        """Return what can be read on the page."""
        return str(self.script("return document.body.innerText"))

    def wait_for_text(self, *wanted: str, seconds: float = 60.0) -> str:
        """Wait until all of `wanted` can be read on the page."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.text()
            missing = [each for each in wanted if each not in text]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"{missing} did not appear in:\n{text[:3000]}"
            time.sleep(0.25)

    def wait_for_true(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression holds."""
        deadline = time.monotonic() + seconds
        while not self.script(f"return {condition}"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.25)

    def links(self) -> list[str]:
        """Return where the links of the page lead."""
        return list(self.script("return [...document.querySelectorAll('a')].map(link => link.href)"))

    def wait_for_frame_text(self, *wanted: str, seconds: float = 60.0) -> None:
        """Wait until all of `wanted` can be read in the page's first frame."""
        deadline = time.monotonic() + seconds
        while True:
            frames = self.script("return document.querySelectorAll('iframe').length")
            if frames:
                _call("POST", f"{self._url}/frame", {"id": 0})
                text = self.text()
                _call("POST", f"{self._url}/frame", {"id": None})
                if all(each in text for each in wanted):
                    return
            assert time.monotonic() < deadline, f"{wanted} did not appear in any frame"
            time.sleep(0.25)

    def resize(self, width: int, height: int = 900) -> None:
        """Show pages in a viewport of this size, smaller than a window can be if need be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        _call("POST", f"{self._url}/goog/cdp/execute", command)

    def prefer(self, scheme: str) -> None:
        """Show pages to someone who prefers this colour scheme, `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        _call("POST", f"{self._url}/goog/cdp/execute", command)

    def errors(self) -> list[str]:
        """Return the messages of level SEVERE since the last call."""
        entries = _call("POST", f"{self._url}/se/log", {"type": "browser"})
        return [
            entry["message"] for entry in entries if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as PNG."""
        path.write_bytes(base64.b64decode(_call("GET", f"{self._url}/screenshot")))


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """Open a window with a fresh profile; close it and its driver at the end."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_up(f"{base}/status")
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call("POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(base, session)
        finally:
            _call("DELETE", f"{base}/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)


def free_port() -> int:
    """Return a port on loopback that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_up(url: str, seconds: float = 90.0) -> None:
    """Wait until a server answers at `url`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, f"nothing answers at {url}"
            time.sleep(0.2)


def _call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:500]}") from error
