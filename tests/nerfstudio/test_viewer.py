# SPDX-License-Identifier: Apache-2.0
"""ns-viewer in a headless Chromium: what the browser shows is the scene, and an empty canvas fails.

Oracles: the colours of the scene's definition, of the shards, of viridis. Skips, counted, where Chromium or Playwright
is missing. MGPU_VIEWER_PICTURES=FOLDER keeps the screenshots.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nerfstudio_tools import command, environment
from PIL import Image

from ns_mgpu_splat.partition.colors import kShardColors

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


@pytest.fixture(scope="module")
def viewer_port(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """`ns-viewer` on the trained run, on three shards; yields its port, ends it afterwards."""
    tmp_path = tmp_path_factory.mktemp("viewer")
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
        env=environment(MGPU_DEVICES="cpu:3"),
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


def test_the_start_ends_with_the_address_and_ctrl_c_with_one_line(trained: Path, tmp_path: Path) -> None:
    """Nerfstudio's ends in "disabled local writer" and in the traceback of a KeyboardInterrupt."""
    port, log = free_port(), tmp_path / "viewer.log"
    words = ["--load-config", trained, "--viewer.websocket-port", port]
    with (
        log.open("w") as out,
        subprocess.Popen(
            command("ns-viewer", *words), cwd=tmp_path, env=environment(), stdout=out, stderr=out
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while "in a browser" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    said = log.read_text()
    assert said.splitlines()[-2:] == [
        f"Open http://localhost:{port} in a browser. Ctrl-C ends the viewer.",
        "ns-viewer: stopped.",
    ]
    assert "writer" not in said
    assert "Traceback" not in said


def shares(pixels: np.ndarray) -> dict[str, float]:
    """Which share of a picture's pixels has the hue of the red ball, the blue ball, the green checkers."""
    r, g, b = (pixels[..., i].astype(float) for i in range(3))
    return {
        "red": float(((r > 90) & (r > 1.8 * g) & (r > 1.8 * b)).mean()),
        "blue": float(((b > 90) & (b > 1.5 * r) & (b > 1.3 * g)).mean()),
        "green": float(((g > 60) & (g > 1.2 * r) & (g > 1.1 * b)).mean()),
    }


@pytest.fixture(scope="module")
def page(viewer_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The viewer's page in a browser, with a panel long enough for all its controls."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1000, "height": 900})
            for attempt in range(
                4
            ):  # a page opened while Nerfstudio still builds its panel may lack a part of it
                page.goto(f"http://127.0.0.1:{viewer_port}")
                try:
                    page.get_by_label("Colour by").wait_for(timeout=25_000)
                    break
                except playwright.TimeoutError:
                    page.screenshot(path=tmp_path_factory.mktemp("page") / f"{attempt}.png")
            page.wait_for_selector("canvas", timeout=60_000)
            yield page
        finally:
            browser.close()


def canvas(page: Any, name: str = "") -> np.ndarray:
    """What the canvas shows (H, W, 3) uint8, without the panel on the right and the bar above."""
    pixels = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    folder = os.environ.get("MGPU_VIEWER_PICTURES")
    if folder and name:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(Path(folder) / f"{name}.png")
    return pixels[60:, : pixels.shape[1] * 2 // 3]


def until(page: Any, wanted: Callable[[np.ndarray], bool], what: str, seconds: float = 60) -> np.ndarray:
    """The canvas once it stands still and is as wanted."""
    deadline, before = time.monotonic() + seconds, canvas(page)
    while time.monotonic() < deadline:
        time.sleep(0.7)
        now = canvas(page)
        if np.abs(now.astype(int) - before).mean() < 0.2 and wanted(now):
            return canvas(page, what.replace(" ", "-"))
        before = now
    canvas(page, "failed-" + what.replace(" ", "-"))
    raise AssertionError(f"the canvas does not show {what} after {seconds} s: {shares(now)}")


def choose(page: Any, color_by: str) -> None:
    page.get_by_label("Colour by").click()
    page.get_by_role("option", name=color_by, exact=True).click()


def near(pixels: np.ndarray, color: tuple[float, ...], within: float = 24) -> float:
    """Share of pixels that have a colour (3,) in [0, 1]."""
    return float((np.abs(pixels - 255 * np.array(color)).max(axis=2) < within).mean())


def shows_the_scene(pixels: np.ndarray) -> bool:
    return min(shares(pixels).values()) > 0.004


def test_the_browser_shows_the_scene(page: Any) -> None:
    until(page, shows_the_scene, "the scene", 90)


@pytest.mark.slow
def test_each_control_of_the_panel_does_what_it_says(page: Any) -> None:
    usual = until(page, shows_the_scene, "the scene again", 90)

    def differs(pixels: np.ndarray) -> bool:
        return bool(np.abs(pixels.astype(int) - usual).mean() > 2)

    choose(page, "home shard")
    until(
        page,
        lambda pixels: differs(pixels) and min(near(pixels, c) for c in kShardColors[:3]) > 0.01,
        "three shards",
    )
    choose(page, "depth")
    yellow, violet = (0.99, 0.91, 0.14), (0.27, 0.0, 0.33)  # the ends of viridis
    seen = until(
        page, lambda pixels: near(pixels, yellow, 70) > 0.005 and near(pixels, violet, 70) > 0.005, "depth"
    )
    below, above = seen[len(seen) * 3 // 4 :], seen[: len(seen) * 3 // 4]
    assert near(below, yellow, 70) > near(above, yellow, 70), "the ground in front is near, so it is bright"
    choose(page, "opacity")
    until(page, lambda pixels: differs(pixels) and shares(pixels)["red"] < 0.002, "opacity")
    choose(page, "as trained")
    until(page, shows_the_scene, "the scene after colours")
    page.get_by_label("Points").check()
    dots = until(page, differs, "points")
    page.get_by_label("Points").uncheck()
    back = until(page, shows_the_scene, "the scene after points")

    def covered(pixels: np.ndarray) -> float:
        return float((np.abs(pixels.astype(int) - (38, 42, 55)).max(axis=2) > 20).mean())

    assert 0.003 < covered(dots) < 0.5 * covered(back), "dots with gaps between them"
    split = page.get_by_label("Enable").nth(0)
    split.check()
    halves = until(page, differs, "split screen")
    split.uncheck()
    left = np.abs(halves.astype(int) - usual)[:, : halves.shape[1] // 3]
    assert left.mean() < 4, "the scene stays on the left"
    until(page, shows_the_scene, "the scene after split screen")


@pytest.mark.slow
def test_a_crop_box_hides_what_is_outside(page: Any) -> None:
    whole = until(page, shows_the_scene, "before the crop", 90)
    box = page.get_by_label("Enable").nth(1)
    box.check()
    seen = until(page, lambda pixels: np.abs(pixels.astype(int) - whole).mean() > 1, "a crop box")
    box.uncheck()
    until(page, shows_the_scene, "after the crop")
    assert shares(seen)["green"] < shares(whole)["green"], "less of the floor is left"


def test_an_orbit_drag_changes_the_picture(page: Any) -> None:
    before = until(page, shows_the_scene, "before the drag", 90)
    page.mouse.move(300, 500)
    page.mouse.down()
    page.mouse.move(420, 470, steps=6)
    page.mouse.up()
    until(
        page,
        lambda pixels: np.abs(pixels.astype(int) - before).mean() > 5 and shares(pixels)["green"] > 0.004,
        "after the drag",
    )


def test_an_empty_canvas_would_fail() -> None:
    """The test of the test: neither viser's plain background nor a page of text passes for the scene."""
    for color in ((38, 42, 55), (255, 255, 255), (0, 0, 0), (233, 236, 239)):
        assert min(shares(np.full((60, 60, 3), color, np.uint8)).values()) == 0
