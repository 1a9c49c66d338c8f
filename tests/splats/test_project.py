# SPDX-License-Identifier: Apache-2.0
"""Stage "project": means, conics, opacities, colours and depths of the visible rows, and their gradients.

Oracles: the float64 twin, and gsplat 1.4's own PyTorch reference on its garden data.
"""

from __future__ import annotations

import pytest
import splat_scenes as scenes
import torch
import twin

from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.splats import project
from ns_mgpu_splat.splats.project import Records

FIELDS = ("means2d", "conics", "opacities", "colors", "depths")


def reach_of(p: twin.Projected, camera: twin.TwinCamera) -> torch.Tensor:
    """The largest alpha of each Gaussian over the image's pixel centres, float64."""
    ys, xs = torch.meshgrid(
        torch.arange(camera.height) + 0.5, torch.arange(camera.width) + 0.5, indexing="ij"
    )
    dx = xs.reshape(-1, 1).double() - p.means2d[:, 0]
    dy = ys.reshape(-1, 1).double() - p.means2d[:, 1]
    a, b, c = p.conics.unbind(-1)
    alpha = p.opacities * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)
    return torch.where(p.visible, alpha.amax(0), torch.zeros_like(p.opacities))


def check_against_twin(
    records: Records,
    table: SplatTable,
    viewmat: torch.Tensor,
    columns: dict[str, torch.Tensor],
    camera: twin.TwinCamera,
    *,
    antialias: bool,
    degree: int,
) -> twin.Projected:
    """Records hold all rows that reach 1/255, with the twin's values and gradients; returns the twin's rows."""
    double, camera64 = scenes.double_columns(columns), scenes.in_double(camera, requires_grad=True)
    truth = twin.project(double, camera64, antialiased=antialias, sh_degree=degree)
    row = records.row.cpu()
    reached = (reach_of(truth, camera) >= 1 / 255).nonzero().flatten()
    assert set(reached.tolist()) <= set(row.tolist())

    loss, truth_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for seed, name in enumerate(FIELDS):
        value, reference = getattr(records, name), getattr(truth, name)[row]
        assert torch.allclose(value.detach().cpu().double(), reference.detach(), rtol=1e-4, atol=1e-4), name
        (weight,) = scenes.image_weights(seed, tuple(reference.shape))
        loss = loss + (value * weight.to(value.device)).sum().cpu()
        truth_loss = truth_loss + (reference * weight).sum()
    loss.backward()
    truth_loss.backward()
    for name, column in table.named_columns().items():
        assert scenes.relative_l2(column.grad, double[name].grad) <= 1e-4, name
    assert scenes.relative_l2(viewmat.grad[:3], camera64.viewmat.grad[:3]) <= 1e-4
    return truth


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("antialias", [False, True])
def test_records_and_gradients_match_the_twin(degree: int, antialias: bool) -> None:
    columns = scenes.random_columns(400, degree, degree=degree)
    camera = scenes.random_twin_camera(degree, 60, 44)
    table = scenes.table_of(columns)
    viewmat = camera.viewmat.clone().requires_grad_()
    records = project(table, scenes.camera_of(camera, viewmat), antialias=antialias)

    row = records.row.cpu()
    assert torch.equal(row, row.sort().values)
    assert len(row) == len(row.unique()) > 100
    check_against_twin(records, table, viewmat, columns, camera, antialias=antialias, degree=degree)
    assert torch.equal(viewmat.grad[3], torch.zeros(4))


def test_garden_projection_matches_gsplat_reference() -> None:
    """means2d, conics and depths to 1e-4, gradients to 1e-3 relative, as gsplat's own tests ask of its kernels."""
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

    columns, viewmats, calibration, width, height = scenes.garden()
    from ns_mgpu_splat import Camera

    table = scenes.table_of(columns)
    viewmat = viewmats[0].clone().requires_grad_()
    records = project(table, Camera.from_K(viewmat, calibration[0], width, height))
    row = records.row.cpu()

    leaves = {name: columns[name].clone().requires_grad_() for name in ("means", "quats", "scales")}
    reference_view = viewmats[:1].clone().requires_grad_()
    covariances, _ = _quat_scale_to_covar_preci(leaves["quats"], leaves["scales"].exp(), compute_preci=False)
    radii, means2d, depths, conics, _ = _fully_fused_projection(
        leaves["means"], covariances, reference_view, calibration[:1], width, height
    )
    # every Gaussian we keep is one that gsplat's 3-sigma box keeps, but for the opaque ones' longer reach (3.33 sigma)
    assert (radii[0][row] > 0).double().mean() > 0.99
    assert len(row) > 60_000

    def assert_close(value: torch.Tensor, reference: torch.Tensor, name: str) -> None:
        error = (value.detach().cpu() - reference.detach()).abs() / reference.detach().abs().clamp_min(1.0)
        assert error.max().item() <= 1e-4, f"{name}: {error.max().item():.2e}"

    assert_close(records.means2d, means2d[0][row], "means2d")
    assert_close(records.conics, conics[0][row], "conics")
    assert_close(records.depths, depths[0][row], "depths")

    w2, wc, wd = scenes.image_weights(5, (len(row), 2), (len(row), 3), (len(row),))
    device = records.means2d.device
    loss = (
        (records.means2d * w2.to(device)).sum()
        + (records.conics * wc.to(device)).sum()
        + (records.depths * wd.to(device)).sum()
    )
    loss.backward()
    ((means2d[0][row] * w2).sum() + (conics[0][row] * wc).sum() + (depths[0][row] * wd).sum()).backward()
    for name, leaf in leaves.items():
        assert scenes.relative_l2(getattr(table, name).grad, leaf.grad) <= 1e-3, name
    assert scenes.relative_l2(viewmat.grad[:3], reference_view.grad[0, :3]) <= 1e-3


@pytest.mark.parametrize("name", ["means", "quats", "scales", "opacities", "sh0", "shN"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_culled(name: str, value: float) -> None:
    columns = scenes.random_columns(50, 3)
    camera = scenes.camera_of(scenes.random_twin_camera(0, 64, 48))
    before = project(scenes.table_of(columns), camera).row.cpu().tolist()
    assert len(before) > 20
    target = before[5]
    columns[name][target] = value
    after = project(scenes.table_of(columns), camera).row.cpu().tolist()
    assert after == [row for row in before if row != target]


def test_rows_behind_the_near_plane_or_without_direction_are_culled() -> None:
    columns = scenes.random_columns(4, 0)
    columns["means"] = torch.tensor([[0, 0, -3.0], [0, 0, 0.009], [0, 0, 4.0], [0, 0, 4.0]])
    columns["opacities"] = torch.full((4,), 3.0)
    columns["quats"][2] = 0.0
    camera = scenes.camera_of(twin.TwinCamera(torch.eye(4), 40.0, 40.0, 32.0, 24.0, 64, 48))
    assert project(scenes.table_of(columns), camera).row.cpu().tolist() == [3]


def test_no_rows_give_no_records() -> None:
    records = project(
        scenes.table_of(scenes.random_columns(0, 0)), scenes.camera_of(scenes.random_twin_camera(0, 20, 20))
    )
    assert records.row.shape == (0,)
    assert records.means2d.shape == (0, 2)
    assert records.conics.shape == (0, 3)
