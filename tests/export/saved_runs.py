# SPDX-License-Identifier: Apache-2.0
"""Runs as ns-train leaves them on disk, made of random rows, and readers of what is exported that share no code with it."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import plyfile
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))

COLUMNS = ("means", "quats", "scales", "opacities", "sh0", "shN")
NERFSTUDIO = {"sh0": "features_dc", "shN": "features_rest"}
# a run of nerfstudio 1.1.5's yaml.dump, shortened: objects, tuples, paths
CONFIG = """!!python/object:ns_mgpu_splat.nerfstudio.trainer.MgpuSplatTrainerConfig
_target: !!python/name:ns_mgpu_splat.nerfstudio.trainer.MgpuSplatTrainer ''
data: null
relative_model_dir: !!python/object/apply:pathlib.PosixPath
- {models}
pipeline: !!python/object:ns_mgpu_splat.nerfstudio.pipeline.MgpuSplatPipelineConfig
  model: !!python/object:ns_mgpu_splat.nerfstudio.model.MgpuSplatModelConfig
    background_color: !!python/tuple [0, 1]
    rasterize_mode: {mode}
"""


def random_columns(rows: int, degree: int = 3, seed: int = 0, *, half: bool = False) -> dict[str, Tensor]:
    """Columns of a table in all sizes; quaternions are not normalised."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    sh_n = normal(rows, (degree + 1) ** 2 - 1, 3) * 0.3
    return {
        "means": normal(rows, 3),
        "quats": normal(rows, 4),
        "scales": normal(rows, 3) * 1.5 - 4.0,
        "opacities": normal(rows) * 3.0,
        "sh0": normal(rows, 3) * 0.8,
        "shN": sh_n.half() if half else sh_n,
    }


def write_run(
    folder: Path,
    columns: dict[str, Tensor],
    *,
    transform: np.ndarray | None = None,
    scale: float = 1.0,
    antialiased: bool = False,
) -> Path:
    """A run with these rows in its checkpoint; returns its config.yml."""
    models = folder / "nerfstudio_models"
    models.mkdir(parents=True, exist_ok=True)
    state = {f"_model.gauss_params.{NERFSTUDIO.get(n, n)}": c.clone() for n, c in columns.items()}
    state["_model.gauss_params.opacities"] = state["_model.gauss_params.opacities"].reshape(-1, 1)
    torch.save({"format": 1, "step": 99, "pipeline": state}, models / "step-000000099.ckpt")
    config = folder / "config.yml"
    mode = "antialiased" if antialiased else "classic"
    config.write_text(CONFIG.format(models=models.name, mode=mode))
    if transform is not None:
        saved = {"transform": np.asarray(transform).tolist(), "scale": scale}
        (folder / "dataparser_transforms.json").write_text(json.dumps(saved))
    return config


def read_ply(path: Path) -> dict[str, np.ndarray]:
    """Columns of a 3DGS .ply, read by plyfile and put together as INRIA's load_ply does."""
    vertex = plyfile.PlyData.read(str(path))["vertex"]
    names = [p.name for p in vertex.properties]

    def stack(prefix: str) -> np.ndarray:
        members = sorted((n for n in names if n.startswith(prefix)), key=lambda n: int(n.split("_")[-1]))
        return np.stack([vertex[n] for n in members], 1) if members else np.zeros((vertex.count, 0), "f4")

    return {
        "means": np.stack([vertex[n] for n in "xyz"], 1),
        "quats": stack("rot_"),
        "scales": stack("scale_"),
        "opacities": np.asarray(vertex["opacity"]),
        "sh0": stack("f_dc_"),
        "shN": stack("f_rest_").reshape(vertex.count, 3, -1).transpose(0, 2, 1),
    }


def ply_comments(path: Path) -> list[str]:
    """Comments of a .ply, by plyfile."""
    return plyfile.PlyData.read(str(path)).comments


def read_splat(path: Path) -> dict[str, np.ndarray]:
    """Rows of a .splat, byte by byte as antimatter15's viewer reads them; scales are sizes, opacities 0 to 1."""
    data = path.read_bytes()
    assert len(data) % 32 == 0
    rows = [struct.unpack_from("<6f8B", data, at) for at in range(0, len(data), 32)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 14)
    return {
        "means": table[:, 0:3],
        "sizes": table[:, 3:6],
        "rgb": table[:, 6:9] / 255,
        "alpha": table[:, 9] / 255,
        "quats": (table[:, 10:14] - 128) / 128,
    }


def read_spz(path: Path) -> dict[str, np.ndarray]:
    """Rows of a .spz, version 3, from the description in nianticlabs/spz's README, one number at a time."""
    with gzip.open(path) as file:
        data = file.read()
    magic, version, count, degree, fraction, flags, reserved = struct.unpack_from("<IIIBBBB", data)
    assert (magic, version, reserved) == (0x5053474E, 3, 0)
    at = 16

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        assert at <= len(data)
        return data[at - size : at]

    means = np.array(
        [int.from_bytes(take(3), "little", signed=True) / 2.0**fraction for _ in range(3 * count)]
    ).reshape(-1, 3)
    alpha = np.frombuffer(take(count), "u1") / 255
    sh0 = (np.frombuffer(take(3 * count), "u1").reshape(-1, 3) / 255 - 0.5) / 0.15
    scales = np.frombuffer(take(3 * count), "u1").reshape(-1, 3) / 16 - 10
    quats = np.zeros((count, 4))
    for row in range(count):
        word = int.from_bytes(take(4), "little")
        largest = word >> 30
        for part in reversed([i for i in range(4) if i != largest]):  # the last one is in the lowest bits
            quats[row, part] = (-1 if word >> 9 & 1 else 1) * (word & 511) / 511 * 0.5**0.5
            word >>= 10
        quats[row, largest] = (1 - (quats[row] ** 2).sum()) ** 0.5
    number = (degree + 1) ** 2 - 1
    sh_n = (np.frombuffer(take(3 * number * count), "u1").reshape(count, number, 3) - 128.0) / 128
    assert at == len(data), "nothing lies behind the last plane"
    return {
        "means": means, "alpha": alpha, "sh0": sh0, "scales": scales, "quats": quats[:, [3, 0, 1, 2]], "shN": sh_n,
        "fraction": np.array(fraction), "flags": np.array(flags),
    }  # fmt: skip
