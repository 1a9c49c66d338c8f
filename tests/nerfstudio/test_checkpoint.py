# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: whole or absent, loadable with weights_only, as large as their tensors."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ns_mgpu_splat.nerfstudio import checkpoint
from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError


def test_saved_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "pipeline": {"a": torch.arange(5.0)},
        "rate": np.float64(0.5),
        "random": checkpoint.random_state(),
    }
    path = checkpoint.save(state, tmp_path, 3, True)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    assert torch.equal(loaded["pipeline"]["a"], torch.arange(5.0))
    assert type(loaded["rate"]) is float


def test_a_view_of_a_large_storage_is_saved_at_its_own_size(tmp_path: Path) -> None:
    path = checkpoint.save({"step": 0, "pipeline": {"a": torch.zeros(1_000_000)[:10]}}, tmp_path, 0, True)
    assert path.stat().st_size < 10_000


def test_older_checkpoints_go_only_when_asked(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save({"step": step, "pipeline": {}}, tmp_path, step, keep_others=True)
    assert [s for s, _ in checkpoint.checkpoints(tmp_path)] == [2, 1]
    checkpoint.save({"step": 3, "pipeline": {}}, tmp_path, 3, keep_others=False)
    assert [s for s, _ in checkpoint.checkpoints(tmp_path)] == [3]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000003.ckpt"]


def test_a_killed_save_leaves_the_previous_checkpoint_and_no_stray_name(tmp_path: Path) -> None:
    folder = tmp_path / "nerfstudio_models"
    checkpoint.save({"step": 1, "pipeline": {"a": torch.ones(3)}}, folder, 1, False)
    program = (
        "import sys, torch; from pathlib import Path; from ns_mgpu_splat.nerfstudio import checkpoint\n"
        "state = {'step': 2, 'pipeline': {str(i): torch.zeros(1 << 24) for i in range(24)}}\n"
        "print('go', flush=True); checkpoint.save(state, Path(sys.argv[1]), 2, False); print('done', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size > 1 << 20 for p in tmp_path.glob(".step-*")):  # 1.6 GB take a second or so
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "done" not in process.stdout.read(), "the save was over before it was killed: enlarge the state"
    assert [p.name for p in folder.iterdir()] == ["step-000000001.ckpt"]
    assert torch.equal(checkpoint.read(checkpoint.find(folder))["pipeline"]["a"], torch.ones(3))


def test_a_full_disk_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"step": 1, "pipeline": {}}, tmp_path, 1, True)
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="Older checkpoints are as they were"):
        checkpoint.save({"step": 2, "pipeline": {"a": torch.zeros(1000)}}, tmp_path, 2, False)
    assert [s for s, _ in checkpoint.checkpoints(tmp_path)] == [1]


def test_a_disk_that_fills_while_writing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's writer answers a failed write with a RuntimeError of its own; training must survive that."""
    whole = checkpoint.save({"step": 1, "pipeline": {}}, tmp_path, 1, True)

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 662\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"step-000000002\.ckpt could not be written .* full"
    ):
        checkpoint.save({"step": 2, "pipeline": {}}, tmp_path, 2, False)
    assert [path for _, path in checkpoint.checkpoints(tmp_path)] == [whole]
    assert not list(tmp_path.parent.glob(".step-*")), "nothing unfinished is left"


def test_a_newer_format_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    newer = checkpoint.save({"step": 1, "pipeline": {}, "format": checkpoint.kFormat + 1}, tmp_path, 1, True)
    with pytest.raises(CheckpointError, match="Upgrade"):
        checkpoint.read(newer)
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="no checkpoint of a Nerfstudio model"):
        checkpoint.read(tmp_path / "list.ckpt")


def test_random_state_comes_back() -> None:
    state = checkpoint.random_state()
    draws = [(random.random(), np.random.rand(), torch.rand(1).item()) for _ in range(2)]  # noqa: NPY002
    checkpoint.restore_random_state(state)
    assert [(random.random(), np.random.rand(), torch.rand(1).item()) for _ in range(2)] == draws  # noqa: NPY002


@pytest.mark.parametrize("seed", range(12))
def test_bytes_that_are_no_checkpoint_get_a_sentence(seed: int, tmp_path: Path) -> None:
    """The unpickler answers noise with any exception: IndexError, UnicodeDecodeError, AttributeError ..."""
    file = tmp_path / "step-000000009.ckpt"
    file.write_bytes(b"\x80\x02" + np.random.default_rng(seed).bytes(20_000) if seed else b"0pop from empty")
    with pytest.raises(CheckpointError, match=f"Checkpoint {file} is cut short or damaged"):
        checkpoint.read(file)


def test_the_unfinished_file_of_a_killed_save_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "nerfstudio_models"
    dead = tmp_path / ".step-000000001.ckpt.999999999"  # larger than any process number
    alive = tmp_path / f".step-000000001.ckpt.{os.getppid()}"
    dead.write_bytes(b"half")
    alive.write_bytes(b"another process is still writing")
    checkpoint.save({"step": 2}, folder, 2, keep_others=False)
    assert not dead.exists()
    assert alive.exists()
