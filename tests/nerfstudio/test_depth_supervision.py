# SPDX-License-Identifier: Apache-2.0
"""Depths that supervise a run of `ns-train`. Oracle: depths of the scene by exact ray casting."""

from __future__ import annotations

import copy
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scene
import torch
from nerfstudio_tools import train_many

MODEL = "--pipeline.model."
OPTIONS = ["--experiment-name", "tiny", f"{MODEL}max-gaussians", 3000, "--eval-at-end", False]


def depth_map(made: scene.Scene, pose: np.ndarray) -> np.ndarray:
    """Depth (H, W) along the camera's z through pixel centres; 0 where a ray meets nothing."""
    x, y = np.meshgrid(np.arange(made.width) + 0.5, np.arange(made.height) + 0.5)
    local = np.stack(
        [(x - made.width / 2) / made.focal, -(y - made.height / 2) / made.focal, -np.ones_like(x)], axis=-1
    )
    rays = local.reshape(-1, 3) @ pose[:3, :3].T  # one unit along z each
    eye = pose[:3, 3]
    best = np.full(len(rays), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = -eye[2] / rays[:, 2]
    spot = eye + t[:, None] * rays
    hit = (t > 0) & (np.abs(spot[:, :2]).max(axis=1) < 1.5)
    best[hit] = t[hit]
    for center, radius, _ in scene.BALLS:
        offset = eye - np.array(center)
        a, b = (rays * rays).sum(axis=1), rays @ offset
        square = b * b - a * (offset @ offset - radius**2)
        t = (-b - np.sqrt(np.maximum(square, 0))) / a
        best = np.where((square > 0) & (t > 0) & (t < best), t, best)
    return np.where(np.isfinite(best), best, 0).reshape(made.height, made.width).astype(np.float32)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    """The tiny scene without a point cloud, with depth maps in millimetres."""
    root = tmp_path_factory.mktemp("measured") / "town"
    made = scene.write_nerfstudio(root, points=None, images=9)
    (root / "depths").mkdir()
    meta = json.loads((root / "transforms.json").read_text())
    for frame, name, pose in zip(meta["frames"], made.names, made.poses, strict=True):
        np.save(root / "depths" / f"{name}.npy", depth_map(made, pose) * 1000)
        frame["depth_file_path"] = f"depths/{name}.npy"
    (root / "transforms.json").write_text(json.dumps(meta))
    return made


def depth_error(measured: scene.Scene, weight: float) -> float:
    """Mean relative error of depths in held-out views, after 120 steps from random points."""
    from ns_mgpu_splat.nerfstudio.config import mgpu_splat
    from ns_mgpu_splat.nerfstudio.optimizers import SplatOptimizers

    config: Any = copy.deepcopy(mgpu_splat.config)
    config.pipeline.datamanager.data = measured.root
    config.pipeline.datamanager.dataparser.num_random_points = 2000
    for name, value in (("sh_degree", 0), ("background_color", "black"), ("depth_weight", weight)):
        setattr(config.pipeline.model, name, value)
    pipeline = config.pipeline.setup(device="mgpu")
    model, data = pipeline.model, pipeline.datamanager
    optimizers = SplatOptimizers(config.optimizers, pipeline.get_param_groups(), model, 120, 0)
    model.start_training(optimizers.table, 120, 0)
    pipeline.train()
    for step in range(120):
        model.step = step
        optimizers.zero_grad_all()
        _, losses, _ = pipeline.get_train_loss_dict(step)
        assert ("depth_loss" in losses) == (weight > 0)
        torch.stack(list(losses.values())).sum().backward()
        optimizers.step_some(["splats"], step)
    pipeline.eval()
    optimizers.flush()
    errors = []
    for camera, batch in data.fixed_indices_eval_dataloader:
        name = Path(data.eval_dataset.image_filenames[batch["image_idx"]]).name
        truth = depth_map(measured, measured.poses[measured.names.index(name)])
        truth = truth * data.train_dataparser_outputs.dataparser_scale
        found = model.get_outputs_for_camera(camera)["depth"][..., 0].cpu().numpy()
        errors.append(np.abs(found[truth > 0] / truth[truth > 0] - 1).mean())
    return float(np.mean(errors))


def test_depth_maps_put_the_scene_where_it_is(measured: scene.Scene) -> None:
    """In views that were neither photographed nor measured in training."""
    assert depth_error(measured, 0.5) < 0.5 * depth_error(measured, 0.0)


def write_tracks(made: scene.Scene) -> None:
    """A points3D.bin whose points are seen by the images that see them, and one that was matched wrongly."""
    xyz, rgb = scene.surface_points(300)
    views = [np.linalg.inv(pose @ np.diag([1.0, -1, -1, 1])) for pose in made.poses]
    data = struct.pack("<Q", len(xyz))
    for i, (p, c) in enumerate(zip(xyz, rgb, strict=True)):
        seen = []
        for number, view in enumerate(views):
            local = view[:3, :3] @ p + view[:3, 3]
            if local[2] > 0:
                x = made.focal * local[0] / local[2] + made.width / 2
                y = made.focal * local[1] / local[2] + made.height / 2
                if 0 <= x < made.width and 0 <= y < made.height:
                    seen.append(number + 1)
        data += struct.pack("<Q3d3BdQ", i + 1, *p, *c.tolist(), 0.5, len(seen))
        data += b"".join(struct.pack("<ii", image, 0) for image in seen)
    (made.root / "sparse" / "0" / "points3D.bin").write_bytes(data)


def test_sparse_points_supervise_where_there_are_no_maps_and_nothing_is_refused(
    nerfstudio_folder: scene.Scene, tmp_path: Path
) -> None:
    made = scene.write_colmap(tmp_path / "colmap", images=5, width=48, height=36)
    write_tracks(made)
    base = [*OPTIONS, "--max-num-iterations", 12, f"{MODEL}depth-weight", 0.1]
    exposed = [f"{MODEL}exposure", True, f"{MODEL}camera-optimizer.mode", "SO3xR3"]
    points, both, neither, negative = train_many(
        [
            ["--data", made.root, *base, "--timestamp", "points"],
            ["--data", made.root, *base, *exposed, "--timestamp", "both"],
            ["--data", nerfstudio_folder.root, *base, "--timestamp", "neither"],
            ["--data", made.root, *OPTIONS, f"{MODEL}depth-weight", -1, "--timestamp", "negative"],
        ],
        tmp_path,
    )
    assert points["code"] == both["code"] == 0, (points["text"], both["text"])
    assert all(np.isfinite(points["losses"]))
    assert neither["code"] == 1
    said = " ".join(neither["text"].split())
    assert "depth-weight is above 0, but" in said
    assert "neither depth maps (depth_file_path in transforms.json) nor a COLMAP reconstruction" in said
    assert negative["code"] == 1
    assert "depth-weight is -1.0, it must be 0 or more" in negative["text"]


def test_samples_are_the_scenes_depths(measured: scene.Scene) -> None:
    """In the model's units, on a scaled world: what the dataparser hands out, against the ray caster."""
    from ns_mgpu_splat.nerfstudio.dataparser import MgpuSplatDataParserConfig

    parser = MgpuSplatDataParserConfig(data=measured.root).setup()
    parser.want_depth = True
    outputs = parser.get_dataparser_outputs("train")
    index = 2
    number = measured.names.index(Path(outputs.image_filenames[index]).name)
    expected = depth_map(measured, measured.poses[number]) * outputs.dataparser_scale
    got = outputs.metadata["depths"][index]()
    assert re.fullmatch(r"\(\d+,\)", str(got.depths.shape))
    assert np.allclose(got.depths, expected.reshape(-1)[got.pixels], rtol=1e-5)
    assert set(got.pixels.tolist()) == set(np.flatnonzero(expected.reshape(-1)).tolist())

    colmap_root = measured.root.parent / "colmap"
    made = scene.write_colmap(colmap_root, images=5, width=48, height=36)
    write_tracks(made)
    parser = MgpuSplatDataParserConfig(data=colmap_root).setup()
    parser.want_depth = True
    outputs = parser.get_dataparser_outputs("train")
    name = Path(outputs.image_filenames[0]).name
    expected = depth_map(made, made.poses[made.names.index(name)]) * outputs.dataparser_scale
    got = outputs.metadata["depths"][0]()
    # a point lies anywhere in its pixel, and some are hidden by the balls: most agree to a pixel's slope
    ratio = got.depths / np.maximum(expected.reshape(-1)[got.pixels], 1e-9)
    assert len(got.pixels) > 50
    assert float(np.median(np.abs(ratio - 1))) < 0.03
    assert np.allclose(got.weights, np.exp(-1), rtol=1e-6), "all have the typical error"
