# SPDX-License-Identifier: Apache-2.0
"""Fisheye and orthographic cameras: projection, gradients, images, culling and training.

Oracles: the float64 twin, whose Jacobians are autograd's of OpenCV's formula; finite differences; `cv2.fisheye`; gsplat
1.4's PyTorch reference (a fisheye without coefficients, ortho); a pinhole, which a fisheye is on its axis; and what
must not change.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import splat_scenes as scenes
import torch
import twin
from test_project import FIELDS, check_against_twin
from test_render import check_on_meshes
from torch import Tensor

from ns_mgpu_splat import Camera, SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats import project
from ns_mgpu_splat.splats.loss import l1_ssim_loss

K = (0.05, -0.01, 0.003, -0.001)
FOLDING = (-0.1, 0.0, 0.0, 0.0)  # at sqrt(1 / 0.3) = 1.826, 104.6 degrees
CASES = {
    "fisheye": ("fisheye", 16.0, (0.0,) * 4),  # 60 pixels: 107 degrees to either side
    "fisheye k1..k4": ("fisheye", 18.0, K),
    "fisheye that folds": ("fisheye", 24.0, FOLDING),
    "long fisheye": ("fisheye", 160.0, K),
    "ortho": ("ortho", 8.0, (0.0,) * 4),
}


def all_round(rows: int, seed: int, *, degree: int = 3) -> dict[str, Tensor]:
    """Gaussians in all directions."""
    columns = scenes.random_columns(rows, seed, degree=degree)
    g = torch.Generator().manual_seed(seed + 50)
    columns["means"] = torch.randn(rows, 3, generator=g) * 3
    columns["scales"] = columns["scales"] - 0.5
    return columns


def twin_camera(case: str, seed: int = 0, width: int = 60, height: int = 44) -> twin.TwinCamera:
    model, focal, distortion = CASES[case]
    camera = scenes.random_twin_camera(seed, width, height)
    scale = width / 60
    return replace(camera, fx=focal * scale, fy=1.05 * focal * scale, model=model, distortion=distortion)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("antialias", [False, True])
def test_records_and_gradients_match_the_twin(case: str, antialias: bool) -> None:
    columns = all_round(600, 3)
    camera = twin_camera(case)
    table = scenes.table_of(columns)
    viewmat = camera.viewmat.clone().requires_grad_()
    records = project(table, scenes.camera_of(camera, viewmat), antialias=antialias)

    row = records.row.cpu()
    assert len(row) == len(row.unique()) > (3 if case == "long fisheye" else 50)
    truth = check_against_twin(records, table, viewmat, columns, camera, antialias=antialias, degree=3)
    assert bool(truth.visible[row].all())


@pytest.mark.any_mesh
@pytest.mark.parametrize("case", CASES)
def test_the_twins_gradients_are_finite_differences(case: str) -> None:
    camera = scenes.in_double(twin_camera(case))
    g = torch.Generator().manual_seed(0)
    points = torch.randn(6, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 1.0, 0.5])
    points[:, 2] += 1.5

    def values(at: Tensor) -> tuple[Tensor, ...]:
        return twin.means_and_jacobians(at, camera)[:3]

    assert torch.autograd.gradcheck(values, points.requires_grad_())


@pytest.mark.parametrize("case", ["fisheye", "fisheye k1..k4", "ortho"])
def test_images_and_gradients_match_the_twin(case: str) -> None:
    columns = all_round(300, 8)
    camera = twin_camera(case, 1)
    table = scenes.table_of(columns)
    viewmat = camera.viewmat.clone().requires_grad_()
    (image,) = render(table, scenes.camera_of(camera, viewmat), background=[0.2, 0.5, 0.9])
    double, camera64 = scenes.double_columns(columns), scenes.in_double(camera, requires_grad=True)
    rgb, depth, accumulation, _ = twin.render(
        double, camera64, background=torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    )
    assert accumulation.max() > 0.5
    scenes.assert_image_close(image.rgb, rgb)
    scenes.assert_image_close(image.accumulation, accumulation)
    solid = accumulation.detach() > 0.05
    w_rgb, w_depth = scenes.image_weights(2, rgb.shape, depth.shape)
    device = image.rgb.device
    ((image.rgb * w_rgb.to(device)).sum() + (image.depth * (w_depth * solid).to(device)).sum()).backward()
    ((rgb * w_rgb).sum() + (depth * w_depth * solid).sum()).backward()
    for name, column in table.named_columns().items():
        assert scenes.relative_l2(column.grad, double[name].grad) <= 1e-3, name
    assert scenes.relative_l2(viewmat.grad[:3], camera64.viewmat.grad[:3]) <= 1e-3


@pytest.mark.parametrize("model", ["fisheye", "ortho"])
def test_projection_is_that_of_gsplats_reference(model: str) -> None:
    """What lies in front of the camera: gsplat sees a fisheye's half space alone, and its depth is z."""
    from gsplat.cuda._torch_impl import _fully_fused_projection, _quat_scale_to_covar_preci

    columns = all_round(800, 5)
    camera = twin_camera(model)
    table = scenes.table_of(columns)
    viewmat = camera.viewmat.clone().requires_grad_()
    records = project(table, scenes.camera_of(camera, viewmat))
    leaves = {name: columns[name].clone().requires_grad_() for name in ("means", "quats", "scales")}
    reference_view = camera.viewmat[None].clone().requires_grad_()
    covariances, _ = _quat_scale_to_covar_preci(leaves["quats"], leaves["scales"].exp(), compute_preci=False)
    calibration = torch.tensor([[[camera.fx, 0, camera.cx], [0, camera.fy, camera.cy], [0, 0, 1]]])
    _, means2d, depths, conics, _ = _fully_fused_projection(
        leaves["means"], covariances, reference_view, calibration, camera.width, camera.height,
        camera_model=model,
    )  # fmt: skip
    row = records.row.cpu()
    front = (depths[0][row] > 0.3).detach()
    assert int(front.sum()) > 50
    assert model == "ortho" or int(front.sum()) < len(row) - 20  # the rest is beyond 90 degrees
    row, front = row[front], front.to(records.means2d.device)
    assert torch.allclose(records.means2d[front].detach().cpu(), means2d[0][row], rtol=1e-4, atol=2e-3)
    assert torch.allclose(records.conics[front].detach().cpu(), conics[0][row], rtol=1e-3, atol=1e-4)
    if model == "ortho":
        assert torch.allclose(records.depths[front].detach().cpu(), depths[0][row], rtol=1e-5)
    w2, wc = scenes.image_weights(5, (len(row), 2), (len(row), 3))
    device = records.means2d.device
    (
        (records.means2d[front] * w2.to(device)).sum() + (records.conics[front] * wc.to(device)).sum()
    ).backward()
    ((means2d[0][row] * w2).sum() + (conics[0][row] * wc).sum()).backward()
    for name, leaf in leaves.items():
        assert scenes.relative_l2(getattr(table, name).grad, leaf.grad) <= 2e-3, name
    assert scenes.relative_l2(viewmat.grad[:3], reference_view.grad[0, :3]) <= 2e-3


