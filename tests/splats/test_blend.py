# SPDX-License-Identifier: Apache-2.0
"""Stage "blend": alpha, thresholds, background, depth, early stop, and the way back. Oracles: closed forms, the float64
twin and finite differences taken in it with the contributing pairs held fixed."""

from __future__ import annotations

import math

import pytest
import splat_scenes as scenes
import torch
import twin

from ns_mgpu_splat import render
from ns_mgpu_splat.device import native


def stack_of_splats(opacities: list[float], *, size: float = 0.5) -> dict[str, torch.Tensor]:
    """Round Gaussians one behind the other on the axis, red, green, blue in turn, the nearest first."""
    count = len(opacities)
    color = torch.eye(3).repeat(count, 1)[:count]
    return {
        "means": torch.stack([torch.tensor([0.0, 0.0, 2.0 + 0.1 * i]) for i in range(count)]),
        "quats": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(count, 1),
        "scales": torch.full((count, 3), math.log(size)),
        "opacities": torch.logit(torch.tensor(opacities)),
        "sh0": (color - 0.5) / 0.28209479177387814,
        "shN": torch.zeros(count, 0, 3),
    }


def axis_camera(size: int = 33) -> twin.TwinCamera:
    """Its middle pixel's centre is the principal point."""
    return twin.TwinCamera(torch.eye(4), 40.0, 40.0, size / 2, size / 2, size, size)


def middle(image: torch.Tensor) -> torch.Tensor:
    return image.detach().cpu()[image.shape[0] // 2, image.shape[1] // 2]


def test_exp_is_within_two_ulp() -> None:
    bits = torch.arange(-0x80000000, -0x80000000 + 0x42A00000, 499, dtype=torch.int64).to(
        torch.int32
    )  # -0 to -80
    x = bits.view(torch.float32)
    assert x.min() > -80.001
    truth = x.double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(truth)) - 23)
    assert ((native().exp_negative(x).double() - truth).abs() / ulp).max().item() <= 2.0
    assert native().exp_negative(torch.tensor([-1000.0, -math.inf])).max().item() < 1e-30


def test_two_splats_blend_front_to_back_over_the_background() -> None:
    table = scenes.table_of(stack_of_splats([0.5, 0.25]), requires_grad=False)
    (image,) = render(table, scenes.camera_of(axis_camera()), background=[0.0, 0.0, 1.0])
    assert torch.allclose(middle(image.rgb), torch.tensor([0.5, 0.125, 0.375]), atol=1e-6)
    assert middle(image.accumulation).item() == pytest.approx(0.625, abs=1e-6)
    assert middle(image.depth).item() == pytest.approx((0.5 * 2.0 + 0.125 * 2.1) / 0.625, abs=1e-5)


def test_alpha_is_capped_at_99_percent_and_has_no_gradient_there() -> None:
    table = scenes.table_of(stack_of_splats([0.9999]))
    (image,) = render(table, scenes.camera_of(axis_camera()))
    assert middle(image.accumulation).item() == pytest.approx(0.99, abs=1e-6)
    middle_pixel = image.accumulation[16, 16, 0]
    middle_pixel.backward()
    assert table.opacities.grad.cpu().item() == 0.0


def test_blending_stops_before_the_record_that_would_leave_too_little_light() -> None:
    # T after each: 0.01, 1e-4 (not above the limit): the second one is left out, whatever comes behind
    table = scenes.table_of(stack_of_splats([0.99, 0.99, 0.5]))
    (image,) = render(table, scenes.camera_of(axis_camera()))
    assert torch.allclose(middle(image.rgb), torch.tensor([0.99, 0.0, 0.0]), atol=1e-6)
    image.rgb[16, 16].sum().backward()
    assert torch.count_nonzero(table.sh0.grad.cpu()[1:]) == 0


