# SPDX-License-Identifier: Apache-2.0
"""The viewer beside training, with Nerfstudio's own viewer and render thread, and a client that keeps the pictures.

Oracles: Nerfstudio's test of what is in a box; the operators' own pictures of tables that were changed by hand; counting dots.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scene
import torch
from nerfstudio.cameras.cameras import Cameras
from test_model import make_pipeline
from torch.utils._python_dispatch import TorchDispatchMode

import ns_mgpu_splat
from ns_mgpu_splat.nerfstudio import viewer_controls as controls
from ns_mgpu_splat.nerfstudio.picture_clock import PictureClock
from ns_mgpu_splat.nerfstudio.pipeline import MgpuSplatPipeline
from ns_mgpu_splat.nerfstudio.viewer_controls import Look
from ns_mgpu_splat.partition.colors import kShardColors, shard_color
from ns_mgpu_splat.partition.picture import palette
from ns_mgpu_splat.splats.table import COLUMNS, SplatTable

WIDTH, HEIGHT = 64, 48


@pytest.fixture(scope="module")
def pipeline(nerfstudio_folder: scene.Scene) -> MgpuSplatPipeline:
    """A model of seed points, made shiny, in evaluation; each test leaves it as it was."""
    pipeline = make_pipeline(nerfstudio_folder.root)
    model = pipeline.model
    model.eval()
    model.step = 10_000  # all SH degrees are in use
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.table.shN.copy_(torch.randn(model.table.shN.shape, generator=generator) * 0.2)
        model.table.opacities.copy_(torch.randn(model.num_points, generator=generator) * 3)
    return pipeline


@pytest.fixture
def camera(pipeline: MgpuSplatPipeline) -> Cameras:
    return pipeline.datamanager.fixed_indices_eval_dataloader[0][0]


@torch.no_grad()
def picture(pipeline: MgpuSplatPipeline, camera: Cameras, look: Look | None = None) -> torch.Tensor:
    return pipeline.model._render(camera, None, look)["rgb"].cpu()


@torch.no_grad()
def of_changed(
    pipeline: MgpuSplatPipeline, camera: Cameras, degree: int = 3, **columns: torch.Tensor
) -> torch.Tensor:
    """A picture of a copy of the table with other columns, by the operators alone."""
    model = pipeline.model
    given = {name: column.detach() for name, column in model.table.named_columns().items()} | columns
    table = SplatTable.from_columns(**given)
    view = model._camera(camera)
    return ns_mgpu_splat.render(table, view, sh_degree=degree)[0].rgb.clamp(0, 1).cpu()


def as_sh0(colors: torch.Tensor) -> torch.Tensor:
    return (colors - 0.5) * 2 * math.sqrt(math.pi)


def test_the_usual_look_is_the_models_own_picture(pipeline: MgpuSplatPipeline, camera: Cameras) -> None:
    with torch.no_grad():
        expected = pipeline.model.get_outputs_for_camera(camera)["rgb"].cpu()
    assert torch.equal(picture(pipeline, camera, Look()), expected)
    assert pipeline.model._as_drawn(Look(), None) is pipeline.model.table, "no column is copied"


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_sh_degree_leaves_out_the_bands_above(
    pipeline: MgpuSplatPipeline, camera: Cameras, degree: int
) -> None:
    rest = pipeline.model.table.shN.detach().clone()
    rest[:, (degree + 1) ** 2 - 1 :] = 0
    seen = picture(pipeline, camera, Look(sh_degree=degree))
    assert torch.allclose(seen, of_changed(pipeline, camera, shN=rest), atol=1e-5)
    assert (seen - picture(pipeline, camera)).abs().max() > 0.05


def test_no_degree_is_shown_before_training_has_begun_it(
    pipeline: MgpuSplatPipeline, camera: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.model, "step", 1500)
    assert torch.equal(
        picture(pipeline, camera, Look(sh_degree=3)), picture(pipeline, camera, Look(sh_degree=1))
    )


def test_points_are_dots_of_the_same_size_whatever_the_gaussians_size(
    pipeline: MgpuSplatPipeline, camera: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = picture(pipeline, camera)
    dots = picture(pipeline, camera, Look(points=True))
    tiny = torch.full_like(pipeline.model.table.scales, math.log(1e-7))
    logits = pipeline.model.table.opacities.detach().cpu()
    dead = logits.sigmoid() < 0.005
    assert 0 < dead.sum() < len(dead)
    solid = torch.where(dead, logits, torch.tensor(5.0))
    assert torch.allclose(dots, of_changed(pipeline, camera, scales=tiny, opacities=solid), atol=1e-4)
    assert (dots > 0.02).any(dim=2).float().mean() < (before > 0.02).any(dim=2).float().mean()
    monkeypatch.setattr(pipeline.model.config, "rasterize_mode", "antialiased")
    monkeypatch.setattr(pipeline.model, "_dressed", None)
    assert torch.equal(picture(pipeline, camera, Look(points=True)), dots), (
        "antialiasing would make dots vanish"
    )


def test_one_gaussian_is_one_dot_of_few_pixels_at_its_centre(
    pipeline: MgpuSplatPipeline, camera: Cameras
) -> None:
    one = {name: column.detach()[:1].clone() for name, column in pipeline.model.table.named_columns().items()}
    view = pipeline.model._camera(camera)
    center = torch.linalg.inv(view.viewmat.double()) @ torch.tensor(
        [0.02, -0.01, 1.0, 1], dtype=torch.float64
    )
    one["means"] = center[None, :3].float()
    one["opacities"], one["scales"] = torch.tensor([6.0]), torch.full((1, 3), math.log(0.3))
    table = SplatTable.from_columns(**one)
    dressed = controls.dressed(table, Look(points=True), None)
    with torch.no_grad():
        seen = ns_mgpu_splat.render(dressed, view)[0].accumulation[..., 0].cpu()
        large = ns_mgpu_splat.render(table, view)[0].accumulation[..., 0].cpu()
    assert 1 <= int((seen > 0.1).sum()) <= 9 < int((large > 0.1).sum())
    rows, columns = torch.nonzero(seen > 0.1, as_tuple=True)
    weights = seen[rows, columns]
    x, y = (
        float((weights * (columns + 0.5)).sum() / weights.sum()),
        float((weights * (rows + 0.5)).sum() / weights.sum()),
    )
    assert abs(x - (view.fx * 0.02 + view.cx)) < 0.3
    assert abs(y - (view.fy * -0.01 + view.cy)) < 0.3


def test_colour_by_home_shard_has_each_shards_colour_on_its_rows(
    pipeline: MgpuSplatPipeline, camera: Cameras
) -> None:
    table = pipeline.model.table
    colors = torch.empty((table.num_rows, 3))
    for shard, (begin, end) in enumerate(torch.mgpu.row_homes(table.means)):  # type: ignore[attr-defined]
        colors[begin:end] = torch.tensor(kShardColors[shard])
    seen = picture(pipeline, camera, Look(color_by=controls.kByShard))
    assert torch.allclose(seen, of_changed(pipeline, camera, 0, sh0=as_sh0(colors)), atol=1e-5)


def test_sixteen_shards_have_different_colours_and_the_picture_of_a_run_has_the_same() -> None:
    colors = np.array([shard_color(shard) for shard in range(16)])
    assert np.array_equal(colors[:8], kShardColors)
    assert colors.min() >= 0
    assert colors.max() <= 1
    apart = np.linalg.norm(colors[:, None] - colors[None], axis=2)
    assert apart[~np.eye(16, dtype=bool)].min() > 0.15
    assert shard_color(16) == shard_color(0)
    assert np.array_equal(palette(16), colors)


def test_colour_by_opacity_is_bright_where_gaussians_are_solid(
    pipeline: MgpuSplatPipeline, camera: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setattr(controls, "kPieceRows", 400)  # several pieces
    opacities = pipeline.model.table.opacities.detach().cpu().sigmoid().numpy()
    shades = np.rint(opacities * 255).astype(int)
    colors = torch.from_numpy(matplotlib.colormaps["viridis"](shades)[:, :3]).float()  # its own look-up
    seen = picture(pipeline, camera, Look(color_by=controls.kByOpacity))
    assert torch.allclose(seen, of_changed(pipeline, camera, 0, sh0=as_sh0(colors)), atol=5e-3)


def test_colour_by_depth_is_brighter_the_nearer_it_is(pipeline: MgpuSplatPipeline, camera: Cameras) -> None:
    with torch.no_grad():
        outputs = pipeline.model._render(camera, None, Look(color_by=controls.kByDepth))
    depth, solid = outputs["depth"][..., 0].cpu(), outputs["accumulation"][..., 0].cpu() > 0.9
    assert solid.sum() > 200
    luminance = outputs["rgb"].cpu() @ torch.tensor([0.21, 0.72, 0.07])
    near = depth < depth[solid].quantile(0.3)
    far = depth > depth[solid].quantile(0.7)
    assert luminance[solid & near].mean() > luminance[solid & far].mean() + 0.2


def test_a_depth_picture_of_nothing_and_of_a_wall_is_finite() -> None:
    nothing = controls.color_by_depth(
        torch.zeros(4, 5, 1), torch.zeros(4, 5, 1), torch.tensor([0.1, 0.2, 0.3])
    )
    assert torch.equal(nothing, torch.tensor([0.1, 0.2, 0.3]).expand(4, 5, 3))
    wall = controls.color_by_depth(torch.full((4, 5, 1), 2.0), torch.ones(4, 5, 1), torch.zeros(3))
    assert bool(torch.isfinite(wall).all())


def test_columns_of_a_look_are_kept_between_pictures_and_made_anew_after_a_step(
    pipeline: MgpuSplatPipeline, camera: Cameras, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, look = pipeline.model, Look(color_by=controls.kByOpacity, points=True)
    first = model._as_drawn(look, None)
    assert model._as_drawn(look, None) is first
    shared = [name for name in COLUMNS if getattr(first, name) is getattr(model.table, name)]
    assert shared == ["means", "quats", "shN"], "all that is not replaced is the table's own"
    monkeypatch.setattr(model, "step", model.step + 1)
    assert model._as_drawn(look, None) is not first
    model._as_drawn(Look(), None)
    assert model._dressed is None, "the usual look gives the columns back"


# ---- with Nerfstudio's viewer and render thread


class Client:
    """What a render thread knows of a browser; keeps the pictures."""

    client_id = 0

    def __init__(self) -> None:
        self.pictures: list[np.ndarray] = []
        self.scene = SimpleNamespace(set_background_image=lambda image, **_: self.pictures.append(image))
        pose = scene.look_at(np.array([1.0, -1.2, 1.0]), np.array([0, 0, 0.0]))
        import viser.transforms as vtf

        turned = vtf.SO3.from_matrix(pose[:3, :3]) @ vtf.SO3.from_x_radians(np.pi)
        self.camera = SimpleNamespace(aspect=4 / 3, fov=1.0, wxyz=turned.wxyz, position=pose[:3, 3] * 10)


class LargeCopies(TorchDispatchMode):
    """Collects what comes to the host with at least so many values."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.values, self.found = values, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.numel() >= self.values:
            self.found.append((str(function), tuple(out.shape)))
        return out


