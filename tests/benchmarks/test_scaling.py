# SPDX-License-Identifier: Apache-2.0
"""scaling.py as users start it, tiny and on the host; and the town that it makes, against the sampler in NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.data.city.splats import sample_splats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scaling
from town_scene import TownScene, coprime_stride, places

ROOT = Path(__file__).resolve().parents[2]

TINY = [
    "--gpus",
    "1",
    "3",
    "--millions",
    "0.004",
    "--size",
    "96x64",
    "--equality-millions",
    "0.004",
    "--views",
    "2",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it prints, and its JSON; the last part asks for data that is not there."""
    folder = tmp_path_factory.mktemp("scaling")
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), "--quick", *TINY]
    command += [
        "--only",
        "strong",
        "stages",
        "equality",
        "largest-half",
        "caliterra",
        "--largest-millions",
        "0.004",
    ]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "MGPU_TEST_DATA": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, "--json", str(folder / "out.json"), "--logs", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout, json.loads((folder / "out.json").read_text())


def rows(found: dict[str, Any], part: str, **wanted: Any) -> list[dict[str, Any]]:
    return [
        row
        for row in found["rows"]
        if row["part"] == part and all(row.get(k) == v for k, v in wanted.items())
    ]


@pytest.mark.slow
def test_every_figure_of_strong_scaling_is_there(run: tuple[str, dict[str, Any]]) -> None:
    for shards, batches in ((1, (1, 3)), (3, (1, 3))):
        for kind in ("aerial", "street"):
            for batch in batches:
                (row,) = rows(run[1], "strong", shards=shards, kind=kind, batch=batch, layout="placed")
                assert row["rows"] == 4000
                assert row["ms_least"] <= row["ms"] <= row["ms_most"]
                assert len(row["peak"]) == shards
                assert (row["links_mb"] > 0) == (shards > 1)
                assert row["imbalance"] >= 1.0


@pytest.mark.slow
def test_the_same_views_see_the_same_rows_on_any_mesh_and_in_any_order(
    run: tuple[str, dict[str, Any]],
) -> None:
    counts = {row["visible"] for row in rows(run[1], "stages", kind="aerial", batch=3)}
    # three layouts on three shards; on one, stripes are no layout of their own
    assert len(rows(run[1], "stages", kind="aerial", batch=3)) == 5
    assert len(counts) == 1
    assert counts.pop() > 0


@pytest.mark.slow
def test_stages_are_those_of_a_step(run: tuple[str, dict[str, Any]]) -> None:
    for row in rows(run[1], "stages"):
        assert {"project", "bin", "blend", "loss", "blend_backward", "step"} <= set(row["stages"])


@pytest.mark.slow
def test_meshes_are_compared_with_one_shard(run: tuple[str, dict[str, Any]]) -> None:
    for layout in ("unsorted", "placed", "step", "striped 3", "step striped 3"):
        (row,) = rows(run[1], "equality", shards=3, layout=layout)
        assert row["equal"] is True
    assert row["moment"] <= 1e-4
    assert (
        rows(run[1], "equality", shards=3, layout="placed")[0]["covered"] > 0.2
    )  # something is in the pictures


@pytest.mark.slow
def test_half_tables_have_their_bytes(run: tuple[str, dict[str, Any]]) -> None:
    for shards in (1, 3):
        (row,) = rows(run[1], "largest-half", shards=shards)
        assert (row["rows"], row["bytes_a_row"]) == (4000, 504)


@pytest.mark.slow
def test_absent_data_is_left_out_in_words(run: tuple[str, dict[str, Any]]) -> None:
    problems = {(p["part"], p["shards"]): p for p in run[1]["problems"]}
    assert set(problems) == {("caliterra", 1), ("caliterra", 3)}
    assert "MGPU_TEST_DATA" in problems["caliterra", 1]["left_out"]


@pytest.mark.slow
def test_the_table_is_printed(run: tuple[str, dict[str, Any]]) -> None:
    for head in ("strong scaling", "stages, ms", "MB over the links", "against one GPU"):
        assert head in run[0]
    assert "logs" not in run[1]["options"]  # a path of this machine
    assert "1.00x" in run[0]  # one shard's own speed-up
    assert "caliterra G=3 caliterra: left out" in run[0]


