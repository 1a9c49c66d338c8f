# SPDX-License-Identifier: Apache-2.0
"""Scenes and cameras for the tests of the splat operators, and their counterparts for the float64 twin."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))

import twin

COLUMNS = ("means", "quats", "scales", "opacities", "sh0", "shN")
DATA = Path(os.environ.get("MGPU_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
GARDEN = DATA / "garden" / "test_garden.npz"


def mesh_of(shards: int) -> str:
    """MGPU_DEVICES for a process of its own: so many shards of the kind that this process runs on."""
    on_gpus = torch.mgpu.mesh().shards[0].startswith("cuda")  # type: ignore[attr-defined]
    return ",".join(["0"] * shards) if on_gpus else f"cpu:{shards}"


def run_on_three_shards(test_file: str) -> None:
    """Run a file's tests in a process of their own, on three shards of the host with the locality check."""
    if len(torch.mgpu.mesh().shards) > 1 or not str(torch.mgpu.mesh().shards[0]).startswith("cpu"):  # type: ignore[attr-defined]
        pytest.skip("this is such a process, or the mesh is of GPUs")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test_file],
        env={**os.environ, "MGPU_DEVICES": "cpu:3", "MGPU_CHECK_LOCALITY": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def check_equal_on_meshes(
    result: dict[str, np.ndarray], reference: dict[str, np.ndarray], shards: int
) -> None:
    """What one mesh gave against another: gradients ("grad...") within 1e-4 of the largest, all else bit-equal."""
    for name, value in result.items():
        if name.startswith("grad"):
            assert np.abs(value - reference[name]).max() <= 1e-4 * np.abs(reference[name]).max(), (
                shards,
                name,
            )
        else:
            assert np.array_equal(value, reference[name]), (shards, name)


def random_columns(rows: int, seed: int, *, degree: int = 3, spread: float = 1.0) -> dict[str, Tensor]:
    """Gaussians in front of a camera at the origin that looks along z: some small, some large, some out of sight."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "means": normal(rows, 3) * torch.tensor([1.5, 1.0, 1.0]) * spread + torch.tensor([0.0, 0.0, 4.0]),
        "quats": normal(rows, 4),
        "scales": normal(rows, 3) * 0.5 - 2.0,
        "opacities": normal(rows) * 2.0,
        "sh0": normal(rows, 3) * 0.5,
        "shN": normal(rows, (degree + 1) ** 2 - 1, 3) * 0.3,
    }


def random_viewmat(seed: int) -> Tensor:
    """A small rotation and shift."""
    g = torch.Generator().manual_seed(1000 + seed)
    x, y, z = (torch.randn(3, generator=g) * 0.2).tolist()
    viewmat = torch.eye(4)
    viewmat[:3, :3] = torch.linalg.matrix_exp(torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]))
    viewmat[:3, 3] = torch.randn(3, generator=g) * 0.3
    return viewmat


def random_twin_camera(seed: int, width: int, height: int) -> twin.TwinCamera:
    """Off-centre principal point, unlike focal lengths; viewmat in float32."""
    view = random_viewmat(seed)
    return twin.TwinCamera(view, 0.8 * width, 0.85 * width, width / 2 + 1.3, height / 2 - 2.1, width, height)


def camera_of(camera: twin.TwinCamera, viewmat: Tensor | None = None):
    """The production camera of a twin's camera."""
    from ns_mgpu_splat import Camera

    view = camera.viewmat.float() if viewmat is None else viewmat
    fields = {name: value for name, value in vars(camera).items() if name != "viewmat"}
    return Camera(view, **fields)


def in_double(camera: twin.TwinCamera, *, requires_grad: bool = False) -> twin.TwinCamera:
    """The same camera with a float64 viewmat of its own."""
    view = camera.viewmat.detach().double().clone().requires_grad_(requires_grad)
    return replace(camera, viewmat=view)


def table_of(columns: dict[str, Tensor], *, requires_grad: bool = True):
    """A splat table with these columns."""
    from ns_mgpu_splat import SplatTable

    table = SplatTable.from_columns(**columns)
    table.requires_grad_(requires_grad)
    return table


def double_columns(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float64 leaves of the same values."""
    return {name: column.double().requires_grad_() for name, column in columns.items()}


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference|; 0 if both are zero or empty."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    difference = (value - reference).norm()
    return 0.0 if difference == 0 else (difference / reference.norm().clamp_min(1e-30)).item()


def assert_image_close(image: Tensor, reference: Tensor, scale: float = 1.0) -> None:
    """design.md's agreement: 99.9 % of pixels within 1e-4, the rest within 2/255 (an alpha that crosses a threshold)."""
    error = (image.detach().cpu().double() - reference.detach()).abs().amax(-1) / scale
    assert error.max().item() <= 2 / 255
    assert (error > 1e-4).double().mean().item() <= 1e-3


def image_weights(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Random weights that make a scalar loss of images."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def garden(*, higher_bands: float = 0.02) -> tuple[dict[str, Tensor], Tensor, Tensor, int, int]:
    """gsplat's garden benchmark as its `_helper.load_test_data` makes it (seed 0), with random higher SH bands.

    Returns columns, viewmats (3, 4, 4), Ks (3, 3, 3), width, height. Skips the test where the file is absent.
    """
    if not GARDEN.is_file():
        pytest.skip(f"{GARDEN} is absent; set MGPU_TEST_DATA to a folder with garden/test_garden.npz")
    data = np.load(GARDEN)
    means = torch.from_numpy(data["means3d"]).float()
    colors = torch.from_numpy(data["colors"] / 255.0).float()
    inside = ((means >= -2) & (means <= 2)).all(-1)
    means, colors = means[inside], colors[inside]
    g = torch.Generator().manual_seed(0)
    rows = len(means)
    columns = {
        "means": means,
        "scales": (torch.rand((rows, 3), generator=g) * 0.02).clamp_min(1e-6).log(),
        "quats": torch.nn.functional.normalize(torch.randn((rows, 4), generator=g), dim=-1),
        "opacities": torch.logit(torch.rand((rows,), generator=g), eps=1e-6),
        "sh0": (colors - 0.5) / 0.28209479177387814,
        "shN": torch.randn((rows, 15, 3), generator=g) * higher_bands,
    }
    viewmats, calibration = torch.from_numpy(data["viewmats"]).float(), torch.from_numpy(data["Ks"]).float()
    return columns, viewmats, calibration, data["width"].item(), data["height"].item()
