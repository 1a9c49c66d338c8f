# SPDX-License-Identifier: Apache-2.0
"""render(): images and gradients of everything against the float64 twin; meshes; empty and bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import splat_scenes as scenes
import torch
import twin

from ns_mgpu_splat import Camera, render

SIZES = [(70, 45), (33, 50), (9, 8)]


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("cameras", [1, 3])
@pytest.mark.parametrize(("antialiased", "with_background"), [(False, True), (True, False)])
def test_images_and_gradients_match_the_twin(
    degree: int, cameras: int, antialiased: bool, with_background: bool
) -> None:
    columns = scenes.random_columns(300, 10 * degree + cameras, degree=degree)
    views = [scenes.random_twin_camera(10 * degree + i, *SIZES[i]) for i in range(cameras)]
    background = torch.tensor([0.2, 0.5, 0.9]) if with_background else None
    table = scenes.table_of(columns)
    viewmats = [view.viewmat.clone().requires_grad_() for view in views]
    images = render(
        table,
        [scenes.camera_of(view, viewmat) for view, viewmat in zip(views, viewmats, strict=True)],
        background=background,
        antialiased=antialiased,
    )
    double = scenes.double_columns(columns)
    views64 = [scenes.in_double(view, requires_grad=True) for view in views]
    loss, truth_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for i, (image, view) in enumerate(zip(images, views64, strict=True)):
        rgb, depth, accumulation, _ = twin.render(
            double,
            view,
            background=None if background is None else background.double(),
            antialiased=antialiased,
            sh_degree=degree,
        )
        assert image.rgb.device.type == "mgpu"
        scenes.assert_image_close(image.rgb, rgb)
        scenes.assert_image_close(image.accumulation, accumulation)
        solid = accumulation.detach() > 0.05  # elsewhere depth is a quotient of two small numbers
        error = ((image.depth.detach().cpu() - depth.detach()).abs() * solid).double()
        assert (error > 1e-3).double().mean().item() <= 1e-3

        weights = scenes.image_weights(i, rgb.shape, accumulation.shape, depth.shape)
        solid_weight = weights[2] * solid
        device = image.rgb.device
        loss = loss + sum(
            (part * w.to(device)).sum().cpu()
            for part, w in (
                (image.rgb, weights[0]),
                (image.accumulation, weights[1]),
                (image.depth, solid_weight),
            )
        )
        truth_loss = (
            truth_loss
            + (rgb * weights[0]).sum()
            + (accumulation * weights[1]).sum()
            + (depth * solid_weight).sum()
        )
    loss.backward()
    truth_loss.backward()
    for name, column in table.named_columns().items():
        assert column.grad.device.type == "mgpu"
        assert scenes.relative_l2(column.grad, double[name].grad) <= 1e-3, name
    for viewmat, view in zip(viewmats, views64, strict=True):
        assert scenes.relative_l2(viewmat.grad[:3], view.viewmat.grad[:3]) <= 1e-3


@pytest.mark.usefixtures("deterministic")
def test_viewmat_on_mgpu_gets_the_gradient_of_one_on_the_cpu() -> None:
    table = scenes.table_of(scenes.random_columns(100, 0), requires_grad=False)
    view = scenes.random_twin_camera(0, 40, 30)
    grads = []
    for device in ("cpu", "mgpu"):
        viewmat = view.viewmat.to(device).detach().clone().requires_grad_()
        (image,) = render(table, scenes.camera_of(view, viewmat))
        image.rgb.square().sum().backward()
        assert viewmat.grad.device.type == device
        grads.append(viewmat.grad.cpu())
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)


def test_background_may_require_grad() -> None:
    table = scenes.table_of(scenes.random_columns(100, 0))
    camera = scenes.camera_of(scenes.random_twin_camera(0, 40, 30))
    background = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    (image,) = render(table, camera, background=background)
    (plain,) = render(table, camera, background=background.detach())
    assert torch.allclose(image.rgb.cpu(), plain.rgb.cpu(), atol=1e-6)
    image.rgb.sum().backward()
    left = (1 - plain.accumulation.detach().cpu()).sum()
    assert torch.allclose(background.grad, left.expand(3), rtol=1e-4)


MESH_SCENE = """
columns = scenes.random_columns(3000, 5)
views = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(130, 90), (64, 48), (5, 40)])]
"""
RENDER_START = """
import sys
import numpy as np
import splat_scenes as scenes
from ns_mgpu_splat import render
"""
RENDER_SCENE = """
columns["means"][1000:2000] = columns["means"][:1000]  # equal depths in rows of different shards
table = scenes.table_of(columns)
viewmats = [view.viewmat.clone().requires_grad_() for view in views]
images = render(table, [scenes.camera_of(v, m) for v, m in zip(views, viewmats)], background=[0.1, 0.2, 0.3])
loss = 0
out = {}
for i, image in enumerate(images):
    out[f"rgb{i}"] = image.rgb.detach().cpu().numpy()
    out[f"depth{i}"] = image.depth.detach().cpu().numpy()
    out[f"accumulation{i}"] = image.accumulation.detach().cpu().numpy()
    (w,) = scenes.image_weights(i, tuple(image.rgb.shape))
    loss = loss + (image.rgb * w.to(image.rgb.device)).sum() + image.depth.sum()
