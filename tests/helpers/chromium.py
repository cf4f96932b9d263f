"""Look at pages in Chromium, on a phone and a desk, light and dark: what leaves the screen, what is faint.

The browser is driven by its DevTools protocol, because its own options have no width of a phone.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE, DESK = 390, 1280
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)
# What sticks out of the screen, unless something around it scrolls; and texts of low contrast.
LOOK = """
(() => {
  const width = document.documentElement.clientWidth, outside = [], faint = [];
  const named = e => e.tagName.toLowerCase() + '.' + (e.getAttribute('class') || '');
  const scrolls = e => {
    for (let a = e; a && a !== document.body; a = a.parentElement)
      if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(a).overflowX)) return true;
    return false;
  };
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = e => {
    for (let a = e; a; a = a.parentElement) {
      const c = channels(getComputedStyle(a).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0] : [255, 255, 255];
  };
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || getComputedStyle(e).visibility !== 'visible') continue;
    if (box.right > width + 1 && box.left >= 0 && !scrolls(e))
      outside.push(named(e) + ' to ' + Math.round(box.right));
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own && !e.closest('svg')) {
      const style = getComputedStyle(e);
      if (style.opacity < 1 || e.closest(':disabled')) continue;
      const [a, b] = [light(channels(style.color)), light(ground(e))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) faint.push(named(e) + ' ' + ratio.toFixed(1) + ': ' + e.textContent.trim());
    }
  }
  const wide = Math.max(0, document.documentElement.scrollWidth - width);
  return {wide, outside: outside.slice(0, 8), faint: faint.slice(0, 8)};
})()
"""


class Browser:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def open(self, address: str, *, width: int = DESK, dark: bool = False) -> None:
        """Open a page, and wait until its scripts have run."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.enable")
        self.call("Page.navigate", url=address)
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("method") == "Page.loadEventFired":
                return

    def ask(self, script: str) -> Any:
        """Return the value of an expression, also of one that is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self) -> dict[str, Any]:
        """Return what is wrong with the open page, by `LOOK`."""
        seen: dict[str, Any] = self.ask(LOOK)
        return seen

    def picture(self, path: Path, *, most: int = 2400) -> None:
        """Write a picture of the open page, down to a height."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Run a browser with a profile of its own. Needs `CHROMIUM`."""
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        at = next(line.split()[-1] for line in process.stderr if "DevTools listening" in line)
        with connect(at, max_size=None) as session:
            target = Browser(session).call("Target.createTarget", url="about:blank")["targetId"]
        with connect(at.partition("/devtools/")[0] + f"/devtools/page/{target}", max_size=None) as tab:
            yield Browser(tab)
    finally:
        process.terminate()
        process.communicate(timeout=30)