def open_viewer(pipeline: MgpuSplatPipeline, folder: Path, lock: Any) -> Any:
    from nerfstudio.configs.base_config import ViewerConfig
    from nerfstudio.viewer.viewer import Viewer

    config = ViewerConfig(websocket_host="127.0.0.1", quit_on_train_completion=True, max_num_display_images=2)
    return Viewer(config, folder / "viewer.log", folder, pipeline, train_lock=lock)


@pytest.fixture
def viewer(pipeline: MgpuSplatPipeline, tmp_path: Path) -> Iterator[Any]:
    opened = open_viewer(pipeline, tmp_path, threading.Lock())
    yield opened
    opened.viser_server.stop()
    for part in (
        pipeline.model.drawing.color_by,
        pipeline.model.drawing.points,
        pipeline.model.drawing.degree,
    ):
        part.gui_handle = None  # as before the viewer, so that the next one may begin


@pytest.fixture
def client(viewer: Any) -> Iterator[Client]:
    """A browser at the viewer, in a thread of Nerfstudio's."""
    from nerfstudio.viewer.render_state_machine import RenderStateMachine

    client = Client()
    thread = RenderStateMachine(viewer, 10.0, client)
    viewer.render_statemachines[0] = thread
    thread.start()
    client.thread = thread  # type: ignore[attr-defined]
    yield client
    thread.running = False
    thread.join(20)