def test_a_fisheye_with_coefficients_is_opencvs() -> None:
    """Pixels, and conics from OpenCV's own derivatives by the point."""
    import cv2

    g = torch.Generator().manual_seed(4)
    rows, fx, fy, cx, cy = 400, 50.0, 52.0, 81.0, 58.0
    columns = scenes.random_columns(rows, 2, degree=0)
    columns["means"] = torch.randn(rows, 3, generator=g) * torch.tensor([2.0, 2.0, 1.0])
    columns["means"][:, 2] = columns["means"][:, 2].abs() + 0.2
    columns["scales"] -= 1.0
    camera = Camera(torch.eye(4), fx, fy, cx + 0.5, cy + 0.5, 160, 120, "fisheye", K)
    records = project(scenes.table_of(columns), camera)
    row = records.row.cpu()
    assert len(row) > 200
    points = columns["means"][row].double().numpy().reshape(-1, 1, 3)
    matrix = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])
    pixels, by_parameter = cv2.fisheye.projectPoints(points, np.zeros(3), np.zeros(3), matrix, np.array(K))
    assert np.abs(records.means2d.detach().cpu().numpy() - 0.5 - pixels[:, 0]).max() < 2e-4
    jacobian = torch.from_numpy(np.asarray(by_parameter)[:, 11:14].reshape(-1, 2, 3))  # by the translation
    half = twin.rotation(columns["quats"][row].double()) * columns["scales"][row].double().exp()[:, None, :]
    spread = jacobian @ half
    covariance = spread @ spread.transpose(1, 2) + 0.3 * torch.eye(2, dtype=torch.float64)
    inverse = torch.linalg.inv(covariance)
    conics = torch.stack([inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], -1)
    assert torch.allclose(records.conics.detach().cpu().double(), conics, rtol=1e-3, atol=1e-5)


