# SPDX-License-Identifier: Apache-2.0
"""ns-viewer in a headless Chromium: what the browser shows is the scene, and an empty canvas fails.

Oracle: the colours of the scene's definition. Skips, counted, where Chromium or Playwright is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nerfstudio_tools import command, environment
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--use-gl=angle",
        "--use-angle=swiftshader",
    ),
    "--enable-unsafe-swiftshader",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def viewer_port(trained: Path, tmp_path: Path) -> Iterator[int]:
    """`ns-viewer` on the trained run; yields its port, ends it afterwards."""
    port = free_port()
    arguments = [
        "--load-config",
        trained,
        "--viewer.websocket-port",
        port,
        "--viewer.websocket-host",
        "127.0.0.1",
    ]
    log = (tmp_path / "viewer.log").open("w+")
    process = subprocess.Popen(
        command("ns-viewer", *arguments),
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as page:
                    assert page.status == 200
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail(f"ns-viewer did not answer (exit {process.poll()}):\n{log.read()[-4000:]}")
                time.sleep(0.5)
        yield port
        log.seek(0)
        assert "Traceback" not in log.read()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def shares(pixels: np.ndarray) -> dict[str, float]:
    """Which share of a picture's pixels has the hue of the red ball, the blue ball, the green checkers."""
    r, g, b = (pixels[..., i].astype(float) for i in range(3))
    return {
        "red": float(((r > 90) & (r > 1.8 * g) & (r > 1.8 * b)).mean()),
        "blue": float(((b > 90) & (b > 1.5 * r) & (b > 1.3 * g)).mean()),
        "green": float(((g > 60) & (g > 1.2 * r) & (g > 1.1 * b)).mean()),
    }


def test_the_browser_shows_the_scene(viewer_port: int, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    picture = Path(os.environ.get("MGPU_VIEWER_PICTURE", tmp_path / "viewer.png"))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 900, "height": 600})
            page.goto(f"http://127.0.0.1:{viewer_port}")
            page.wait_for_selector("canvas", timeout=60_000)
            deadline, seen = time.monotonic() + 90, {}
            while time.monotonic() < deadline:
                page.screenshot(path=picture)
                pixels = np.asarray(Image.open(picture).convert("RGB"))
                seen = shares(pixels[:, : pixels.shape[1] * 2 // 3])  # the control panel is on the right
                if min(seen.values()) > 0.004:
                    break
                time.sleep(1)
        finally:
            browser.close()
    assert min(seen.values()) > 0.004, f"the canvas does not show both balls and the floor: {seen}"


def test_an_empty_canvas_would_fail() -> None:
    """The test of the test: neither viser's plain background nor a page of text passes for the scene."""
    for color in ((38, 42, 55), (255, 255, 255), (0, 0, 0), (233, 236, 239)):
        assert min(shares(np.full((60, 60, 3), color, np.uint8)).values()) == 0