def ask(viewer: Any, client: Client) -> np.ndarray:
    """Let the thread render again, as a training step or a control does; the picture."""
    from nerfstudio.viewer.render_state_machine import RenderAction

    deadline, before = time.monotonic() + 60, len(client.pictures)
    while len(client.pictures) < before + 3:
        assert time.monotonic() < deadline, "no picture in 60 s"
        client.thread.action(RenderAction("step", viewer.get_camera_state(client)))  # type: ignore[attr-defined]
        time.sleep(0.1)
    return client.pictures[-1]


def test_a_viewer_starts_without_copying_the_gaussians_and_shows_the_controls(
    pipeline: MgpuSplatPipeline, tmp_path: Path
) -> None:
    with LargeCopies(pipeline.model.num_points) as copies:
        opened = open_viewer(pipeline, tmp_path, None)
    drawing = pipeline.model.drawing
    try:
        assert copies.found == []
        names = {path.rsplit("/", 1)[0]: [] for path, _ in opened.viewer_elements}
        for path, element in opened.viewer_elements:
            names[path.rsplit("/", 1)[0]].append(element.name)
        assert {"Colour by", "Points", "SH degree"} <= set(names["Custom Elements/model/drawing"])
        drawing.points.gui_handle.value = True
        drawing.color_by.gui_handle.value = "depth"
        drawing.degree.gui_handle.value = 1
        assert drawing.look() == Look(1, True, "depth")
        assert not opened.pause_train.visible, "nothing trains here"
        assert not opened.control_panel._train_util.gui_handle.visible
        assert f"Step: {pipeline.model.step + 1} " in opened.stats_markdown.content
    finally:
        opened.viser_server.stop()
        for part in (drawing.color_by, drawing.points, drawing.degree):
            part.gui_handle = None
    with LargeCopies(pipeline.model.num_points) as copies:
        pipeline.model.table.means.detach().cpu()
    assert copies.found, "the test of the test: such a copy is found"


