# SPDX-License-Identifier: Apache-2.0
"""Exposures: the map and its gradients against float64, the native step against autograd, Adam against torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import splat_scenes as scenes
import torch
from test_train_step import Pair, cameras_of, photographs
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats.exposure import ExposureAdam, Exposures, color_corrected, expose
from ns_mgpu_splat.splats.loss import l1_ssim_loss

pytestmark = pytest.mark.usefixtures("deterministic")

# Empty, narrower than a pack of pixels, rows that are no whole packs, several rows of tiles, several pieces of one.
SIZES = [(0, 5), (5, 0), (1, 1), (3, 2), (19, 37), (50, 331), (33, 600)]


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def image_of(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.rand(height, width, 3, generator=torch.Generator().manual_seed(seed))


def map_of(seed: int) -> Tensor:
    """A map (3, 4) some way from the identity."""
    return torch.eye(3, 4) + 0.2 * torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def twin(rgb: Tensor, exposure: Tensor) -> Tensor:
    return rgb @ exposure[:, :3].T + exposure[:, 3]


@pytest.mark.sanitize
@pytest.mark.parametrize("size", SIZES)
def test_the_map_and_its_gradients_are_those_of_float64(size: tuple[int, int]) -> None:
    """Images: a rounding a term. Sums over pixels: those of float32 products, added in double."""
    rgb, exposure, weight = image_of(*size), map_of(1), image_of(*size, seed=2) - 0.5
    wide = [rgb.double().requires_grad_(), exposure.double().requires_grad_()]
    expected = twin(*wide)
    (expected * weight.double()).sum().backward()
    mine = [t.to("mgpu").requires_grad_() for t in (rgb, exposure)]
    got = expose(*mine)
    assert torch.allclose(got.detach().cpu().double(), expected.detach(), atol=1e-6)
    got.backward(weight.to("mgpu"))
    for found, wanted in zip(mine, wide, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        scale = float(wanted.grad.abs().max()) if wanted.grad.numel() else 0.0
        assert torch.allclose(found.grad.cpu().double(), wanted.grad, atol=2e-6 * max(scale, 1.0))


def test_the_gradient_of_a_map_is_the_slope_of_the_loss() -> None:
    """Finite differences of L1 + D-SSIM, taken in float64 by a twin of the loss."""
    from test_loss import twin_loss

    rgb, exposure = image_of(40, 31), map_of(3)
    target = (image_of(40, 31, seed=4) * 255).to(torch.uint8)

    def loss(changed: Tensor) -> float:
        return float(twin_loss(twin(rgb.double(), changed), target.double() / 255, 0.2))

    map_ = exposure.to("mgpu").requires_grad_()
    l1_ssim_loss(expose(rgb.to("mgpu"), map_), target.to("mgpu")).backward()
    assert map_.grad is not None
    step = 1e-6
    for at in range(12):
        change = torch.zeros(12, dtype=torch.float64)
        change[at] = step
        change = change.reshape(3, 4)
        slope = (loss(exposure.double() + change) - loss(exposure.double() - change)) / (2 * step)
        # a pixel whose difference changes its sign within the step may be off by 2 of its 3 * 1240
        assert float(map_.grad.cpu().reshape(-1)[at]) == pytest.approx(slope, rel=1e-3, abs=1e-3), at


def test_steps_are_those_of_autograd() -> None:
    """Bit for bit, with several views, some without exposure, masks, a background, float and uint8 photographs.

    Four views: their share of the loss is a power of two, so it is the same bits wherever it is multiplied.
    """
    pair = Pair(opacity_reg=0.01, noise_lr=10.0)
    cameras = cameras_of(4)
    mask = torch.ones(57, 40, dtype=torch.bool)
    mask[20:40] = False
    masks = [None, mask.to("mgpu"), None, None]
    for step in range(3):
        targets = photographs(cameras, floats=step == 1)
        maps = [map_of(10 * i + step).to("mgpu").requires_grad_() if i != 2 else None for i in range(4)]
        background = (0.1 * step, 0.2, 0.3)
        images = render(pair.tables[0], cameras, optimizer=pair.adams[0], depth=False, background=background)
        losses = [
            l1_ssim_loss(image.rgb if m is None else expose(image.rgb, m), target, mask=keep)
            for image, m, target, keep in zip(images, maps, targets, masks, strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()
        pair.adams[0].step()
        report = pair.by_train_step(
            cameras,
            targets,
            masks=masks,
            background=background,
            exposures=[None if m is None else m.detach() for m in maps],
        )
        assert report.loss == pytest.approx(float(loss.detach()), rel=1e-6)
        pair.assert_equal()
        for view, m in enumerate(maps):
            expected = torch.zeros(3, 4) if m is None else m.grad.cpu()  # type: ignore[union-attr]
            got = report.exposure_grads[view].cpu()
            if len(torch.mgpu.mesh().shards) == 1:  # type: ignore[attr-defined]
                assert torch.equal(got, expected)
            else:  # sums tile by tile, by owner
                assert torch.allclose(got, expected, atol=1e-6 * max(float(expected.abs().max()), 1e-6))
            assert m is None or float(expected.abs().max()) > 0


def test_the_identity_changes_no_bit_and_none_gives_no_gradients() -> None:
    pair = Pair()
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    plain = train_step(pair.tables[0], pair.adams[0], camera, target)
    exposed = pair.by_train_step(camera, target, exposures=torch.eye(3, 4).to("mgpu"))
    assert plain.exposure_grads is None
    assert exposed.exposure_grads is not None
    assert exposed.loss == plain.loss
    pair.assert_equal()


def test_pose_gradients_go_through_the_exposure() -> None:
    """A map of zero gain hides where the camera is; another does not."""
    pair = Pair()
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    flat = torch.zeros(3, 4)
    flat[:, 3] = 0.5
    report = pair.by_train_step(camera, target, exposures=flat.to("mgpu"), viewmat_grads=True)
    assert float(report.viewmat_grads.abs().max()) == 0
    report = pair.by_train_step(camera, target, exposures=map_of(0).to("mgpu"), viewmat_grads=True)
    assert float(report.viewmat_grads.abs().max()) > 0


def test_rows_step_as_torchs_adam_and_their_mean_stays_the_identity() -> None:
    """Each row has an Adam of its own in float64; what all share is taken away by hand."""
    exposures = Exposures(5, "mgpu")
    adam = ExposureAdam([exposures.maps], lr=0.02)
    twins = [torch.eye(3, 4, dtype=torch.float64).requires_grad_() for _ in range(5)]
    theirs = [torch.optim.Adam([t], lr=0.02, eps=1e-15) for t in twins]
    generator = torch.Generator().manual_seed(1)
    for seen in ([0], [3], [0], [1, 4], [3], [0]):
        adam.zero_grad()
        for index in seen:
            gradient = torch.randn(3, 4, generator=generator)
            exposures.row(index)
            exposures.add_gradient(index, gradient.to("mgpu"))
            twins[index].grad = gradient.double()
        adam.step()
        for index in seen:
            theirs[index].step()
            with torch.no_grad():
                off = torch.stack([t.detach() for t in twins]).mean(dim=0) - torch.eye(3, 4)
                for t in twins:
                    t -= off
    assert torch.allclose(
        exposures.maps.detach().cpu().double(), torch.stack([t.detach() for t in twins]), atol=1e-6
    )
    state = adam.state_dict()["state"][0]
    assert state["step"].tolist() == [3, 1, 0, 2, 1]
    assert float(state["exp_avg"][2].abs().max()) == 0
    assert torch.allclose(exposures.maps.detach().cpu().mean(dim=0), torch.eye(3, 4), atol=1e-6)


def test_one_photograph_keeps_the_identity() -> None:
    exposures = Exposures(1, "mgpu")
    adam = ExposureAdam([exposures.maps])
    exposures.add_gradient(0, torch.ones(3, 4).to("mgpu"))
    adam.step()
    assert torch.allclose(exposures.maps.detach().cpu()[0], torch.eye(3, 4), atol=1e-7)


def test_its_state_goes_on_elsewhere() -> None:
    """What is saved and loaded steps to the same bits."""
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(3, 4, generator=generator).to("mgpu") for _ in range(4)]
    pairs = []
    for _ in range(2):
        exposures = Exposures(3, "mgpu")
        pairs.append((exposures, ExposureAdam([exposures.maps])))

    def step(which: int, number: int) -> None:
        exposures, adam = pairs[which]
        adam.zero_grad()
        exposures.add_gradient(number % 3, gradients[number])
        adam.step()

    for number in range(3):
        step(0, number)
    with torch.no_grad():
        pairs[1][0].maps.copy_(pairs[0][0].maps)
    pairs[1][1].load_state_dict(pairs[0][1].state_dict())
    for which in (0, 1):
        step(which, 3)
    assert torch.equal(pairs[0][0].maps.detach().cpu(), pairs[1][0].maps.detach().cpu())


def test_colour_correction_undoes_an_affine_map() -> None:
    """What a map of colours explains is gone, noise stays; masked pixels have no say; a flat picture has an answer."""
    target = 0.2 + 0.5 * image_of(30, 40)
    inverse = torch.linalg.inv(
        torch.eye(3) + 0.1 * torch.randn(3, 3, generator=torch.Generator().manual_seed(7))
    )
    rgb = ((target - 0.03) @ inverse.T).to("mgpu")
    assert torch.allclose(color_corrected(rgb, target.to("mgpu")).cpu(), target, atol=1e-5)
    spoilt, mask = target.clone(), torch.ones(30, 40, 1, dtype=torch.bool)
    spoilt[:10], mask[:10] = 1.0, False
    assert torch.allclose(color_corrected(rgb, spoilt, mask).cpu()[10:], target[10:], atol=1e-5)
    noisy = (target + 0.05 * torch.randn(target.shape, generator=torch.Generator().manual_seed(8))).clamp(
        0, 1
    )
    left = float((color_corrected(noisy, target) - target).std())
    assert 0.035 < left < 0.05
    flat = torch.full((4, 4, 3), 0.4)
    assert torch.allclose(color_corrected(flat, flat + 0.1), flat + 0.1, atol=1e-5)
    assert torch.equal(color_corrected(flat, flat + 0.1, torch.zeros(4, 4)), flat)


def test_wrong_arguments_are_named() -> None:
    table = SplatTable.from_columns(**scenes.random_columns(50, 1)).requires_grad_(True)
    adam = SplatAdam(table, {"means": 1e-3})
    (camera,), (target,) = cameras_of(1), photographs(cameras_of(1))
    with pytest.raises(
        ValueError, match=r"exposures\[0\] is Float \[4, 3\].*expected contiguous float32 \[3, 4\]"
    ):
        train_step(table, adam, camera, target, exposures=torch.zeros(4, 3).to("mgpu"))
    with pytest.raises(ValueError, match=r"exposures\[0\] is Float \[3, 4\] on cpu"):
        train_step(table, adam, camera, target, exposures=torch.eye(3, 4))
    with pytest.raises(ValueError, match="1 cameras and 2 exposures"):
        train_step(table, adam, camera, target, exposures=[None, None])
    with pytest.raises(ValueError, match=r"exposure is Float \[3\]"):
        expose(image_of(4, 4).to("mgpu"), torch.zeros(3).to("mgpu"))
    with pytest.raises(ValueError, match=r"Exposures\.maps alone"):
        ExposureAdam([torch.nn.Parameter(torch.zeros(3))])
    assert adam.steps == 0


def test_on_three_shards_with_the_locality_check() -> None:
    """The same tests in a process of their own."""
    scenes.run_on_three_shards(__file__)


@pytest.mark.sanitize
def test_a_step_is_the_same_bits_on_any_mesh(tmp_path: Path) -> None:
    """The map's gradient of one image: sums do not depend on bands. Oracle: the same image as a mesh of one shard has it."""
    if len(torch.mgpu.mesh().shards) > 1:  # type: ignore[attr-defined]
        pytest.skip("needs a mesh of one shard to compare with")
    script = (
        "import sys, torch, ns_mgpu_splat\n"
        "from ns_mgpu_splat.device import native\n"
        "ns_mgpu_splat.init()\n"
        "g = torch.Generator().manual_seed(0)\n"
        "rgb, grad = (torch.rand(97, 301, 3, generator=g).to('mgpu') for _ in range(2))\n"
        "m = (torch.eye(3, 4) + 0.1 * torch.rand(3, 4, generator=g)).to('mgpu')\n"
        "out = [native().expose(rgb, m), *native().expose_backward(rgb, m, grad)]\n"
        "torch.save([t.cpu() for t in out], sys.argv[1])\n"
    )
    shard = str(torch.mgpu.mesh().shards[0])  # type: ignore[attr-defined]
    meshes = ("cpu:1", "cpu:3") if shard.startswith("cpu") else ("0", "0,0,0")
    found = []
    for mesh in meshes:
        file = tmp_path / f"{len(found)}.pt"
        subprocess.run(
            [sys.executable, "-c", script, str(file)], env={**os.environ, "MGPU_DEVICES": mesh}, check=True
        )
        found.append(torch.load(file))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
