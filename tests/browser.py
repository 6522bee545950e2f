"""A headless Chromium, driven by Debian's chromium-driver: WebDriver's commands are JSON over HTTP, which needs no package."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
MISSING = (
    "there is no Chromium with its driver: apt-get install chromium chromium-driver"
    if not (CHROMIUM and DRIVER)
    else ""
)
"""Why there is no browser, or "" if there is one."""

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's identifier in WebDriver's JSON


class Browser:
    """A window."""

    def __init__(self, url: str) -> None:
        self.url = url

    def command(self, method: str, path: str, **parameters):
        data = json.dumps(parameters).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file, or an address, in a viewport of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._devtools("Emulation.setDeviceMetricsOverride", **metrics)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[theme])
        self.command("POST", "/url", url=page if isinstance(page, str) else page.resolve().as_uri())

    def _devtools(self, name: str, **parameters):
        return self.command("POST", "/goog/cdp/execute", cmd=name, params=parameters)

    def run(self, script: str, *arguments):
        """Run the body of a JavaScript function, and return its result."""
        return self.command("POST", "/execute/sync", script=script, args=list(arguments))

    def element(self, selector: str) -> dict[str, str]:
        return self.command("POST", "/element", using="css selector", value=selector)

    def hover(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        move = {"type": "pointerMove", "duration": 0, "origin": self.element(selector), "x": 0, "y": 0}
        self.command("POST", "/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def click(self, selector: str) -> None:
        self.command("POST", f"/element/{self.element(selector)[_ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        self.command("POST", f"/element/{self.element(selector)[_ELEMENT]}/value", text=text)

    def press(self, key: str) -> None:
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.command("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def log(self) -> list[str]:
        """Return what the console received since the last call: errors and warnings."""
        return [entry["message"] for entry in self.command("POST", "/se/log", type="browser")]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        taken = self._devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browser():
    """Start a browser."""
    with tempfile.TemporaryDirectory(prefix="opkit-chromium-") as folder:
        command = [DRIVER, "--port=0"]
        driver = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            port = next(
                line.rsplit(" ", 1)[1].rstrip(".\n") for line in driver.stdout if "successfully on port" in line
            )
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            service = Browser(f"http://127.0.0.1:{port}")
            session = service.command("POST", "/session", capabilities={"alwaysMatch": wanted})
            window = Browser(f"{service.url}/session/{session['sessionId']}")
            try:
                yield window
            finally:
                window.command("DELETE", "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGTERM)
            driver.wait(30)
            driver.stdout.close()
