# SPDX-License-Identifier: Apache-2.0
"""train_step() against its oracle, the same step through autograd: bit for bit on the host, on every mesh."""

from __future__ import annotations

from typing import Any

import large_probe
import pytest
import splat_scenes as scenes
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats.loss import l1_ssim_loss
from ns_mgpu_splat.splats.statistics import RowStatistics

LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
ROWS = 3_000
pytestmark = pytest.mark.usefixtures("deterministic")

SIZES = [(96, 70), (40, 57), (33, 18), (64, 64)]


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def cameras_of(count: int) -> list[Camera]:
    return [scenes.camera_of(scenes.random_twin_camera(i, *SIZES[i])) for i in range(count)]


def photographs(cameras: list[Camera], *, floats: bool = False) -> list[Tensor]:
    """One image a camera: uint8, or floats if asked."""
    g = torch.Generator().manual_seed(5)
    images = [torch.randint(0, 256, (c.height, c.width, 3), generator=g, dtype=torch.uint8) for c in cameras]
    return [(image / 255 if floats else image).to("mgpu") for image in images]


class Pair:
    """Two equal tables with their optimizers; what is done to one is compared with what is done to the other."""

    def __init__(self, degree: int = 3, **settings: Any) -> None:
        columns = scenes.random_columns(ROWS, 11, degree=degree)
        self.tables = [SplatTable.from_columns(**columns).requires_grad_(True) for _ in range(2)]
        self.adams = [SplatAdam(table, LRS, seed=3, **settings) for table in self.tables]

    def by_autograd(
        self,
        cameras: list[Camera],
        targets: list[Tensor],
        masks: list[Tensor | None] | None = None,
        ssim_weight: float = 0.2,
        step: bool = True,
        lrs: dict[str, float] | None = None,
        **options: Any,
    ) -> float:
        images = render(self.tables[0], cameras, optimizer=self.adams[0], depth=False, **options)
        losses = [
            l1_ssim_loss(image.rgb, target, ssim_weight=ssim_weight, mask=mask)
            for image, target, mask in zip(images, targets, masks or [None] * len(targets), strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        if step:
            self.adams[0].step(lrs)
        return float(loss.detach())

    def by_train_step(self, *arguments: Any, **options: Any) -> Any:
        return train_step(self.tables[1], self.adams[1], *arguments, **options)

    def assert_equal(self) -> None:
        for mine, theirs in zip(self.adams[1].state(), self.adams[0].state(), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())
        for name, column in self.tables[0].named_columns().items():
            assert torch.equal(self.tables[1].named_columns()[name].detach().cpu(), column.detach().cpu()), (
                name
            )
        assert self.adams[0].report == self.adams[1].report


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("degree", [0, 3])
def test_steps_are_those_of_autograd(count: int, degree: int) -> None:
    """Four steps with turning cameras: rows miss steps and are replayed; regularisers and noise are on."""
    pair = Pair(degree, opacity_reg=0.01, scale_reg=0.01, noise_lr=10.0)
    every = cameras_of(4)
    for step in range(4):
        cameras = (every[step:] + every[:step])[:count]
        targets = photographs(cameras)
        lrs = {"means": 1e-3 * 0.9**step}
        options = {
            "background": (0.1, 0.2, 0.3),
            "antialiased": step % 2 == 1,
            "sh_degree": min(step, degree),
        }
        loss = pair.by_autograd(cameras, targets, lrs=lrs, **options)
        report = pair.by_train_step(cameras, targets, lrs=lrs, **options)
        assert report.loss == pytest.approx(loss, rel=1e-6)
        pair.assert_equal()
    assert pair.adams[1].report["rows_seen"] > ROWS // 10


@pytest.mark.sanitize
def test_masks_float_targets_and_the_weight_of_ssim() -> None:
    pair = Pair()
    cameras = cameras_of(2)
    targets = photographs(cameras, floats=True)
    mask = torch.ones(70, 96, dtype=torch.bool)
    mask[20:40] = False
    masks = [mask.to("mgpu"), None]
    for weight in (0.0, 0.7):
        pair.by_autograd(cameras, targets, masks, ssim_weight=weight)
        pair.by_train_step(cameras, targets, masks=masks, ssim_weight=weight)
        pair.assert_equal()


def test_one_camera_and_one_target_need_no_list() -> None:
    pair = Pair()
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    mask = torch.ones(70, 96, 1).to("mgpu")
    loss = pair.by_autograd([camera], [target], [mask])
    report = pair.by_train_step(camera, target, masks=mask)
    assert report.loss == pytest.approx(loss, rel=1e-6)
    assert report.loss == pytest.approx(0.8 * report.l1 + 0.2 * (1 - report.ssim), rel=1e-5)
    pair.assert_equal()


def test_gradients_of_several_calls_accumulate() -> None:
    pair = Pair()
    cameras = cameras_of(3)
    targets = photographs(cameras)
    for i in range(3):
        pair.by_autograd([cameras[i]], [targets[i]], step=i == 2)
        pair.by_train_step(cameras[i], targets[i], accumulate=i < 2)
        assert pair.adams[1].steps == (i == 2)
    pair.assert_equal()
    assert not pair.adams[1].pending


def test_pose_gradients_are_those_of_autograd() -> None:
    pair = Pair()
    cameras = cameras_of(2)
    targets = photographs(cameras)
    wanted = []
    for camera in cameras:
        viewmat = camera.viewmat.clone().requires_grad_(True)
        wanted.append(viewmat)
    learned = [Camera(v, *c.intrinsics, *c.size) for v, c in zip(wanted, cameras, strict=True)]
    pair.by_autograd(learned, targets)
    report = pair.by_train_step(cameras, targets, viewmat_grads=True)
    assert torch.equal(report.viewmat_grads, torch.stack([v.grad for v in wanted]))
    assert float(report.viewmat_grads.abs().max()) > 0
    pair.assert_equal()


@pytest.mark.parametrize("absolute", [False, True])
def test_statistics_are_norms_of_the_records_gradients(absolute: bool) -> None:
    """Oracle: gsplat's DefaultStrategy in torch: gradients times half an image and the number of cameras, norm, index_add."""
    pair = Pair()
    cameras = cameras_of(2)
    targets = photographs(cameras)
    for adam in pair.adams:
        adam.statistics = RowStatistics(ROWS, ROWS, absgrad=absolute)
    expected, seen = torch.zeros(ROWS, dtype=torch.float64), torch.zeros(ROWS, dtype=torch.int32)
    for _ in range(2):
        images = render(pair.tables[0], cameras, optimizer=pair.adams[0])
        torch.stack(
            [l1_ssim_loss(image.rgb, target) for image, target in zip(images, targets, strict=True)]
        ).mean().backward()
        (frame,) = pair.adams[0].pending
        row, view = frame.records()[:2]
        gradient = frame.record_grads()[:, 10:] if absolute else frame.record_grads()[:, :2]
        half = torch.tensor([[c.width / 2, c.height / 2] for c in cameras])
        norms = (gradient * half[view] * len(cameras)).double().norm(dim=1)
        expected.index_add_(0, row, norms)
        seen.index_add_(0, row, torch.ones_like(row, dtype=torch.int32))
        pair.adams[0].step()
        pair.by_train_step(cameras, targets)
        pair.assert_equal()
    gathered = [adam.statistics for adam in pair.adams]
    assert torch.equal(gathered[0].gradient.cpu(), gathered[1].gradient.cpu())
    assert torch.equal(gathered[1].views.cpu(), seen)
    assert torch.allclose(gathered[1].gradient.cpu().double(), expected, rtol=1e-5)
    assert int(seen.max()) == 4


@pytest.mark.sanitize
def test_no_rows_and_nothing_in_sight() -> None:
    pair = Pair()
    empty = SplatTable(0)
    adam = SplatAdam(empty, LRS)
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    report = train_step(empty, adam, camera, target)
    assert adam.steps == 1
    assert report.l1 == pytest.approx(float((target.cpu() / 255).mean()), rel=1e-5)
    away = torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    behind = Camera(away, *camera.intrinsics, *camera.size)
    pair.by_autograd([behind], [target])
    pair.by_train_step(behind, target)
    assert pair.adams[1].report["rows_seen"] == 0
    pair.assert_equal()


def test_images_are_those_before_the_step() -> None:
    pair = Pair()
    cameras = cameras_of(2)
    expected = [image.rgb.detach() for image in render(pair.tables[1], cameras, background=(0.1, 0.2, 0.3))]
    report = pair.by_train_step(cameras, photographs(cameras), background=(0.1, 0.2, 0.3), images=True)
    assert [torch.equal(a, b) for a, b in zip(report.images, expected, strict=True)] == [True, True]
    assert not pair.by_train_step(cameras, photographs(cameras)).images


def test_wrong_arguments_are_named() -> None:
    pair = Pair()
    table, adam = pair.tables[1], pair.adams[1]
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    for arguments, options, message in (
        (
            (camera, target[1:]),
            {},
            r"targets\[0\] is Byte \[69, 96, 3\].*expected contiguous uint8 or float32 \[70, 96, 3\]",
        ),
        ((camera, target.cpu()), {}, r"targets\[0\] is .* on cpu"),
        ((camera, [target, target]), {}, "1 cameras, 2 targets"),
        (([], []), {}, "cameras is empty"),
        ((camera, target), {"masks": torch.ones(3, 3).to("mgpu")}, r"masks\[0\] is Bool \[3, 3\]"),
        ((camera, target), {"background": (1, 2)}, r"background is \[2\], expected \[3\]"),
        ((camera, target), {"sh_degree": 4}, "sh_degree is 4"),
        ((camera, target), {"lrs": {"mean": 1.0}}, "lrs names"),
    ):
        with pytest.raises(ValueError, match=message):
            train_step(table, adam, *arguments, **options)
    with pytest.raises(ValueError, match="optimizer trains another table"):
        train_step(pair.tables[0], adam, camera, target)
    camera.viewmat[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"viewmat of cameras\[0\] has NaN"):
        train_step(table, adam, camera, target)
    assert adam.steps == 0


def test_without_depth_there_is_none() -> None:
    pair = Pair()
    (image,) = render(pair.tables[0], cameras_of(1), depth=False)
    (other,) = render(pair.tables[0], cameras_of(1))
    assert torch.equal(image.rgb, other.rgb)
    assert image.depth_sum is None
    with pytest.raises(ValueError, match="depth=True"):
        _ = image.depth


def test_an_image_changed_in_place_is_noticed() -> None:
    """The way back reads the image."""
    pair = Pair()
    (image,) = render(pair.tables[0], cameras_of(1), optimizer=pair.adams[0])
    loss = image.rgb.sum()
    image.rgb.detach().clamp_(0, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_on_three_shards_with_the_locality_check() -> None:
    """The same tests in a process of their own."""
    scenes.run_on_three_shards(__file__)


def test_rows_between_those_that_are_seen_change_nothing() -> None:
    """What test_large_gpu.py claims of 50 million rows."""
    large_probe.check_that_rows_between_change_nothing(20_000, 800, (160, 120))