def one_at(means: list[list[float]]) -> dict[str, Tensor]:
    columns = scenes.random_columns(len(means), 1, degree=1)
    columns["means"] = torch.tensor(means)
    columns["opacities"] = torch.full((len(means),), 2.0)
    columns["scales"] = columns["scales"] - 1.0
    return columns


def towards(degrees: float, distance: float = 2.0) -> list[float]:
    """To the right of the axis."""
    angle = math.radians(degrees)
    return [distance * math.sin(angle), 0.0, distance * math.cos(angle)]


def test_a_fisheye_sees_beside_and_behind_itself() -> None:
    camera = Camera(torch.eye(4), 30.0, 30.0, 100.0, 100.0, 200, 200, "fisheye")
    seen = [40.0, 90.0, 120.0, 169.0]
    columns = one_at([towards(d) for d in [*seen, 171.0, 180.0]] + [[0, 0, 0.0], [0.0, 0, 0.009]])
    records = project(scenes.table_of(columns), camera)
    assert records.row.cpu().tolist() == [0, 1, 2, 3]
    expected = torch.tensor([[100 + 30 * math.radians(d), 100.0] for d in seen])
    assert torch.allclose(records.means2d.detach().cpu(), expected, atol=1e-3)
    assert torch.allclose(records.depths.detach().cpu(), torch.full((4,), 2.0))


def test_nothing_is_seen_where_a_fisheye_folds() -> None:
    """At 110 degrees the polynomial comes back: its radius is that of 99 degrees, where other things are."""
    camera = Camera(torch.eye(4), 30.0, 30.0, 100.0, 100.0, 200, 200, "fisheye", FOLDING)
    records = project(scenes.table_of(one_at([towards(d) for d in (99.0, 104.0, 105.0, 110.0)])), camera)
    assert records.row.cpu().tolist() == [0, 1]


@pytest.mark.parametrize("offset", [0.0, 1e-6, 3e-3])
def test_a_fisheye_is_a_pinhole_on_its_axis(offset: float) -> None:
    """Values and gradients: the two projections differ from the second order on."""
    columns = one_at([[offset, -offset, 3.0]])
    grads = []
    for model in ("pinhole", "fisheye"):
        table = scenes.table_of(columns)
        viewmat = torch.eye(4, requires_grad=True)
        distortion = K if model == "fisheye" else (0.0,) * 4
        records = project(table, Camera(viewmat, 50.0, 60.0, 31.0, 22.0, 64, 48, model, distortion))
        assert torch.allclose(
            records.means2d.detach().cpu(),
            torch.tensor([[31 + 50 * offset / 3, 22 - 60 * offset / 3]]),
            atol=1e-4,
        )
        parts = [records.means2d, records.conics, records.depths[:, None]]
        weights = scenes.image_weights(3, *(tuple(p.shape) for p in parts))
        sum((p * w.to(p.device)).sum() for p, w in zip(parts, weights, strict=True)).backward()
        grads.append([getattr(table, n).grad.cpu() for n in ("means", "quats", "scales")] + [viewmat.grad])
    for mine, pinholes in zip(grads[1], grads[0], strict=True):
        assert torch.isfinite(mine).all()
        assert scenes.relative_l2(mine, pinholes) <= 1e-3 + offset


def test_ortho_does_not_change_along_its_axis() -> None:
    """Neither places nor colours, whatever the bands: all is seen along one direction."""
    columns = all_round(300, 4)
    columns["means"][:, 2] += 12.0
    table = scenes.table_of(columns, requires_grad=False)
    images = []
    for back in (0.0, 50.0):
        viewmat = torch.eye(4)
        viewmat[2, 3] = back
        images.append(render(table, Camera(viewmat, 9.0, 9.0, 30.0, 22.0, 60, 44, "ortho"))[0])
    assert images[0].accumulation.max() > 0.5
    assert (images[0].rgb - images[1].rgb).abs().max().item() < 1e-4
    solid = images[0].accumulation > 0.05
    assert ((images[1].depth - images[0].depth - 50).abs() * solid).max().item() < 1e-2


@pytest.mark.parametrize("case", ["fisheye k1..k4", "fisheye that folds", "ortho"])
def test_cells_leave_no_record_out(case: str) -> None:
    columns = all_round(6000, 6)
    columns["scales"] -= 1.5
    camera = scenes.camera_of(twin_camera(case, 2))
    table = SplatTable.from_columns(**columns)
    table.reorder()
    table.cells.least_rows = 0
    table.cells.enabled = False
    plain = project(table, camera)
    table.cells.enabled = True
    for _ in range(3):  # cells are made once a table rests
        culled = project(table, camera)
    assert table.cells.built > 0
    assert len(plain.row) > 300
    for name in ("row", *FIELDS):
        assert torch.equal(getattr(plain, name).cpu(), getattr(culled, name).cpu()), name