loss.backward()
for name, column in table.named_columns().items():
    out[f"grad_{name}"] = column.grad.cpu().numpy()
for i, viewmat in enumerate(viewmats):
    out[f"grad_viewmat{i}"] = viewmat.grad.numpy()
np.savez(sys.argv[1], **out)
"""


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the tests' helpers on its path."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def check_on_meshes(scene: str, folder: Path) -> dict[str, np.ndarray]:
    """Images of 1, 3 and 4 shards are bit-equal and gradients agree; `scene` makes `columns` and `views`. Returns one shard's."""
    script = RENDER_START + scene + RENDER_SCENE
    results = {}
    for shards in (1, 3, 4):
        file = folder / f"{shards}.npz"
        done = run_script(script, str(file), MGPU_DEVICES=scenes.mesh_of(shards))
        assert done.returncode == 0, done.stderr
        results[shards] = dict(np.load(file))
    reference = results.pop(1)
    for shards, result in results.items():
        scenes.check_equal_on_meshes(result, reference, shards)
    return reference


@pytest.mark.any_mesh
def test_images_are_bit_equal_on_any_mesh_and_gradients_agree(tmp_path: Path) -> None:
    assert check_on_meshes(MESH_SCENE, tmp_path)["accumulation0"].max() > 0.5


@pytest.mark.usefixtures("deterministic")
def test_two_runs_give_bit_equal_gradients() -> None:
    """Under deterministic algorithms sums are in list order, on GPUs too; the host has no other way."""
    columns = scenes.random_columns(2000, 9)
    camera = scenes.camera_of(scenes.random_twin_camera(0, 90, 70))
    grads = []
    for _ in range(2):
        table = scenes.table_of(columns)
        render(table, camera)[0].rgb.square().sum().backward()
        grads.append([column.grad.cpu() for column in table.columns()])
    assert all(torch.equal(first, second) for first, second in zip(*grads, strict=True))


def test_hidden_rows_leave_image_bit_equal() -> None:
    columns = scenes.random_columns(200, 6)
    camera = scenes.camera_of(scenes.random_twin_camera(6, 60, 40))
    (before,) = render(scenes.table_of(columns, requires_grad=False), camera)
    hidden = scenes.random_columns(200, 7)
    hidden["means"][:50, 2] = -5.0  # behind
    hidden["means"][50:100, 0] = 1e4  # beside
    hidden["opacities"][100:150] = -20.0  # transparent
    hidden["means"][150:170] = float("nan")
    hidden["scales"][170:180] = float("inf")
    hidden["shN"][180:190] = float("nan")
    hidden["quats"][190:200] = float("nan")
    order = torch.stack([torch.arange(200), torch.arange(200, 400)], 1).flatten()  # alternating, in order
    mixed = {name: torch.cat([columns[name], hidden[name]])[order] for name in columns}
    table = scenes.table_of(mixed)
    (after,) = render(table, camera)
    for part in ("rgb", "depth", "accumulation"):
        assert torch.equal(getattr(before, part).cpu(), getattr(after, part).detach().cpu())
    after.rgb.sum().backward()
    for name, column in table.named_columns().items():
        assert torch.isfinite(column.grad.cpu()).all(), name
        assert not column.grad.cpu()[1::2].any(), name


def test_no_rows_give_the_background_and_a_graph() -> None:
    table = scenes.table_of(scenes.random_columns(0, 0))
    (image,) = render(
        table, scenes.camera_of(scenes.random_twin_camera(0, 20, 10)), background=[0.1, 0.2, 0.3]
    )
    assert torch.allclose(image.rgb.detach().cpu(), torch.tensor([0.1, 0.2, 0.3]).expand(10, 20, 3))
    assert not image.accumulation.detach().cpu().any()
    image.rgb.sum().backward()
    assert table.means.grad.shape == (0, 3)