def near_grey(shown: np.ndarray) -> float:
    """Share of a picture that is the grey of one that could not be made."""
    return float((np.abs(shown.astype(int) - 90) <= 2).all(axis=2).mean())


def test_controls_change_what_a_browser_gets_and_nothing_else(
    pipeline: MgpuSplatPipeline, viewer: Any, client: Client, camera: Cameras
) -> None:
    usual = picture(pipeline, camera)
    before = ask(viewer, client)
    assert before.std() > 5, "there is a scene"
    pipeline.model.drawing.color_by.value = "home shard"
    after = ask(viewer, client)
    shades = after.reshape(-1, 3).astype(int)
    orange = (shades[:, 0] > 100) & (shades[:, 2] < 60)
    assert orange.mean() > 0.05
    assert after.shape != before.shape or np.abs(after.astype(int) - before).max() > 60
    pipeline.model.eval()
    with torch.no_grad():
        assert torch.equal(pipeline.model.get_outputs_for_camera(camera)["rgb"].cpu(), usual), (
            "evaluation and export do not see the panel"
        )
    assert viewer.control_panel._output_render.gui_handle.options == ("rgb", "depth", "accumulation")
    viewer.control_panel._split.value = True
    halves = ask(viewer, client)
    assert halves[:, halves.shape[1] // 2 + 2 :].std() > 5, "split screen has another picture on the right"
    viewer.control_panel._split.value = False
    tab = viewer.render_tab_state
    tab.preview_render, tab.preview_camera_type, tab.preview_aspect = True, "Equirectangular", 4 / 3
    refused = ask(viewer, client)
    assert near_grey(refused) > 0.7, "a panorama is not drawn as a pinhole"


def test_a_failing_render_says_why_in_the_picture_and_training_goes_on(
    nerfstudio_folder: scene.Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Nerfstudio's render thread, a training loop under its lock, and renders that fail for a while in the viewer only."""
    from nerfstudio.viewer.render_state_machine import RenderStateMachine

    from ns_mgpu_splat.nerfstudio.model import error_picture

    pipeline = make_pipeline(nerfstudio_folder.root)
    lock = threading.Lock()
    viewer, client = open_viewer(pipeline, tmp_path, lock), Client()
    thread = RenderStateMachine(viewer, 10.0, client)
    client.thread = thread  # type: ignore[attr-defined]
    viewer.render_statemachines[0] = thread
    working, steps, losses, stop = ns_mgpu_splat.render, [0], [], threading.Event()
    message = "CUDA out of memory (planted)"

    def failing(*args: Any, **kwargs: Any) -> Any:
        if isinstance(threading.current_thread(), RenderStateMachine):
            raise torch.OutOfMemoryError(message)
        return working(*args, **kwargs)

    def train() -> None:
        optimizer = torch.optim.Adam(pipeline.model.table.columns(), lr=1e-3)
        pipeline.train()
        while not stop.is_set():
            with lock:
                assert pipeline.model.training, "a render gives training mode back"
                _, loss, _ = pipeline.get_train_loss_dict(steps[0])
                sum(loss.values()).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss["main_loss"].detach()))
                steps[0] += 1
            time.sleep(0.01)

    trainer = threading.Thread(target=train)
    thread.start()
    trainer.start()
    try:
        good = ask(viewer, client)
        monkeypatch.setattr(ns_mgpu_splat, "render", failing)
        bad, at_failure = ask(viewer, client), steps[0]
        height, width = bad.shape[:2]
        assert width >= 480, "large enough to be read"
        expected = error_picture(width, height, f"OutOfMemoryError: {message}")["rgb"]
        assert np.abs(bad.astype(int) - (expected * 255).to(torch.uint8).numpy()).max() <= 1
        assert 50 < (bad > 200).all(axis=2).sum() < 0.1 * width * height, "white letters"
        bad = ask(viewer, client)
        assert thread.is_alive()
        assert trainer.is_alive()
        assert steps[0] > at_failure
        monkeypatch.setattr(ns_mgpu_splat, "render", working)
        again = ask(viewer, client)
        assert again.std() > 5
        assert len(np.unique(again.reshape(-1, 3), axis=0)) > 0.5 * len(
            np.unique(good.reshape(-1, 3), axis=0)
        )
    finally:
        stop.set()
        thread.running = False
        trainer.join(30)
        thread.join(30)
        viewer.viser_server.stop()
    assert np.isfinite(losses).all()
    assert capsys.readouterr().out.count("The viewer could not render; training goes on.") == 1, "said once"