def test_differences_are_seen() -> None:
    """What `equality` reports of tensors that differ by known amounts."""
    image = torch.rand(8, 8, 5, generator=torch.Generator().manual_seed(0))
    one = {"image 0": image, "gradient means": torch.tensor([4.0, 1.0]), "parameter means": torch.zeros(4)}
    other = {k: v.clone() for k, v in one.items()}
    other["image 0"][2, 3, 1] += 0.5
    other["gradient means"][1] = 1.2
    other["parameter means"][0] = 1.0
    found = scaling.differences(one, other)
    assert found["pixels_off"] == 1
    assert found["image"] == pytest.approx(0.5)
    assert found["gradient"] == pytest.approx(0.05)
    assert found["parameter"] == pytest.approx(0.25)
    other["gradient means"][0] = float("nan")
    assert scaling.differences(one, other)["gradient"] == float("inf")


def test_what_several_gpus_can_gain_at_most() -> None:
    """Two GPUs whose kernels take 5 ms in sum, where one takes 4, can be 1.6 times as fast."""

    def row(shards: int, layout: str, kernels: float) -> dict[str, Any]:
        head = {
            "part": "stages",
            "shards": shards,
            "case": "town",
            "kind": "aerial",
            "batch": 1,
            "layout": layout,
        }
        return head | {"kernels_ms": kernels, "launches": 23.0 * shards, "host_ms": 0.4 * shards}

    lines = scaling.show_work([row(1, "placed", 4.0), row(1, "unsorted", 7.0), row(2, "striped", 5.0)])
    assert [line.split() for line in lines[3:]] == [
        ["town", "aerial", "1", "placed", "1", "4.000", "1.00x", "23", "0.400"],
        ["town", "aerial", "1", "unsorted", "1", "7.000", "0.57x", "23", "0.400"],
        ["town", "aerial", "1", "striped", "2", "5.000", "1.60x", "46", "0.800"],
    ]
    assert scaling.show_work([]) == []


def test_a_part_that_fails_or_does_not_fit_leaves_the_rest(tmp_path: Path) -> None:
    """The size of images is impossible for one part; a whole second is no time for any."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "scaling.py"),
        *TINY,
        "--gpus",
        "1",
        "--size",
        "0x64",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--only", "largest", "links", "--json", str(out)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert done.returncode == 1, done.stdout
    assert [problem["part"] for problem in found["problems"]] == ["largest"]
    assert "width is 0" in found["problems"][0]["failed"]
    assert {row["case"] for row in rows(found, "links")} >= {"peers", "fork and join", "pages"}
    assert "links, G = 1" in done.stdout
    done = subprocess.run(
        [*command, "--only", "links", "--seconds", "0.1", "--json", str(out)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout
    assert found["rows"] == []
    assert "left" in found["problems"][0]["left_out"]


# ---- the town


def test_rows_are_those_of_the_sampler_in_numpy() -> None:
    ns_mgpu_splat.init()
    count = 5_000
    scene = TownScene(2, count)
    table = SplatTable(count, sh_degree=1)
    scene.fill(table)
    want = sample_splats(scene.town, count)
    for name in ("means", "quats", "scales", "opacities"):
        got = getattr(table, name).detach().cpu().numpy()
        np.testing.assert_allclose(got, want[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert 0.015 < float(table.shN.detach().cpu().std()) < 0.025


def test_an_unsorted_table_has_the_same_rows() -> None:
    ns_mgpu_splat.init()
    count = 3_000
    scene = TownScene(1, count)
    first, second = SplatTable(count, sh_degree=0), SplatTable(count, sh_degree=0)
    scene.fill(first)
    scene.fill(second, "unsorted")
    order = torch.arange(count) * coprime_stride(count) % count
    for a, b in zip(first.columns(), second.columns(), strict=True):
        assert torch.equal(a.detach().cpu()[order], b.detach().cpu())
    assert len(order.unique()) == count


@pytest.mark.parametrize("rows", [1, 2, 10, 2_790_000, 49_300_000, 200_000_000])
def test_every_row_comes_once(rows: int) -> None:
    stride = coprime_stride(rows)
    assert np.gcd(stride, rows) == 1
    assert rows * stride < 2**63


@pytest.mark.parametrize("order", ["town", "unsorted"])
@pytest.mark.parametrize("rows", [1, 100_000])
def test_every_order_has_every_row(order: str, rows: int) -> None:
    found = places(0, rows, rows, order, torch.device("cpu"))
    assert torch.equal(found.sort().values, torch.arange(rows))
    assert torch.equal(found[rows // 3 :], places(rows // 3, rows, rows, order, torch.device("cpu")))