def test_nothing_visible_gives_zero_gradients() -> None:
    columns = scenes.random_columns(20, 0)
    columns["means"][:, 2] = -4.0
    table = scenes.table_of(columns)
    view = scenes.random_twin_camera(0, 20, 10)
    viewmat = torch.eye(4, requires_grad=True)
    (image,) = render(table, scenes.camera_of(view, viewmat))
    assert not image.rgb.detach().cpu().any()
    assert not image.depth.detach().cpu().any()
    (image.rgb.sum() + image.depth.sum()).backward()
    assert not torch.stack([column.grad.cpu().abs().sum() for column in table.columns()]).any()
    assert not viewmat.grad.any()


@pytest.mark.sanitize
@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows_than_shards(rows: int) -> None:
    columns = scenes.random_columns(rows, 0)
    columns["means"] = torch.tensor([[0.0, 0.0, 3.0], [0.1, 0.0, 4.0]])[:rows]
    columns["opacities"] = torch.full((rows,), 2.0)
    view = twin.TwinCamera(torch.eye(4), 40.0, 40.0, 16.0, 12.0, 32, 24)
    (image,) = render(scenes.table_of(columns), scenes.camera_of(view))
    rgb, _, _, _ = twin.render({k: v.double() for k, v in columns.items()}, scenes.in_double(view))
    assert rgb.max() > 0.1
    scenes.assert_image_close(image.rgb, rgb)


@pytest.mark.sanitize
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (17, 1)])
def test_images_smaller_than_a_tile(size: tuple[int, int]) -> None:
    columns = scenes.random_columns(100, 1)
    view = scenes.random_twin_camera(1, *size)
    (image,) = render(scenes.table_of(columns), scenes.camera_of(view))
    rgb, _, _, _ = twin.render({k: v.double() for k, v in columns.items()}, scenes.in_double(view))
    assert image.rgb.shape == (size[1], size[0], 3)
    scenes.assert_image_close(image.rgb, rgb)


def test_a_large_image_shows_what_its_crop_shows() -> None:
    """4096x3000 against the same camera with a shifted principal point and a small image, bit by bit."""
    columns = scenes.random_columns(200, 3)
    columns["means"][:, 0] += 1.0
    table = scenes.table_of(columns, requires_grad=False)
    large = Camera(torch.eye(4), 1500.0, 1500.0, 2048.0, 1500.0, 4096, 3000)
    (image,) = render(table, large)
    assert image.rgb.shape == (3000, 4096, 3)
    view = twin.TwinCamera(torch.eye(4), 1500.0, 1500.0, 2048.0 - 2400, 1500.0 - 1400, 40, 30)
    # the clamp of the Jacobian depends on the image, so compare where it does not act: take the large one's clamp
    rgb = crop_of_twin(columns, large, view, 2400, 1400)
    scenes.assert_image_close(image.rgb[1400:1430, 2400:2440], rgb)


def crop_of_twin(
    columns: dict[str, torch.Tensor], large: Camera, crop: twin.TwinCamera, left: int, top: int
) -> torch.Tensor:
    """The twin's projection with the large camera, blended over the crop's pixels only."""
    double = {name: column.double() for name, column in columns.items()}
    eye = twin.TwinCamera(
        torch.eye(4).double(), large.fx, large.fy, large.cx, large.cy, large.width, large.height
    )
    projected = twin.project(double, eye, antialiased=False, sh_degree=3)
    projected.means2d = projected.means2d - torch.tensor([left, top], dtype=torch.float64)
    return twin.blend(projected, crop, None)[0]


def test_a_splat_that_covers_everything_and_one_that_touches_the_camera() -> None:
    columns = scenes.random_columns(3, 0)
    columns["means"] = torch.tensor([[0.0, 0.0, 2.0], [0.3, 0.1, 0.011], [0.0, 0.0, 5.0]])
    columns["scales"] = torch.tensor([[4.0, 4.0, 4.0], [-1.0, -6.0, -1.0], [0.0, 0.0, 0.0]])
    columns["opacities"] = torch.full((3,), 1.0)
    table = scenes.table_of(columns)
    (image,) = render(table, scenes.camera_of(scenes.random_twin_camera(0, 100, 80), torch.eye(4)))
    assert torch.isfinite(image.rgb.detach().cpu()).all()
    assert image.accumulation.detach().cpu().min() > 0.5
    image.rgb.sum().backward()
    assert all(torch.isfinite(column.grad.cpu()).all() for column in table.columns())


@pytest.mark.usefixtures("deterministic")
def test_backward_twice_with_retained_graph_gives_twice_the_gradient() -> None:
    table = scenes.table_of(scenes.random_columns(100, 0))
    (image,) = render(table, scenes.camera_of(scenes.random_twin_camera(0, 40, 30)))
    loss = image.rgb.sum()
    loss.backward(retain_graph=True)
    once = table.means.grad.cpu().clone()
    loss.backward()
    assert torch.allclose(table.means.grad.cpu(), 2 * once)


