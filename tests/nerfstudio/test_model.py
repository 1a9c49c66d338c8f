# SPDX-License-Identifier: Apache-2.0
"""The model against its contract with Nerfstudio's tools, viewer and optimizers."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from nerfstudio_tools import run_forked

from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.model import GaussParams, MgpuSplatModel, MgpuSplatModelConfig, view_matrix
from ns_mgpu_splat.nerfstudio.pipeline import MgpuSplatPipeline
from ns_mgpu_splat.nerfstudio.viewer_controls import Look


def make_pipeline(
    root: Path, mode: str = "val", device: str = "mgpu", **options: object
) -> MgpuSplatPipeline:
    config = copy.deepcopy(mgpu_splat.config.pipeline)
    config.datamanager.data = root
    for name, value in {"max_gaussians": 2000, "lpips": False, **options}.items():
        setattr(config.model, name, value)
    return config.setup(device=device, test_mode=mode)


@pytest.fixture(scope="module")
def seeded(nerfstudio_folder: scene.Scene) -> MgpuSplatPipeline:
    """A pipeline with a model of the seed points, nothing trained; read-only."""
    return make_pipeline(nerfstudio_folder.root)


def eval_camera(pipeline: MgpuSplatPipeline):
    camera, batch = pipeline.datamanager.fixed_indices_eval_dataloader[0]
    return camera, batch


def test_model_stays_on_mgpu_and_keeps_its_parameters_wherever_a_tool_moves_it(
    seeded: MgpuSplatPipeline,
) -> None:
    model = seeded.model
    before = {name: (p, p.data_ptr()) for name, p in model.gauss_params.items()}
    for move in (lambda: model.to("cpu"), lambda: seeded.to("cpu"), model.float, model.cpu):
        move()
        assert model.device.type == "mgpu"
        for name, (parameter, address) in before.items():
            assert model.gauss_params[name] is parameter
            assert parameter.data_ptr() == address
    assert isinstance(model.gauss_params, GaussParams)


def test_properties_have_the_shapes_that_the_exporter_reads(seeded: MgpuSplatPipeline) -> None:
    model, rows = seeded.model, seeded.model.num_points
    shapes = {"means": 3, "scales": 3, "quats": 4, "opacities": 1, "shs_0": 3, "colors": 3}
    for name, width in shapes.items():
        assert getattr(model, name).shape == (rows, width), name
    assert model.shs_rest.shape == (rows, 15, 3)
    colors = model.colors.detach().cpu().numpy() * 255
    points, expected = scene.surface_points(1500)
    order = np.lexsort(points.T), np.lexsort(model.means.detach().cpu().numpy().T)
    assert sorted(np.round(colors).astype(int).sum(axis=1)) == sorted(expected.astype(int).sum(axis=1)), (
        order[0].shape
    )


def test_seeds_are_put_in_order_of_space_unless_that_is_off(
    seeded: MgpuSplatPipeline, nerfstudio_folder: scene.Scene
) -> None:
    from ns_mgpu_splat.partition.order import measure

    as_given = make_pipeline(nerfstudio_folder.root, reorder_decay=0).model
    assert sum(measure(seeded.model.table.means).descents) == 0
    assert sum(measure(as_given.table.means).descents) > 0
    rows, given = (
        sorted(map(tuple, model.table.means.detach().cpu().tolist())) for model in (seeded.model, as_given)
    )
    assert rows == given
    assert "Gaussians are kept in order of space" in seeded.model.grid_text()
    assert "Gaussians are left in any order" in as_given.grid_text()
    with pytest.raises(SystemExit, match=r"--pipeline.model.reorder-decay is 0.5, it must be above 1, or 0"):
        MgpuSplatModelConfig(reorder_decay=0.5)


def test_looking_for_viewer_controls_computes_no_colours(
    seeded: MgpuSplatPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nerfstudio.viewer.utils import parse_object
    from nerfstudio.viewer.viewer_elements import ViewerElement

    monkeypatch.setattr(MgpuSplatModel.colors, "func", lambda _: pytest.fail("colors were computed"))
    parse_object(seeded, ViewerElement, "x")


def test_viewer_sends_no_point_cloud_of_ours_but_of_others(seeded: MgpuSplatPipeline) -> None:
    import nerfstudio.viewer.viewer as viewer
    from nerfstudio.models.splatfacto import SplatfactoModel

    assert isinstance(seeded.model, SplatfactoModel)
    assert not isinstance(seeded.model, viewer.SplatfactoModel)
    assert isinstance(SplatfactoModel.__new__(SplatfactoModel), viewer.SplatfactoModel)


def test_outputs_have_the_shapes_and_ranges_of_nerfstudio(seeded: MgpuSplatPipeline) -> None:
    seeded.eval()
    camera, _ = eval_camera(seeded)
    outputs = seeded.model.get_outputs_for_camera(camera)
    for name, channels in {"rgb": 3, "depth": 1, "accumulation": 1, "background": 3}.items():
        assert outputs[name].shape == (48, 64, channels), name
        assert bool(torch.isfinite(outputs[name].cpu()).all()), name
    assert 0 <= outputs["rgb"].min() <= outputs["rgb"].max() <= 1
    rgba = seeded.model.get_rgba_image(outputs)
    assert rgba.shape == (48, 64, 4)
    alpha, straight = rgba[..., 3:].cpu(), rgba[..., :3].cpu()
    rgb, background = outputs["rgb"].cpu(), outputs["background"].cpu()
    solid = alpha[..., 0] > 0.05
    assert torch.allclose((straight * alpha + background * (1 - alpha))[solid], rgb[solid], atol=2e-2)


def test_view_matrix_is_the_inverse_of_the_pose_in_opencv_axes() -> None:
    pose = scene.look_at(np.array([1.0, 2, 3]), np.array([0, 0.5, 0]))
    expected = np.linalg.inv(pose @ np.diag([1.0, -1, -1, 1]))
    assert np.allclose(view_matrix(torch.from_numpy(pose[:3])).numpy(), expected, atol=1e-12)


def test_cropping_hides_what_is_outside_of_the_box(seeded: MgpuSplatPipeline) -> None:
    from nerfstudio.data.scene_box import OrientedBox

    seeded.eval()
    camera, _ = eval_camera(seeded)
    box = OrientedBox.from_params((0.05, 0.0, 0.0), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    inside = box.within(seeded.model.means.detach().cpu().double())  # Nerfstudio's own test is the oracle
    assert 0 < inside.sum() < len(inside)
    cropped = seeded.model.get_outputs_for_camera(camera, obb_box=box)
    table = seeded.model._as_drawn(Look(), box)
    assert torch.equal(table.opacities.detach().cpu() > -20, inside.cpu())
    whole = seeded.model.get_outputs_for_camera(camera)
    assert float(cropped["accumulation"].sum()) < 0.9 * float(whole["accumulation"].sum())


def test_error_in_a_viewer_thread_becomes_a_picture_with_its_text_and_is_raised_elsewhere(
    seeded: MgpuSplatPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nerfstudio.viewer.render_state_machine import RenderStateMachine
    from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException

    camera, _ = eval_camera(seeded)
    error: Exception = RuntimeError("out of tiles")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(seeded.model, "_render", fail)
    with pytest.raises(RuntimeError, match="out of tiles"):
        seeded.model.get_outputs_for_camera(camera)
    results: list = []

    def in_viewer() -> None:
        try:
            results.append(seeded.model.get_outputs_for_camera(camera))
        except BaseException as raised:
            results.append(raised)

    def run() -> None:
        thread = RenderStateMachine.__new__(RenderStateMachine)
        threading.Thread.__init__(thread, target=in_viewer)
        thread.run = in_viewer  # type: ignore[method-assign]
        thread.start()
        thread.join()

    run()
    height, width, _ = results[0]["rgb"].shape
    assert (height * 64, width >= 480) == (width * 48, True), "as was asked for, but large enough to be read"
    assert results[0]["rgb"].unique().numel() > 1, "there is text on it"
    assert results[0]["depth"].shape == (height, width, 1)
    error = IOChangeException()
    run()
    assert isinstance(results[1], IOChangeException), "an interruption is no error"


def test_loading_is_in_place_and_takes_the_checkpoints_rows(nerfstudio_folder: scene.Scene) -> None:
    source = make_pipeline(nerfstudio_folder.root)
    target = make_pipeline(nerfstudio_folder.root, mode="test", device="cpu")
    assert target.model.num_points == 0, "a tool waits for the checkpoint"
    parameters = dict(target.model.gauss_params.items())
    state = {k: v.detach().cpu() for k, v in source.state_dict().items()}
    target.load_pipeline(state, 7)
    assert target.model.num_points == 1500
    assert target.model.step == 7
    for name, parameter in parameters.items():
        assert target.model.gauss_params[name] is parameter
        assert torch.equal(parameter.detach().cpu(), source.model.gauss_params[name].detach().cpu())


def test_splatfactos_checkpoint_with_opacities_in_two_dimensions_is_taken(
    nerfstudio_folder: scene.Scene,
) -> None:
    pipeline = make_pipeline(nerfstudio_folder.root)
    state = {k: v.detach().cpu() for k, v in pipeline.model.state_dict().items()}
    state["gauss_params.opacities"] = state["gauss_params.opacities"][:, None] + 1
    pipeline.model.load_state_dict(state)
    assert torch.allclose(
        pipeline.model.table.opacities.detach().cpu(), state["gauss_params.opacities"][:, 0]
    )


@pytest.mark.parametrize("locality", ["0", "1"])
def test_a_training_step_has_no_fallback_and_no_n_sized_work_on_one_shard(
    tmp_path: Path, locality: str
) -> None:
    """The threshold lies between an image (9,216 numbers) and the smallest column (20,000): what is large has N rows.

    With the locality check, a stage that touches another shard's rows would end the process with code 86.
    """
    made = scene.write_nerfstudio(tmp_path, images=4, points=20_000)
    changes = {"MGPU_DEVICES": "cpu:3", "MGPU_SHARD_THRESHOLD": "10000", "MGPU_CHECK_LOCALITY": locality}
    done = run_forked("step_stats", [str(made.root)], tmp_path, **changes)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["rows"] == 20_000
    assert np.mean(result["losses"][-10:]) < 0.9 * np.mean(result["losses"][:3])
    assert result["gradients"] == [], "no N-sized gradient is stored"
    fallen = {name: counts for name, counts in result["stats"].items() if counts["fallback"]}
    assert not fallen, f"operators without a kernel: {fallen}"
    large = {name: counts for name, counts in result["stats"].items() if counts["large"]}
    assert not large, f"operators with N rows on one shard: {large}"