def test_alpha_below_one_part_in_255_is_skipped() -> None:
    table = scenes.table_of(stack_of_splats([1 / 254, 1 / 256]), requires_grad=False)
    (image,) = render(table, scenes.camera_of(axis_camera()))
    assert torch.allclose(middle(image.rgb), torch.tensor([1 / 254, 0.0, 0.0]), atol=1e-6)


@pytest.mark.parametrize("antialiased", [False, True])
def test_gradients_match_finite_differences_of_the_twin(antialiased: bool) -> None:
    """Central differences along random directions in each input, contributing pairs held fixed."""
    columns = scenes.random_columns(60, 11)
    camera = scenes.random_twin_camera(11, 40, 30)
    background = torch.tensor([0.2, 0.5, 0.9])
    table = scenes.table_of(columns)
    viewmat = camera.viewmat.clone().requires_grad_()
    (image,) = render(
        table, scenes.camera_of(camera, viewmat), background=background, antialiased=antialiased
    )
    weights = scenes.image_weights(1, (30, 40, 3), (30, 40, 1), (30, 40, 1))
    device = image.rgb.device
    loss = sum(
        (part * w.to(device)).sum()
        for part, w in zip((image.rgb, image.accumulation, image.depth_sum), weights, strict=True)
    )
    loss.backward()

    base = {name: column.double() for name, column in columns.items()}
    base_view = camera.viewmat.double()
    pairs = twin.render(base, scenes.in_double(camera), antialiased=antialiased)[3]

    def truth(values: dict[str, torch.Tensor], view: torch.Tensor) -> float:
        eye = twin.TwinCamera(view, camera.fx, camera.fy, camera.cx, camera.cy, camera.width, camera.height)
        rgb, depth, accumulation, _ = twin.render(
            values, eye, background=background.double(), antialiased=antialiased, fixed=pairs
        )
        parts = (rgb, accumulation, depth * accumulation)
        return sum((part * w.double()).sum().item() for part, w in zip(parts, weights, strict=True))

    g = torch.Generator().manual_seed(2)
    step = 1e-6
    for name in (*scenes.COLUMNS, "viewmat"):
        gradient = viewmat.grad[:3] if name == "viewmat" else getattr(table, name).grad.cpu()
        for _ in range(3):
            way = torch.randn(gradient.shape, generator=g, dtype=torch.float64)
            way /= way.norm()
            ends = []
            for sign in (1.0, -1.0):
                if name == "viewmat":
                    view = base_view.clone()
                    view[:3] += sign * step * way
                    ends.append(truth(base, view))
                else:
                    ends.append(truth({**base, name: base[name] + sign * step * way}, base_view))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert (gradient.double() * way).sum().item() == pytest.approx(
                slope, abs=1e-3 * gradient.double().norm().item()
            ), name


def test_absgrad_bounds_the_gradient_of_the_mean() -> None:
    """Sum over pixels of |dL/dmean2d| against |sum|: at least as large, and equal where one pixel alone is looked at."""
    columns = scenes.random_columns(80, 2, degree=0)
    camera = scenes.camera_of(scenes.random_twin_camera(2, 40, 30))
    table = scenes.table_of(columns, requires_grad=False)
    for one_pixel in (False, True):
        frame, ((rgb, _, _),) = native().splat_forward(
            table.columns(), None, None, [camera.arguments()], None, False, 0, True, wanted_absgrad=True
        )
        (weight,) = scenes.image_weights(3, (30, 40, 3))
        if one_pixel:
            weight = weight * 0
            weight[15, 20] = torch.tensor([1.0, -2.0, 0.5])
        native().splat_backward(frame, [(weight.to(rgb.device), None, None)])
        grads = frame.record_grads()
        signed, absolute = grads[:, :2].abs(), grads[:, 10:]
        assert absolute.max() > 0
        if one_pixel:
            assert torch.allclose(signed, absolute, rtol=1e-4, atol=1e-7)
        else:
            assert (absolute >= signed * (1 - 1e-4) - 1e-7).all()
            assert absolute.sum() > 1.2 * signed.sum()