def test_only_columns_that_want_a_gradient_get_one() -> None:
    table = scenes.table_of(scenes.random_columns(100, 0), requires_grad=False)
    table.sh0.requires_grad_(True)
    (image,) = render(table, scenes.camera_of(scenes.random_twin_camera(0, 40, 30)))
    image.rgb.sum().backward()
    assert table.sh0.grad is not None
    assert table.means.grad is None
    with torch.no_grad():
        assert not render(table, scenes.camera_of(scenes.random_twin_camera(0, 40, 30)))[0].rgb.requires_grad


def test_renders_from_several_threads_agree() -> None:
    table = scenes.table_of(scenes.random_columns(500, 0), requires_grad=False)
    cameras = [scenes.camera_of(scenes.random_twin_camera(i, 60, 50)) for i in range(4)]
    alone = [render(table, camera)[0].rgb.cpu() for camera in cameras]
    together: list[torch.Tensor | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            together[i] = render(table, cameras[i])[0].rgb.cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(first, second) for first, second in zip(alone, together, strict=True))


def test_optimizer_mode_leaves_gradients_pending() -> None:
    from ns_mgpu_splat.splats.optimizer import SplatAdam

    table = scenes.table_of(scenes.random_columns(100, 0))
    optimizer = SplatAdam(table, {"means": 1e-3})
    view = scenes.random_twin_camera(0, 40, 30)
    viewmat = view.viewmat.clone().requires_grad_()
    (image,) = render(table, scenes.camera_of(view, viewmat), optimizer=optimizer)
    loss = image.rgb.sum()
    loss.backward(retain_graph=True)
    assert len(optimizer.pending) == 1
    assert table.means.grad is None
    assert viewmat.grad.abs().max() > 0
    with pytest.raises(RuntimeError, match=r"already walked back into optimizer\.pending"):
        loss.backward()
    (plain,) = render(scenes.table_of(scenes.random_columns(100, 0)), scenes.camera_of(view, viewmat))
    assert torch.equal(plain.rgb.detach().cpu(), image.rgb.detach().cpu())


def test_bad_arguments_are_named() -> None:
    table = scenes.table_of(scenes.random_columns(10, 0))
    camera = scenes.camera_of(scenes.random_twin_camera(0, 20, 20))
    with pytest.raises(ValueError, match=r"background is \[4\], expected \[3\]"):
        render(table, camera, background=torch.zeros(4))
    with pytest.raises(ValueError, match=r"cameras\[1\] is a str"):
        render(table, [camera, "second"])
    with pytest.raises(ValueError, match=r"viewmat is \[3, 4\], expected a \[4, 4\]"):
        Camera(torch.zeros(3, 4), 1.0, 1.0, 0.0, 0.0, 5, 5)
    with pytest.raises(ValueError, match="viewmat has NaN"):
        Camera(torch.full((4, 4), float("nan")), 1.0, 1.0, 0.0, 0.0, 5, 5)
    with pytest.raises(ValueError, match=r"width is 0"):
        Camera(torch.eye(4), 1.0, 1.0, 0.0, 0.0, 0, 5)
    with pytest.raises(ValueError, match=r"fx is -1\.0"):
        Camera(torch.eye(4), -1.0, 1.0, 0.0, 0.0, 5, 5)
    for width in ("wide", None, float("nan")):
        with pytest.raises(ValueError, match=f"width is {width}"):
            Camera(torch.eye(4), 1.0, 1.0, 0.0, 0.0, width, 5)  # type: ignore[arg-type]
    on_mgpu = Camera(torch.full((4, 4), float("nan"), device="mgpu"), 1.0, 1.0, 0.0, 0.0, 5, 5)
    with pytest.raises(ValueError, match=r"viewmat of cameras\[1\] has NaN"):
        render(table, [camera, on_mgpu])
    for background in (1.0, "white"):
        with pytest.raises(ValueError, match=f"background is {background!r}, expected 3 colour values"):
            render(table, camera, background=background)  # type: ignore[arg-type]
    assert render(table, []) == []

    class Wrong:
        def columns(self) -> tuple[torch.Tensor, ...]:
            means, quats, *rest = table.columns()
            return (means, quats[:, :3], *rest)

    with pytest.raises(
        ValueError, match=r"quats is \[10, 3\], expected \[N, 4\] with N = 10 as in means\. Order is w"
    ):
        render(Wrong(), camera)
