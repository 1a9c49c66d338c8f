# SPDX-License-Identifier: Apache-2.0
"""Gaussians sampled from the city: on its surfaces, the same in any chunks, without open3d."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plyfile import PlyData
from scipy.spatial.transform import Rotation

from ns_mgpu_splat.data.city import SplatSampler, Town, build_town, sample_splats, write_splats
from ns_mgpu_splat.data.city import splats as splats_module
from ns_mgpu_splat.data.city.raycast import SYSTEM_LIBRARIES, why_no_open3d


@pytest.fixture(scope="module")
def town() -> Town:
    return build_town(2, 1)


def test_rows_do_not_depend_on_how_they_are_cut(town: Town) -> None:
    n = 5003
    whole = sample_splats(town, n, seed=4)
    sampler = SplatSampler(town, n, seed=4)
    cuts = [(4000, 1003), (0, 1), (1, 2500), (2501, 1499), (4999, 0)]
    for start, count in cuts:
        part = sampler.rows(start, count)
        for name, column in whole.items():
            np.testing.assert_array_equal(part[name], column[start : start + count], err_msg=name)


def test_splats_lie_on_surfaces_and_face_out(town: Town) -> None:
    o3d = pytest.importorskip("open3d", reason="measures the distance to the surfaces", exc_type=ImportError)
    c = sample_splats(town, 20_000)
    scene = o3d.t.geometry.RaycastingScene()
    vertices = np.ascontiguousarray(town.corners.reshape(-1, 3))
    faces = np.arange(len(vertices), dtype=np.uint32).reshape(-1, 3)
    scene.add_triangles(o3d.core.Tensor(vertices), o3d.core.Tensor(faces))
    # From 10 cm above a disc, a ray down its flat axis must meet a surface that faces the ray, at the disc or before it.
    axis = Rotation.from_quat(c["quats"][:, [1, 2, 3, 0]]).as_matrix()[:, :, 2].astype(np.float32)
    answer = scene.cast_rays(o3d.core.Tensor(np.concatenate([c["means"] + 0.01 * axis, -axis], 1)))
    distance, normal = answer["t_hit"].numpy(), answer["primitive_normals"].numpy()
    assert (distance < 0.01 + 1e-4).mean() > 0.999, "only a ray along an edge may slip past"
    at_disc = np.abs(distance - 0.01) < 1e-4
    assert at_disc.mean() > 0.9, "little lies within 10 cm below another surface"
    facing = np.einsum("ij,ij->i", normal, axis)[at_disc]
    assert (np.abs(facing) > 0.999).mean() > 0.999
    assert (facing > 0.999).mean() > 0.99, "party walls stand back to back"
    np.testing.assert_array_less(c["scales"][:, 2], c["scales"][:, 0])


def test_density_is_even_within_the_town_and_falls_off_outside(town: Town) -> None:
    n = 40_000
    c = sample_splats(town, n)
    normal = np.cross(town.corners[:, 1] - town.corners[:, 0], town.corners[:, 2] - town.corners[:, 0])
    area = 0.5 * np.linalg.norm(normal, axis=1)
    half = np.array(town.layout.half_size) / 10
    up, level = normal[:, 2] > 1.98 * area, town.corners[:, :, 2].max(1) < 0.005
    inside = (np.abs(town.corners[:, :, :2]).max(1) < half + 0.01).all(-1)
    splat_up, splat_level = c["normals"][:, 2] > 0.99, c["means"][:, 2] < 0.005
    splat_inside = (np.abs(c["means"][:, :2]) < half + 0.01).all(-1)
    road_area, road_splats = area[up & level & inside].sum(), (splat_up & splat_level & splat_inside).sum()
    rest_area, rest_splats = (
        area[~(up & level) & inside].sum(),
        (~(splat_up & splat_level) & splat_inside).sum(),
    )
    assert road_splats / road_area == pytest.approx(rest_splats / rest_area, rel=0.05)
    far = np.linalg.norm(c["means"][:, :2], axis=1) > 0.7 * town.dome_radius
    assert 0 < far.mean() < 0.1, "the fields swallow the splats"
    # A disc's area times the density is one and the same: what is sparse is large.
    assert c["scales"][far, 0].min() > c["scales"][splat_inside, 0].max()


def test_ply_has_the_3dgs_layout_and_the_sampled_rows(
    town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 1000
    monkeypatch.setattr(splats_module, "_CHUNK", 333)
    told: list[int] = []
    write_splats(town, n, tmp_path / "s.ply", seed=2, progress=told.append)
    assert told == [333, 333, 333, 1]
    vertex = PlyData.read(tmp_path / "s.ply")["vertex"]
    layout = "x y z nx ny nz f_dc_0 f_dc_1 f_dc_2 opacity scale_0 scale_1 scale_2 rot_0 rot_1 rot_2 rot_3"
    assert [p.name for p in vertex.properties] == layout.split()
    assert all(p.val_dtype == "f4" for p in vertex.properties)
    c = sample_splats(town, n, seed=2)
    np.testing.assert_array_equal(np.stack([vertex[k] for k in "xyz"], 1), c["means"])
    np.testing.assert_array_equal(np.stack([vertex[f"rot_{k}"] for k in range(4)], 1), c["quats"])
    np.testing.assert_allclose(np.linalg.norm(c["quats"], axis=1), 1, atol=1e-5)
    color = np.stack([vertex[f"f_dc_{k}"] for k in range(3)], 1) * 0.28209479177387814 + 0.5
    assert color.min() >= -1e-5
    assert color.max() <= 1 + 1e-5
    assert color.std() > 0.1


def test_a_table_of_ten_billion_rows_is_sampled_at_its_end(town: Town) -> None:
    n = 10_000_000_000
    c = SplatSampler(town, n).rows(n - 5, 5)
    assert all(np.isfinite(v).all() for v in c.values())
    # 5 neighbours out of 1e10 lie on one triangle.
    assert np.ptp(c["normals"], axis=0).max() == 0


def test_rows_outside_the_table_are_refused(town: Town) -> None:
    with pytest.raises(ValueError, match="not within a table of 10"):
        sample_splats(town, 10, start=8, count=3)
    with pytest.raises(ValueError, match="at least 1"):
        sample_splats(town, 0)


def test_command_line_needs_no_open3d_for_splats_and_says_so_for_pictures(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['open3d'] = None; sys.modules['torch'] = None\n"
        "from ns_mgpu_splat.data.city.cli import main; sys.exit(main(sys.argv[1:]))"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = run(str(tmp_path / "a b"), "--blocks", "1", "--splats", "2000")
    assert done.returncode == 0, done.stderr
    assert len(PlyData.read(tmp_path / "a b" / "splats.ply")["vertex"].data) == 2000
    assert not (tmp_path / "a b" / "transforms.json").exists()
    refused = run(str(tmp_path / "c"), "--images", "1")
    assert refused.returncode == 1
    assert "libusb-1.0-0" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'open3d'"), "is not installed: `pip install open3d`"),
        (
            OSError("libusb-1.0.so.0: cannot open shared object file: No such file or directory"),
            "needs the system library libusb-1.0.so.0, which is missing: `sudo apt install libusb-1.0-0 ",
        ),
        (ImportError("numpy is too old"), "cannot be imported (numpy is too old)"),
    ],
)
def test_what_open3d_lacks_is_said(error: Exception, words: str) -> None:
    """`pip install open3d` was advised where only a system library was missing."""
    said = why_no_open3d(error)
    assert words in said
    assert ("pip install" in said) == isinstance(error, ModuleNotFoundError)


def test_system_libraries_are_the_same_on_all_pages() -> None:
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/install.md"):
        (line,) = re.findall(r"^sudo apt install ([^#\n]*)", (root / page).read_text(encoding="utf-8"), re.M)
        assert line.strip() == f"make g++ python3-dev python3-venv {SYSTEM_LIBRARIES}", page


def test_splats_have_the_colours_of_the_pictures(town: Town) -> None:
    """Two ways to the sun's shadow: the pictures' shadow rays, and the splats' height map."""
    pytest.importorskip("open3d", reason="takes the pictures", exc_type=ImportError)
    from ns_mgpu_splat.data.city.cameras import Lens, place_cameras
    from ns_mgpu_splat.data.city.raycast import Renderer

    renderer, lens = Renderer(town), Lens(320, 240)
    c = sample_splats(town, 200_000)
    for pose in (p.camera_to_world for p in place_cameras(town, 60)[::20]):
        picture = renderer.render(pose, lens)
        p = (c["means"] - pose[:3, 3]) @ pose[:3, :3]
        z = np.maximum(-p[:, 2], 1e-6)
        j = np.floor(p[:, 0] / z * lens.focal + lens.center[0]).astype(int)
        i = np.floor(-p[:, 1] / z * lens.focal + lens.center[1]).astype(int)
        rows = np.flatnonzero((p[:, 2] < -0.05) & (j >= 0) & (j < lens.width) & (i >= 0) & (i < lens.height))
        i, j = i[rows], j[rows]
        seen = picture.smooth[i, j] & (np.abs(picture.depth[i, j] / z[rows] - 1) < 0.01)
        assert seen.sum() > 1000
        color = c["sh0"][rows[seen]] * 0.28209479177387814 + 0.5
        difference = np.abs(color - picture.rgb[i[seen], j[seen]] / 255).mean(-1)
        assert np.median(difference) < 0.02
        assert (difference < 0.1).mean() > 0.75
