"""A headless Chromium that a test drives, over the pipe of its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


def chromium():
    """Its path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. `requests`: addresses it asked for; `faults`: what its console and its scripts complained of."""

    def __init__(self, write, read):
        self.write, self.read, self.held, self.count = write, read, b"", 0
        self.requests, self.faults, self.session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **given):
        self.count += 1
        message = {"id": self.count, "method": method, "params": given}
        os.write(self.write, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            while b"\0" not in self.held:
                self.held += (piece := os.read(self.read, 1 << 20))
                assert piece, "the browser has ended"
            line, _, self.held = self.held.partition(b"\0")
            told = json.loads(line)
            if told.get("id") == self.count:
                assert "error" not in told, told
                return told["result"]
            self._note(told.get("method"), told.get("params", {}))

    def _note(self, method, told):
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.faults.append(told["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        if method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.faults.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def run(self, script):
        """The value of a script's last expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script, seconds=20):
        """Wait for a script's value to be true."""
        began = time.monotonic()
        while not self.run(f"!!({script})"):
            assert time.monotonic() - began < seconds, (script, self.run("document.body.innerText"), self.faults)
            time.sleep(0.02)

    def open(self, address):
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def picture(self, path, width, height, dark=False):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile):
    """A `Page`; `profile` is an empty directory."""
    # The child reads 3 and writes 4.
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    words = [chromium(), *FLAGS, f"--user-data-dir={profile}"]
    script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
    shell = ["bash", "-c", script, str(theirs_in), str(theirs_out)]
    child = subprocess.Popen([*shell, *words], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in), os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        os.close(ours_out)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        os.close(ours_in)
