# SPDX-License-Identifier: Apache-2.0
"""Large things on a GPU: views of a hundred million pixels, columns and images of more than 2^31 values.

Oracles: the host flavour in a process of its own; the same rows in a small table; a window of an image seen by a camera of
its own; torch's own sums.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import large_probe as probe
import pytest
import splat_scenes as scenes
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, render
from ns_mgpu_splat.splats.loss import l1_ssim_loss

pytestmark = pytest.mark.gpu

PROBE = Path(probe.__file__)
GIB = 2**30


def need_memory(gib: int) -> None:
    """Skip where the GPU of the lead shard has less than this free."""
    torch.mgpu.empty_cache()  # type: ignore[attr-defined]
    free = torch.mgpu.mem_get_info()[0]  # type: ignore[attr-defined]
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free / GIB:.0f} GiB are free")


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ns_mgpu_splat.init()
    if not torch.mgpu.mesh().shards[0].startswith("cuda"):  # type: ignore[attr-defined]
        pytest.skip("needs a mesh of GPUs")
    yield
    torch.mgpu.empty_cache()  # type: ignore[attr-defined]


# ---- images


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The host flavour's answers, computed while the GPU is at work; a function of the answer's name."""
    folder = tmp_path_factory.mktemp("host")
    environment = {**os.environ, "MGPU_DEVICES": "cpu:4", "MGPU_MEMORY": "vmm"}
    process = subprocess.Popen(
        [sys.executable, str(PROBE), str(folder)], env=environment, stderr=subprocess.PIPE, text=True
    )

    def answer(name: str) -> Any:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"exit code {process.returncode}:\n{errors[-2000:]}"
        return torch.load(folder / f"{name}.pt", weights_only=True, mmap=True)

    yield answer
    process.kill()
    process.wait()


def assert_images_agree(image: Tensor, oracle: Tensor) -> None:
    """design.md, another flavour: 99.9 % of pixels within 1e-4, the rest within 2/255. Band by band, to save memory."""
    assert image.shape == oracle.shape
    far = 0
    for first in range(0, image.shape[0], 500):
        error = (image[first : first + 500] - oracle[first : first + 500]).abs().amax(-1)
        assert error.max().item() <= 2 / 255
        far += int((error > 1e-4).sum())
    assert far <= 1e-3 * image.shape[0] * image.shape[1]


def test_a_view_of_12000_x_9000_equals_the_host_flavours(on_the_host: Any) -> None:
    need_memory(30)
    got, want = probe.wide_view(), on_the_host("wide")
    assert_images_agree(got["rgb"], want["rgb"])
    assert (want["rgb"] > 0.01).any(-1).double().mean() > 0.1  # there is something to see
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    for name, grad in want["grads"].items():
        assert scenes.relative_l2(got["grads"][name], grad) <= 1e-3, name


def test_eight_views_in_one_step_equal_the_host_flavours(on_the_host: Any) -> None:
    got, want = probe.eight_views(), on_the_host("eight")
    for image, oracle in zip(got["rgb"], want["rgb"], strict=True):
        assert_images_agree(image, oracle)
    assert got["losses"] == pytest.approx(want["losses"], abs=1e-5)
    assert abs(got["rows_seen"] - want["rows_seen"]) <= 1e-4 * want["rows_seen"]
    for name, moment in want["exp_avg"].items():
        assert scenes.relative_l2(got["exp_avg"][name], moment) <= 1e-3, name


def test_an_image_of_more_than_2_31_values_is_whole() -> None:
    """Its last corner is that of a small camera with its principal point moved; its loss is torch's, band by band."""
    need_memory(45)
    width, height, window = 27_008, 26_608, 512  # tiles of both cameras coincide
    assert 3 * width * height > 2**31
    left, top, focal = width - window, height - window, 15_000.0
    # a fifth of the rows in the window, the others nowhere near it; 5 to 100 pixels wide, because positions near 27,000 are
    # rounded to 0.002 pixels
    columns = scenes.random_columns(3_000, 23)
    unit = torch.rand(3_000, 2, generator=torch.Generator().manual_seed(3))
    pixel = unit * torch.tensor([left - 1000.0, top - 1000.0])
    pixel[::5] = unit[::5] * (window - 80.0) + torch.tensor([left + 40.0, top + 40.0])
    depth = columns["means"][:, 2:].abs() + 1.0
    columns["means"] = torch.cat(
        [(pixel - torch.tensor([width / 2, height / 2])) / focal * depth, depth], dim=1
    )
    columns["scales"] = (columns["scales"] - 3.2).clamp(max=-4.0)
    table = scenes.table_of(columns)
    whole = Camera(torch.eye(4), focal, focal, width / 2, height / 2, width, height)
    corner = Camera(torch.eye(4), focal, focal, width / 2 - left, height / 2 - top, window, window)

    with torch.no_grad():
        rgb = render(table, whole, depth=False)[0].rgb
        part = render(table, corner, depth=False)[0].rgb
    assert (part > 0.01).any(-1).double().mean() > 0.1
    error = (rgb[top:, left:] - part).abs()
    assert error.max().item() < 0.02
    assert error.mean().item() < 1e-4

    rgb.requires_grad_(True)
    target = torch.full((height, width, 3), 64, dtype=torch.uint8, device="mgpu")
    loss = l1_ssim_loss(rgb, target, ssim_weight=0.0)
    loss.backward()
    with torch.no_grad():
        total = 0.0
        for first in range(0, height, 1000):
            band, grad = rgb[first : first + 1000], rgb.grad[first : first + 1000]  # type: ignore[index]
            difference = band - 64 / 255
            total += difference.abs().sum(dtype=torch.float64).item()
            assert torch.allclose(grad, difference.sign() / rgb.numel(), rtol=1e-5, atol=0)
        assert loss.item() == pytest.approx(total / rgb.numel(), rel=1e-5)


# ---- columns

SEEN = 500_000  # rows at each end of the table that the camera sees
REST = 15 * 3  # values of a row of shN


@pytest.mark.usefixtures("deterministic")
def test_a_column_of_more_than_2_31_values_trains_like_the_rows_that_are_seen() -> None:
    """Both ends of the table are seen, the last rows beyond 2^31 values."""
    rows = 2**31 // REST + 600_000
    assert (rows - SEEN) * REST > 2**31
    need_memory(50)
    probe.check_that_rows_between_change_nothing(rows, SEEN, (960, 720))


def test_plain_gradients_of_more_than_2_31_values() -> None:
    """`loss.backward()` without an optimizer fills a dense .grad: zeros but for the rows that are seen."""
    rows = 2**31 // REST + 600_000
    need_memory(40)
    small = probe.columns_seen(SEEN)
    grads = []
    for table in (probe.table_with_rows_between(rows, small), scenes.table_of(small)):
        rgb = render(table, probe.camera(0, 960, 720), depth=False)[0].rgb
        l1_ssim_loss(rgb, probe.photograph(960, 720)).backward()
        assert table.shN.grad is not None
        grads.append(table.shN.grad)
    assert scenes.relative_l2(probe.ends(grads[0], SEEN), grads[1]) <= 1e-5
    for first in range(SEEN, rows - SEEN, 10_000_000):
        assert not grads[0][first : min(first + 10_000_000, rows - SEEN)].any()
