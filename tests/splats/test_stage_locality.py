# SPDX-License-Identifier: Apache-2.0
"""Local means local: a render and its way back touch no other shard's pages, and the check would notice if they did."""

from __future__ import annotations

import pytest
from test_render import run_script

pytestmark = pytest.mark.any_mesh

SCRIPT = """
import sys
import splat_scenes as scenes
from ns_mgpu_splat import render
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats import project
columns = scenes.random_columns(20000, 5)
views = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (64, 48)])]
table = scenes.table_of(columns)
viewmats = [view.viewmat.clone().requires_grad_() for view in views]
cameras = [scenes.camera_of(v, m) for v, m in zip(views, viewmats)]
images = render(table, cameras, background=[0.1, 0.2, 0.3])
(images[0].rgb.sum() + images[1].depth.sum()).backward()
assert table.means.grad.cpu().abs().max() > 0
project(table, cameras[0]).means2d.sum().backward()
print("rendered")
if len(sys.argv) > 1:
    frame = native().splat_project(
        table.columns(), [cameras[0].arguments()], False, 3
    )
    frame.read_neighbour(sys.argv[1])
    print("survived")
"""


def test_render_and_backward_stay_on_their_shards() -> None:
    done = run_script(SCRIPT, MGPU_DEVICES="cpu:3", MGPU_CHECK_LOCALITY="1")
    assert done.returncode == 0, done.stderr
    assert "rendered" in done.stdout


def test_planted_read_of_another_shards_records_is_caught() -> None:
    done = run_script(SCRIPT, "records", MGPU_DEVICES="cpu:3", MGPU_CHECK_LOCALITY="1")
    assert done.returncode == 86, (done.returncode, done.stderr)
    assert "locality violation" in done.stderr
    assert "read_neighbour" in done.stderr
    assert "survived" not in done.stdout


def test_planted_read_of_another_shards_rows_is_caught() -> None:
    done = run_script(SCRIPT, "rows", MGPU_DEVICES="cpu:3", MGPU_CHECK_LOCALITY="1")
    assert done.returncode == 86, (done.returncode, done.stderr)
    assert "locality violation" in done.stderr


def test_planted_reads_pass_without_the_check() -> None:
    done = run_script(SCRIPT, "records", MGPU_DEVICES="cpu:3", MGPU_CHECK_LOCALITY="0")
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout
