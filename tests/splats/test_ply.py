# SPDX-License-Identifier: Apache-2.0
"""3DGS .ply files against plyfile and INRIA's layout."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import plyfile
import pytest
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.splats import ply
from ns_mgpu_splat.splats.table import COLUMNS


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ply, "_CHUNK_ROWS", 10)  # so that small tables go through several


def random_columns(rows: int, sh_degree: int = 3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (), "sh0": (3,)}
    columns = {name: torch.randn((rows, *shape), generator=generator) for name, shape in shapes.items()}
    columns["shN"] = torch.randn((rows, (sh_degree + 1) ** 2 - 1, 3), generator=generator)
    return columns


def inria_attributes(sh_degree: int) -> list[str]:
    """construct_list_of_attributes of graphdeco-inria/gaussian-splatting, scene/gaussian_model.py."""
    names = ["x", "y", "z", "nx", "ny", "nz"]
    names += [f"f_dc_{i}" for i in range(3)]
    names += [f"f_rest_{i}" for i in range(3 * ((sh_degree + 1) ** 2 - 1))]
    return [*names, "opacity", *(f"scale_{i}" for i in range(3)), *(f"rot_{i}" for i in range(4))]


@pytest.mark.parametrize("sh_degree", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_plyfile_reads_what_inria_would_write(rows: int, sh_degree: int, tmp_path: Path) -> None:
    columns = random_columns(rows, sh_degree)
    table = SplatTable.from_columns(**columns)
    assert table.to_ply(tmp_path / "splats.ply") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["splats.ply"], "nothing is left beside it"
    data = plyfile.PlyData.read(str(tmp_path / "splats.ply"))
    assert not data.text
    vertex = data["vertex"]
    assert [p.name for p in vertex.properties] == inria_attributes(sh_degree)
    assert all(p.val_dtype == "f4" for p in vertex.properties)
    assert vertex.count == rows
    for i, name in enumerate("xyz"):
        assert np.array_equal(vertex[name], columns["means"][:, i].numpy())
        assert not vertex[f"n{name}"].any()
    # save_ply: features_rest (N, K, 3) -> transpose(1, 2) -> flatten
    rest = columns["shN"].transpose(1, 2).flatten(1).numpy()
    for i in range(rest.shape[1]):
        assert np.array_equal(vertex[f"f_rest_{i}"], rest[:, i])
    for i in range(3):
        assert np.array_equal(vertex[f"f_dc_{i}"], columns["sh0"][:, i].numpy())
        assert np.array_equal(vertex[f"scale_{i}"], columns["scales"][:, i].numpy())
    for i in range(4):
        assert np.array_equal(vertex[f"rot_{i}"], columns["quats"][:, i].numpy())
    assert np.array_equal(vertex["opacity"], columns["opacities"].numpy())


def write_with_plyfile(
    path: Path, columns: dict[str, Tensor], *, dtype: str = "f4", byte_order: str = "<"
) -> None:
    """A file of another writer: other order of properties, an extra one, and a second element."""
    degree = {0: 0, 3: 1, 8: 2, 15: 3}[columns["shN"].shape[1]]
    names = [*inria_attributes(degree)[::-1], "label"]
    vertex = np.zeros(len(columns["means"]), dtype=[(name, dtype) for name in names])
    rest = columns["shN"].transpose(1, 2).flatten(1)
    for prefix, values in (
        ("f_dc_", columns["sh0"]),
        ("f_rest_", rest),
        ("scale_", columns["scales"]),
        ("rot_", columns["quats"]),
    ):
        for i in range(values.shape[1]):
            vertex[f"{prefix}{i}"] = values[:, i]
    for i, name in enumerate("xyz"):
        vertex[name] = columns["means"][:, i]
    vertex["opacity"] = columns["opacities"]
    cameras = np.zeros(2, dtype=[("id", "i4")])
    elements = [plyfile.PlyElement.describe(vertex, "vertex"), plyfile.PlyElement.describe(cameras, "camera")]
    plyfile.PlyData(elements, byte_order=byte_order, comments=["by plyfile"]).write(str(path))


@pytest.mark.parametrize("sh_degree", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "byte_order"), [("f4", "<"), ("f8", "<"), ("f4", ">")])
def test_reads_what_plyfile_writes(sh_degree: int, dtype: str, byte_order: str, tmp_path: Path) -> None:
    columns = random_columns(33, sh_degree)
    write_with_plyfile(tmp_path / "other.ply", columns, dtype=dtype, byte_order=byte_order)
    table = SplatTable.from_ply(tmp_path / "other.ply", capacity=50)
    assert (table.num_rows, table.capacity, table.sh_degree) == (33, 50, sh_degree)
    for name in COLUMNS:
        assert torch.equal(table.named_columns()[name].detach().cpu(), columns[name]), name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    table = SplatTable.from_columns(**random_columns(41))
    path = tmp_path / "a folder" / "my splats.ply"
    path.parent.mkdir()
    table.to_ply(str(path))
    again = SplatTable.from_ply(str(path))
    for a, b in zip(table.columns(), again.columns(), strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())


def test_only_rows_that_are_not_finite_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = random_columns(41)
    columns["opacities"][3] = -30.0  # invisible, but a value like any other
    broken = {"means": 0, "quats": 12, "scales": 13, "opacities": 25, "sh0": 40, "shN": 31}
    for number, (name, row) in enumerate(broken.items()):
        columns[name][row].view(-1)[0] = [float("nan"), float("inf"), -float("inf")][number % 3]
    keep = [row for row in range(41) if row not in broken.values()]
    with caplog.at_level(logging.WARNING, logger="ns_mgpu_splat"):
        assert SplatTable.from_columns(**columns).to_ply(tmp_path / "splats.ply") == 35
    assert "splats.ply: 6 of 41 Gaussians have values that are not finite" in caplog.text
    write_with_plyfile(tmp_path / "other.ply", columns)
    for name in ("splats.ply", "other.ply"):
        table = SplatTable.from_ply(tmp_path / name)
        for column in COLUMNS:
            assert torch.equal(table.named_columns()[column].detach().cpu(), columns[column][keep])
    assert "other.ply: 6 of 41 Gaussians" in caplog.text


def test_writing_replaces_a_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "splats.ply"
    SplatTable.from_columns(**random_columns(5)).to_ply(path)
    before = path.read_bytes()
    table = SplatTable.from_columns(**random_columns(50, seed=1))
    read_rows = table.read_rows
    calls = []

    def failing(begin: int, end: int) -> dict[str, np.ndarray]:
        calls.append(begin)
        if len(calls) > 8:  # in the second walk, the one that writes
            raise RuntimeError("power cut")
        return read_rows(begin, end)

    monkeypatch.setattr(table, "read_rows", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        table.to_ply(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["splats.ply"]
    calls.clear()
    monkeypatch.undo()
    table.to_ply(path)
    assert SplatTable.from_ply(path).num_rows == 50


def test_a_full_disk_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"splats\.ply needs 1[0-9.]+ KiB, but .* has 1\.0 KiB free"):
        SplatTable.from_columns(**random_columns(50)).to_ply(tmp_path / "splats.ply")
    assert not list(tmp_path.iterdir())


def test_bad_files_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.ply"
    SplatTable.from_columns(**random_columns(20)).to_ply(good)
    data = good.read_bytes()

    def bad(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    cases = {
        bad("short.ply", data[:-1]): "short.ply is cut short",
        bad("header.ply", data[:200]): "header.ply is not a .ply file",
        bad("text.ply", data.replace(b"binary_little_endian", b"ascii")): "text.ply is in format ascii",
        bad("empty.ply", b""): "empty.ply is not a .ply file",
        bad("rot.ply", data.replace(b"rot_2", b"rut_2")): "rot.ply has no property 'rot_2'",
        bad("rest.ply", data.replace(b"f_rest_44", b"f_rust_44")): "rest.ply has 44 properties f_rest",
        bad(
            "faces.ply", data.replace(b"element vertex", b"element face")
        ): "faces.ply begins with element 'face'",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            SplatTable.from_ply(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.ply"):
        SplatTable.from_ply(tmp_path / "absent.ply")


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.ply").symlink_to("real.ply")
    SplatTable.from_columns(**random_columns(3)).to_ply(tmp_path / "link.ply")
    assert (tmp_path / "link.ply").is_symlink()
    assert not (tmp_path / "real.ply").is_symlink()
    assert SplatTable.from_ply(tmp_path / "real.ply").num_rows == 3


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    """A rename over /dev/null would break the machine (as root it did): a pipe stands for it here."""
    table = SplatTable.from_columns(**random_columns(3))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="device or a pipe"):
        table.to_ply(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        table.to_ply(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        table.to_ply(tmp_path / "absent" / "splats.ply")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"element vertex 4\n", b"element vertex many\n", "damaged header"),
        (b"element vertex 4\n", b"element vertex\n", "damaged header"),
        (b"format binary_little_endian 1.0\n", b"format\n", "damaged header"),
        (b"property float nx\n", b"property float\n", "damaged header"),
        (b"property float nx\n", b"property float x\n", "'x' twice"),
    ],
)
def test_a_damaged_header_is_named(old: bytes, new: bytes, what: str, tmp_path: Path) -> None:
    file = tmp_path / "splats.ply"
    SplatTable.from_columns(**random_columns(4)).to_ply(file)
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    with pytest.raises(ValueError, match=what) as refused:
        SplatTable.from_ply(file)
    assert str(file) in str(refused.value)


def test_a_comment_does_not_end_the_header(tmp_path: Path) -> None:
    file, columns = tmp_path / "splats.ply", random_columns(4)
    SplatTable.from_columns(**columns).to_ply(file)
    file.write_bytes(
        file.read_bytes().replace(b"element vertex", b"comment before end_header\nelement vertex")
    )
    assert torch.equal(SplatTable.from_ply(file).means.cpu(), columns["means"])
