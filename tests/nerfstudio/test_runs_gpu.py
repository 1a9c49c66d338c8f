# SPDX-License-Identifier: Apache-2.0
"""One run on GPUs through all that can happen to it: a signal, `kill -9`, another number of shards; then its end, its scores
and its export. What is asked of each is asked in full on the host (test_signals.py, test_kill.py, test_tools.py)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import scene
import torch
from nerfstudio_tools import command, environment

from ns_mgpu_splat.nerfstudio import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="here are no GPUs"),
]
MESHES = (os.environ.get("MGPU_DEVICES", "0"), "0,0,0")
SECONDS = 150


@contextmanager
def running(words: list[object], mesh: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ns-train` as a user starts it; killed at the end of the block if it is still there."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command("ns-train", *words),
            env=environment(MGPU_DEVICES=mesh, COLUMNS="200"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_save(process: subprocess.Popen[bytes], models: Path, after: int, log: Path) -> None:
    """Until there is a checkpoint of a later step."""
    deadline = time.monotonic() + SECONDS
    while not (there := checkpoint.checkpoints(models)) or there[0][0] <= after:
        assert process.poll() is None, f"it has ended\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"waited in vain\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


def printed_command(text: str) -> list[str]:
    """Words after `ns-train` of the command line that goes on with a run."""
    words = shlex.split(text[text.index(" ns-train mgpu-splat --load-dir") :])
    return words[1 : words.index("--steps-per-save") + 2]  # the last option that the test gave


@pytest.mark.timeout(600)
def test_a_run_on_gpus_is_stopped_and_killed_and_goes_on(tmp_path: Path) -> None:
    town = scene.write_nerfstudio(tmp_path / "town", images=9, points=2000)
    models = tmp_path / "tiny" / "mgpu-splat" / "run" / "nerfstudio_models"
    log = tmp_path / "log.txt"
    options: list[object] = [
        *("mgpu-splat", "--data", town.root, "--output-dir", tmp_path, "--timestamp", "run"),
        *("--experiment-name", "tiny", "--vis", "tensorboard", "--viewer.quit-on-train-completion", True),
        *("--max-num-iterations", 1_000_000, "--pipeline.model.max-gaussians", 20_000),
        *("--steps-per-save", 150),
    ]

    with running(options, MESHES[0], log) as process:
        wait_for_save(process, models, 0, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM, log.read_text()[-3000:]
    said = " ".join(log.read_text().split())
    assert "Traceback" not in said
    stopped = checkpoint.read(checkpoint.find(models))["step"]
    assert f"Stopped after step {stopped + 1:,}, which is saved" in said

    again = printed_command(said)
    with running(again, MESHES[1], log) as process:
        wait_for_save(process, models, stopped, log)
        process.kill()
    killed, path = checkpoint.checkpoints(models)[0]
    assert killed > stopped
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None

    last = killed + 20
    at = again.index("--max-num-iterations") + 1
    with running([*again[:at], last + 1, *again[at + 1 :]], MESHES[0], log) as process:
        assert process.wait(SECONDS) == 0, log.read_text()[-3000:]
    assert checkpoint.read(checkpoint.find(models))["step"] == last

    config = models.parent / "config.yml"
    settings = environment(MGPU_DEVICES=MESHES[1])
    for tool, words in (
        ("ns-eval", ["--load-config", config, "--output-path", tmp_path / "scores.json"]),
        ("ns-export", ["gaussian-splat", "--load-config", config, "--output-dir", tmp_path / "ply"]),
    ):
        done = subprocess.run(
            command(tool, *words), env=settings, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, f"{tool}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert json.loads((tmp_path / "scores.json").read_text())["results"]["psnr"] > 14
    (ply,) = (tmp_path / "ply").glob("*.ply")
    rows = int(re.search(rb"element vertex (\d+)", ply.read_bytes()[:2000])[1])  # type: ignore[index]
    assert 1000 < rows <= 20_000