def test_a_crop_box_in_training_shows_what_flushed_rows_would_show(
    nerfstudio_folder: scene.Scene, camera: Cameras
) -> None:
    """Rows that are behind are brought up to date as they are drawn: same picture as after a flush, and no flush is made."""
    from nerfstudio.data.scene_box import OrientedBox

    from ns_mgpu_splat.splats.optimizer import SplatAdam

    pipeline = make_pipeline(nerfstudio_folder.root)
    model = pipeline.model
    optimizer = SplatAdam(model.table, dict.fromkeys(model.table.named_columns(), 1e-3))
    model.optimizer = optimizer
    for step in range(6):
        model.step = step
        model.train()
        _, loss, _ = pipeline.get_train_loss_dict(step)
        loss["main_loss"].backward()
        optimizer.step()
    model.eval()
    box = OrientedBox.from_params((0.05, 0.0, 0.0), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    behind = optimizer.last_step.detach().cpu().clone()
    assert 0 < int((behind < optimizer.steps).sum()) < len(behind), "some rows have missed steps"
    with torch.no_grad():
        seen = model.get_outputs_for_camera(camera, obb_box=box)["rgb"].cpu()
    assert torch.equal(optimizer.last_step.cpu(), behind), "drawing writes no row"
    optimizer.flush()
    means = model.table.means.detach().cpu()
    opacities = model.table.opacities.detach().cpu().clone()
    opacities[~box.within(means.double())] = -30  # Nerfstudio's own test of what is inside
    expected = of_changed(pipeline, camera, model.active_sh_degree(), opacities=opacities)
    assert (seen - expected).abs().mean() < 1e-3
    assert (seen - picture(pipeline, camera)).abs().mean() > 1e-2


def test_a_copied_configuration_has_its_own_controls(nerfstudio_folder: scene.Scene) -> None:
    """Two models in a process, as two viewers, share nothing."""
    one, two = (make_pipeline(nerfstudio_folder.root, sh_degree=degree).model for degree in (0, 2))
    assert one.drawing.degree is None, "degree 0 has no bands to leave out"
    assert two.drawing.look().sh_degree == 2
    two.drawing.points.value = True
    assert not one.drawing.look().points
    assert copy.copy(two.drawing.look()) == Look(2, True, controls.kAsTrained)


def test_pictures_while_training_come_in_time_and_take_no_more_than_their_share() -> None:
    """Nerfstudio's rule, reckoning with a rate that its first small picture spoilt, beside ours."""
    viewer = SimpleNamespace(last_step=0, control_panel=SimpleNamespace(train_util=0.8))
    clock, shown, never = PictureClock(), [], 1_000_000
    for step in range(1000):  # of 0.05 s each
        clock.hurry(viewer, step, 0.4, step * 0.05)
        if step > viewer.last_step + never:  # as in Viewer.update_scene
            viewer.last_step = step
            shown.append(step)
    periods = np.diff(shown) * 0.05
    assert len(shown) > 20
    assert np.allclose(periods, 0.4 / (1 - 0.8), atol=0.11), "a fifth of the time is for pictures"
    viewer.control_panel.train_util, shown[:] = 1.0, []
    for step in range(1000, 1500):
        clock.hurry(viewer, step, 0.4, step * 0.05)
        if step > viewer.last_step + never:
            viewer.last_step = step
            shown.append(step)
    assert shown == [], "training has all the time"