MESH_SCENE = """
from test_cameras import all_round, twin_camera
columns = all_round(3000, 5)
views = [twin_camera("fisheye k1..k4", 0, 130, 90), twin_camera("ortho", 1), scenes.random_twin_camera(2, 64, 48)]
"""


@pytest.mark.any_mesh
def test_images_of_mixed_models_are_bit_equal_on_any_mesh(tmp_path: Path) -> None:
    reference = check_on_meshes(MESH_SCENE, tmp_path)
    assert all(reference[f"accumulation{i}"].max() > 0.5 for i in range(3))


LRS = {"means": 1e-2, "quats": 5e-3, "scales": 1e-2, "opacities": 5e-2, "sh0": 1e-2, "shN": 1e-3}


@pytest.mark.parametrize("cases", [["fisheye k1..k4"], ["ortho"], ["ortho", "fisheye", None]])
def test_a_step_takes_the_gradients_of_autograd(cases: list[str | None]) -> None:
    """Adam's first moments after one step from zero are (1 - beta1) times the gradient."""
    columns = all_round(500, 9)
    views = [
        scenes.random_twin_camera(i, 64, 48) if case is None else twin_camera(case, i)
        for i, case in enumerate(cases)
    ]
    cameras = [scenes.camera_of(view) for view in views]
    g = torch.Generator().manual_seed(1)
    targets = [
        torch.randint(0, 256, (c.height, c.width, 3), generator=g, dtype=torch.uint8).to("mgpu")
        for c in cameras
    ]
    table = scenes.table_of(columns)
    losses = [
        l1_ssim_loss(image.rgb, target) for image, target in zip(render(table, cameras), targets, strict=True)
    ]
    torch.stack(losses).mean().backward()
    stepped = scenes.table_of(columns)
    adam = SplatAdam(stepped, LRS, seed=3)
    train_step(stepped, adam, cameras, targets)
    for (name, column), moment in zip(table.named_columns().items(), adam.state()[:6], strict=True):
        assert column.grad.abs().max() > 0, name
        assert scenes.relative_l2(moment.reshape(column.shape) * 10, column.grad) <= 1e-3, name


def psnr(image: Tensor, target: Tensor) -> float:
    return -10 * math.log10((image.detach().clamp(0, 1) - target).square().mean().item())


@pytest.mark.parametrize("case", ["fisheye k1..k4", "ortho"])
def test_training_on_a_capture_of_such_cameras_finds_the_scene(case: str) -> None:
    """Eight pictures of a scene: from a blurred start, both they and a ninth picture come closer."""
    truth = all_round(800, 12, degree=0)
    truth["opacities"] = truth["opacities"].abs() + 1
    views = [scenes.camera_of(twin_camera(case, seed, 90, 66)) for seed in range(9)]
    pictures = [
        image.rgb.detach().clamp(0, 1) for image in render(scenes.table_of(truth, requires_grad=False), views)
    ]
    start = {name: column.clone() for name, column in truth.items()}
    g = torch.Generator().manual_seed(2)
    start["means"] += 0.05 * torch.randn(start["means"].shape, generator=g)
    start["sh0"] = torch.zeros_like(start["sh0"])
    start["scales"] += 0.3
    table = scenes.table_of(start)
    adam = SplatAdam(table, LRS, seed=3)

    def held_out() -> float:
        (image,) = render(table, views[8], optimizer=adam)
        return psnr(image.rgb, pictures[8])

    with torch.no_grad():
        before = held_out()
    for step in range(120):
        i = step % 8
        train_step(table, adam, [views[i]], [pictures[i].contiguous()])
    with torch.no_grad():
        after = held_out()
    assert after > before + 5, (before, after)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "equirectangular"}, "pinhole, fisheye, ortho"),
        ({"model": "fisheye", "distortion": (0.1, 0.2)}, "4 numbers"),
        ({"model": "fisheye", "distortion": (0.1, 0.2, float("nan"), 0.0)}, "finite"),
        ({"model": "pinhole", "distortion": (0.1, 0.0, 0.0, 0.0)}, "Undistort"),
    ],
)
def test_impossible_cameras_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Camera(torch.eye(4), 10.0, 10.0, 5.0, 5.0, 10, 10, **fields)  # type: ignore[arg-type]
