# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: whole or absent, loadable with weights_only, as large as their tensors."""

from __future__ import annotations

import fcntl
import os
import random
import shlex
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
from ns_mgpu_splat.nerfstudio.preflight import row_bytes
from ns_mgpu_splat.splats import SplatAdam, SplatTable
from ns_mgpu_splat.splats.statistics import RowStatistics


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


def test_a_checkpoint_cut_anywhere_gets_a_sentence_that_names_a_whole_one(tmp_path: Path) -> None:
    table = {"means": torch.rand(40_000, 3), "shN": torch.rand(40_000, 15, 3)}
    folder = tmp_path / "mein Test"  # its name must be quoted where an option is said
    folder.mkdir()
    whole = checkpoint.save({"step": 1, "pipeline": table}, folder, 1, True)
    file = whole.read_bytes()
    cut = folder / "step-000000002.ckpt"
    for length in [0, 1, 100, 4096, *range(5000, len(file), len(file) // 15), len(file) - 100, len(file) - 1]:
        cut.write_bytes(file[:length])
        with pytest.raises(CheckpointError) as error:
            checkpoint.read(cut)
        expected = f"Checkpoint {cut} is cut short or damaged. A whole one is beside it: --load-checkpoint '{whole}'."
        assert str(error.value) == expected, length


@pytest.mark.parametrize("place", [0.01, 0.3, 0.999])
def test_a_bit_that_has_changed_on_the_disk_gets_a_sentence(place: float, tmp_path: Path) -> None:
    path = checkpoint.save({"step": 1, "pipeline": {"a": torch.rand(20_000_000)}}, tmp_path, 1, True)
    bytes_of_tensor = 80_000_000
    begin = (
        path.stat().st_size - bytes_of_tensor
    )  # at least: the tensor, then some hundred bytes of directory
    checkpoint.read(path)
    with path.open("r+b") as file:
        file.seek(begin + int(place * (bytes_of_tensor - begin)))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CheckpointError, match=r"is cut short or damaged. There is no other one"):
        checkpoint.read(path)


def test_a_disk_that_takes_no_more_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    """The kernel itself refuses: RLIMIT_FSIZE needs no full disk. 8 MB are too much, 1 MB is not."""
    program = (
        "import resource, sys, torch; from pathlib import Path; from ns_mgpu_splat.nerfstudio import checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))\n"
        "for step, size in enumerate((1 << 18, 1 << 21)):\n"
        "    state = {'step': step, 'pipeline': {'a': torch.zeros(size)}}\n"
        "    checkpoint.save(state, Path(sys.argv[1]), step, False)\n"
    )
    folder = tmp_path / "nerfstudio_models"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"CheckpointError: {folder}/step-000000001.ckpt could not be written (" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["step-000000000.ckpt"]
    assert checkpoint.read(checkpoint.find(folder))["pipeline"]["a"].shape == (1 << 18,)
    assert not list(tmp_path.glob(".step-*"))


def test_the_unfinished_file_of_a_killed_save_is_removed_by_the_next(tmp_path: Path) -> None:
    """A process that still writes holds a lock; process numbers are used again and say nothing."""
    folder = tmp_path / "nerfstudio_models"
    dead = tmp_path / f".step-000000001.ckpt.{os.getppid()}"
    alive = tmp_path / ".step-000000001.ckpt.999999999"
    dead.write_bytes(b"half")
    alive.write_bytes(b"another process is still writing")
    with alive.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        checkpoint.save({"step": 2}, folder, 2, keep_others=False)
        assert not dead.exists()
        assert alive.exists()
    checkpoint.save({"step": 3}, folder, 3, keep_others=False)
    assert not alive.exists()


@pytest.mark.parametrize(("half", "strategy"), [(False, "mcmc"), (True, "mcmc"), (False, "default")])
@pytest.mark.parametrize("degree", [0, 3])
def test_the_estimate_is_the_size_of_the_file(half: bool, strategy: str, degree: int, tmp_path: Path) -> None:
    rows = 20_000
    table = SplatTable(rows, sh_degree=degree, half=half)
    optimizer = SplatAdam(table, {})
    if strategy == "default":
        optimizer.statistics = RowStatistics(rows, rows)
    state = {"step": 0, "pipeline": table.named_columns(), "optimizers": optimizer.state_dict()}
    size = checkpoint.save(state, tmp_path, 0, True).stat().st_size
    estimate = rows * row_bytes(degree, half, strategy == "default")
    assert 0.9 * estimate < size < estimate + 150_000  # names, and a block of 4,096 bytes for each tensor


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Root may write anywhere: a file in the place of the folder stops everybody."""
    (tmp_path / "run").write_text("I am a file")
    folder = tmp_path / "run" / "nerfstudio_models"
    with pytest.raises(CheckpointError, match=r"run/nerfstudio_models cannot be written .*--output-dir"):
        checkpoint.check_folder(folder)
    checkpoint.check_folder(tmp_path / "other" / "nerfstudio_models")
    assert sorted(p.name for p in (tmp_path / "other").rglob("*")) == ["nerfstudio_models"]


@pytest.mark.parametrize(
    ("saves", "keep", "free", "answer"),
    [
        (1, False, 99, "refused"),  # bytes now: 100, at the cap: 1000
        (1, False, 100, "warned"),
        (1, False, 1000, None),
        (5, False, 199, "refused"),  # two, while one is written beside the other
        (5, False, 1999, "warned"),
        (5, False, 2000, None),
        (5, True, 4999, "warned"),
        (5, True, 5000, None),
    ],
)
def test_a_disk_that_is_too_small_is_found_before_training(
    saves: int, keep: bool, free: int, answer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("usage", (), {"free": free}))
    if answer == "refused":
        with pytest.raises(CheckpointError, match="--output-dir"):
            checkpoint.check_room(tmp_path, 100, 1000, saves, keep)
    else:
        said = checkpoint.check_room(tmp_path, 100, 1000, saves, keep)
        assert (said is not None and "will take" in said) == (answer == "warned")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            "/venv/bin/ns-train mgpu-splat --data 'my town' --vis viewer",
            "ns-train mgpu-splat --load-dir out/models --data 'my town' --vis viewer",
        ),
        (
            "ns-train mgpu-splat --load_checkpoint old.ckpt --load-dir=older --load-step 3 --data a b",
            "ns-train mgpu-splat --load-dir out/models --data a b",
        ),
        ("python notebook.py", "MGPU_DEVICES=0,1 ns-train mgpu-splat --load-dir out/models --data here"),
    ],
)
def test_the_command_to_go_on_is_the_one_that_was_typed(typed: str, expected: str) -> None:
    environment = {"MGPU_DEVICES": "0,1", "HOME": "/"} if "python" in typed else {}
    found = checkpoint.resume_command(
        Path("out/models"), shlex.split(typed), environment, "ns-train mgpu-splat --data here"
    )
    assert found == expected


def test_a_folder_that_is_not_there_and_a_run_in_the_place_of_its_checkpoints_are_told_apart(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere has no checkpoint: it does not exist\.$"):
        checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no checkpoint\. They are called step-000001999\.ckpt\.$"):
        checkpoint.find(tmp_path)
    checkpoint.save({"step": 1, "pipeline": {}}, tmp_path / "nerfstudio_models", 1, True)
    with pytest.raises(CheckpointError, match=r"Did you mean .*/nerfstudio_models\?$"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("given", ["outputs", "outputs/town", "outputs/town/mgpu-splat"])
def test_the_newest_run_below_a_folder_is_meant(given: str, tmp_path: Path) -> None:
    """Newest by when it was saved; a run that has saved nothing is none."""
    method = tmp_path / "outputs" / "town" / "mgpu-splat"
    for name, steps, saved in (("b", (1, 3), 2_000), ("a", (2,), 3_000), ("c", (9,), 1_000)):
        for step in steps:
            path = checkpoint.save(
                {"step": step, "pipeline": {}}, method / name / "nerfstudio_models", step, True
            )
            os.utime(path, (saved, saved))
    (method / "d" / "nerfstudio_models").mkdir(parents=True)
    with pytest.raises(CheckpointError) as refused:
        checkpoint.find(tmp_path / given)
    assert str(refused.value) == (
        f"{tmp_path / given} has no checkpoint. Did you mean {method / 'a' / 'nerfstudio_models'}? That is the newest of 3 runs "
        "in there."
    )


def test_gaussians_are_counted_where_the_checkpoint_does_not_say_how_many() -> None:
    """Those of splatfacto: the memory of a resumed run was that of its seeds."""
    means = {"_model.gauss_params.means": torch.zeros(7, 3)}
    assert checkpoint.rows_of({"pipeline": means}) == 7
    assert checkpoint.rows_of({"pipeline": means, "gaussians": 5}) == 5
    assert checkpoint.rows_of({"pipeline": {}}) == 0
