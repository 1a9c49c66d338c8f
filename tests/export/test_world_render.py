# SPDX-License-Identifier: Apache-2.0
"""A world-frame export, rendered by others, is the picture that we render of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import saved_runs
import torch
import twin
from scipy.spatial.transform import Rotation

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render


def in_front_of_a_camera(rows: int, degree: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows that a camera at the origin, looking along z, sees."""
    columns = saved_runs.random_columns(rows, degree, seed)
    columns["means"] = columns["means"] * torch.tensor([1.2, 0.9, 0.8]) + torch.tensor([0.0, 0.0, 4.0])
    columns["scales"] = columns["scales"] * 0.4 - 1.2
    return columns


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_world_export_projected_and_coloured_by_gsplat_and_blended_by_the_twin_is_our_picture(
    degree: int, mirrored: bool, run_export: Callable[..., str], tmp_path: Path
) -> None:
    """To 1e-3; it holds for splats that gsplat's reference projects (in front of the near plane), and does not for alphas
    that cross 1/255 between float32 and float64, of which this scene has next to none."""
    from gsplat.cuda._torch_impl import (
        _fully_fused_projection,
        _quat_scale_to_covar_preci,
        _spherical_harmonics,
    )

    columns = in_front_of_a_camera(250, degree, 20 + degree)
    turn = Rotation.random(random_state=degree).as_matrix() * (-1 if mirrored else 1)
    shift, scale = np.array([12.0, -3.0, 7.5]), 0.04  # a world 25 times as large
    transform = np.hstack([turn, shift[:, None]])
    config = saved_runs.write_run(tmp_path, columns, transform=transform, scale=scale)
    run_export(config, tmp_path / "world.ply", "--frame", "world")

    width, height, fx, fy, cx, cy = 72, 56, 60.0, 62.0, 37.5, 27.0
    view = np.eye(4)
    view[:3, :3] = Rotation.from_rotvec([0.1, -0.2, 0.05]).as_matrix()
    view[:3, 3] = [0.2, -0.1, 0.3]
    ns_mgpu_splat.init()
    table = SplatTable.from_columns(**columns)
    camera = Camera(torch.from_numpy(view).float(), fx, fy, cx, cy, width, height)
    (ours,) = render(table, camera)

    # the same camera in the world: x_camera = view @ (scale * (turn @ x + shift)), and a picture has no unit of length
    world_view = np.eye(4)
    world_view[:3, :3] = view[:3, :3] @ turn
    world_view[:3, 3] = view[:3, :3] @ shift + view[:3, 3] / scale
    world = {
        name: torch.from_numpy(column) for name, column in saved_runs.read_ply(tmp_path / "world.ply").items()
    }
    viewmats = torch.from_numpy(world_view).float()[None]
    calibration = torch.tensor([[[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]]])
    covariances, _ = _quat_scale_to_covar_preci(world["quats"], world["scales"].exp(), compute_preci=False)
    _, means2d, depths, conics, _ = _fully_fused_projection(
        world["means"], covariances, viewmats, calibration, width, height
    )
    centre = -torch.linalg.solve(viewmats[0, :3, :3], viewmats[0, :3, 3])
    coefficients = torch.cat([world["sh0"][:, None], world["shN"]], 1)
    directions = torch.nn.functional.normalize(world["means"] - centre, dim=-1)
    colors = (_spherical_harmonics(degree, directions, coefficients) + 0.5).clamp_min(0.0)
    opacities = world["opacities"].sigmoid()
    projected = twin.Projected(
        means2d[0].double(), conics[0].double(), opacities.double(), colors.double(), depths[0].double(),
        (depths[0] * scale > twin.NEAR) & (opacities >= twin.ALPHA_MIN),
    )  # fmt: skip
    other = twin.TwinCamera(torch.from_numpy(world_view), fx, fy, cx, cy, width, height)
    rgb, _, accumulation, _ = twin.blend(projected, other, None)
    assert rgb.std() > 0.1, "a picture, not a plain colour"
    assert (ours.rgb.cpu().double() - rgb).abs().max() < 1e-3
    assert (ours.accumulation.cpu().double() - accumulation).abs().max() < 1e-3
