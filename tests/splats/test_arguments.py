# SPDX-License-Identifier: Apache-2.0
"""Arguments that mean nothing get one sentence that names them, before anything has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import splat_scenes as scenes
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats.densify import DefaultStrategy, McmcStrategy
from ns_mgpu_splat.splats.loss import l1_ssim_loss

LRS = {"means": 1e-3, "opacities": 5e-2}
CAMERA = scenes.camera_of(scenes.random_twin_camera(0, 24, 17))


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


@pytest.fixture
def table() -> SplatTable:
    return SplatTable.from_columns(**scenes.random_columns(20, 0, degree=1), capacity=40)


def bits(table: SplatTable) -> list[torch.Tensor]:
    return [column.detach().cpu().clone() for column in table.columns()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssim_weight": -0.1}, "ssim_weight is -0.1, expected a finite number from 0 to 1"),
        ({"ssim_weight": 1.1}, "ssim_weight is 1.1"),
        ({"ssim_weight": math.nan}, "ssim_weight is nan"),
        ({"ssim_weight": None}, "ssim_weight is None"),
        ({"background": (math.nan, 0, 0)}, r"background\[0\] is nan"),
        ({"background": torch.tensor([0, 0, math.inf])}, r"background\[2\] is inf"),
        ({"lrs": {"means": math.nan}}, r"lrs\['means'\] is nan"),
        ({"lrs": {"means": math.inf}}, r"lrs\['means'\] is inf"),
        ({"lrs": {"means": "fast"}}, r"lrs\['means'\] is 'fast'"),
        ({"lrs": {"means": 1.0, "quats": None}}, r"lrs\['quats'\] is None"),
        ({"sh_degree": 0.5}, "sh_degree is 0.5"),
        ({"sh_degree": "all"}, "sh_degree is 'all'"),
        ({"targets": None}, "targets is a NoneType"),
        ({"targets": 3}, "targets is a int"),
        ({"targets": [None]}, r"targets\[0\] is a NoneType, expected a tensor\."),
        ({"targets": {"a": None}}, "targets is a dict"),
        ({"masks": "none"}, "masks is a str"),
        ({"masks": [3]}, r"masks\[0\] is a int, expected a tensor or None"),
        ({"exposures": [1.0]}, r"exposures\[0\] is a float, expected a tensor or None"),
    ],
)
def test_a_step_with_a_bad_argument_changes_nothing(
    table: SplatTable, options: dict[str, Any], words: str
) -> None:
    optimizer = SplatAdam(table, LRS)
    before, rates = bits(table), dict(optimizer.lrs)
    arguments = {"targets": torch.zeros(17, 24, 3, device="mgpu"), **options}
    with pytest.raises(ValueError, match=words):
        train_step(table, optimizer, CAMERA, **arguments)
    assert optimizer.steps == 0
    assert optimizer.lrs == rates
    assert all(torch.equal(a, b) for a, b in zip(before, bits(table), strict=True))


def test_a_loss_is_weighed_within_its_range() -> None:
    image = torch.rand(17, 24, 3).to("mgpu")
    for weight in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"ssim_weight is {weight}"):
            l1_ssim_loss(image, image, ssim_weight=weight)


def test_a_render_names_what_it_cannot_draw(table: SplatTable) -> None:
    with pytest.raises(ValueError, match=r"background\[1\] is inf"):
        render(table, CAMERA, background=(0, math.inf, 0))
    with pytest.raises(ValueError, match=r"sh_degree is 0\.5"):
        render(table, CAMERA, sh_degree=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9,)}, r"betas is \(0.9,\), expected two numbers"),
        ({"opacity_reg": math.nan}, "opacity_reg is nan"),
        ({"scale_reg": math.inf}, "scale_reg is inf"),
        ({"noise_lr": math.nan}, "noise_lr is nan"),
        ({"noise_lr": -1.0}, "noise_lr is -1.0"),
        ({"seed": -1}, "seed is -1, expected a whole number from 0 to"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.5}, "seed is 1.5"),
    ],
)
def test_an_optimizer_names_what_it_cannot_do(table: SplatTable, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SplatAdam(table, LRS, **options)


@pytest.mark.parametrize("index", [[1, 2], torch.tensor([1.5]), torch.tensor([True, False])])
def test_rows_to_reset_are_whole_numbers(table: SplatTable, index: Any) -> None:
    with pytest.raises(ValueError, match="expected int64 numbers of rows"):
        SplatAdam(table, LRS).reset_rows(index)


def test_an_optimizer_says_how_to_copy_it(table: SplatTable) -> None:
    with pytest.raises(TypeError, match=r"load this one's state_dict\(\)"):
        copy.deepcopy(SplatAdam(table, LRS))


@pytest.mark.parametrize("kind", [McmcStrategy, DefaultStrategy])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_gaussians": 1.5}, "max_gaussians is 1.5, expected a whole number"),
        ({"max_gaussians": math.nan}, "max_gaussians is nan"),
        ({"max_gaussians": "many"}, "max_gaussians is 'many'"),
        ({"refine_every": 1.5}, "refine_every is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_a_strategy_is_refused_before_the_first_step(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**{"max_gaussians": 100, **options})


@pytest.mark.parametrize(
    "name", ["grow_gradient", "split_scale", "prune_scale", "split_radius", "prune_radius"]
)
def test_thresholds_are_numbers(name: str) -> None:
    """With NaN nothing is ever above or below, without a word."""
    with pytest.raises(ValueError, match=f"{name} is nan"):
        DefaultStrategy(100, **{name: math.nan})  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_growth_is_finite(factor: float) -> None:
    with pytest.raises(ValueError, match=f"grow_factor is {factor}"):
        McmcStrategy(100, grow_factor=factor)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: SplatTable(1.5), "num_rows is 1.5, expected a whole number"),  # type: ignore[arg-type]
        (lambda _: SplatTable(1, capacity=2.5), "capacity is 2.5"),  # type: ignore[arg-type]
        (lambda table: table.grow(30.5), "rows is 30.5"),
        (lambda table: table.grow("more"), "rows is 'more'"),
        (lambda table: table.shrink(-1), "rows is -1"),
        (lambda table: table.shrink(1.5), "rows is 1.5"),
        (lambda table: table.resize(-1), "rows is -1"),
    ],
)
def test_rows_are_whole_numbers(
    table: SplatTable, change: Callable[[SplatTable], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        change(table)
    assert (table.num_rows, table.capacity) == (20, 40)


@pytest.mark.parametrize(
    ("begin", "values", "words"),
    [
        (18, {"means": torch.ones(3, 3)}, "Rows 18 to 21 do not fit into a table of 20 rows"),
        (-3, {"means": torch.ones(3, 3)}, "begin is -3"),
        (0, {"means": torch.ones(3, 3), "colors": torch.ones(3, 3)}, r"values names \['colors'\]"),
        (0, {"means": torch.ones(3, 3), "quats": torch.ones(3, 3)}, r"quats is \[3, 3\], expected \[3, 4\]"),
        (0, {"means": torch.ones(3, 3), "quats": torch.ones(2, 4)}, r"quats is \[2, 4\], expected \[3, 4\]"),
    ],
)
def test_rows_that_do_not_fit_are_not_written(
    table: SplatTable, begin: int, values: dict[str, torch.Tensor], words: str
) -> None:
    before = bits(table)
    with pytest.raises(ValueError, match=words):
        table.write_rows(begin, values)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(table), strict=True))
