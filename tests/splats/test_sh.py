# SPDX-License-Identifier: Apache-2.0
"""Colours from spherical harmonics: order, signs, clamp, gradients. Oracles: gsplat's PyTorch reference, the twin."""

from __future__ import annotations

import pytest
import splat_scenes as scenes
import torch
import twin

from ns_mgpu_splat.splats import project


def test_garden_colours_match_gsplat_reference() -> None:
    """Colours to 1e-4, gradients to 1e-3 relative; bands large enough that some colours are clamped."""
    from gsplat.cuda._torch_impl import _spherical_harmonics

    from ns_mgpu_splat import Camera

    columns, viewmats, calibration, width, height = scenes.garden(higher_bands=0.3)
    table = scenes.table_of(columns)
    records = project(table, Camera.from_K(viewmats[0], calibration[0], width, height))
    row = records.row.cpu()
    means = columns["means"].clone().requires_grad_()
    sh = torch.cat([columns["sh0"][:, None], columns["shN"]], 1).requires_grad_()
    directions = means - torch.inverse(viewmats[0])[:3, 3]
    reference = (_spherical_harmonics(3, directions, sh) + 0.5).clamp_min(0.0)[row]
    assert 0.01 < (reference == 0).double().mean().item() < 0.5
    assert (records.colors.detach().cpu() - reference.detach()).abs().max().item() <= 1e-4
    (weight,) = scenes.image_weights(1, (len(row), 3))
    (records.colors * weight.to(records.colors.device)).sum().backward()
    (reference * weight).sum().backward()
    assert scenes.relative_l2(table.sh0.grad, sh.grad[:, 0]) <= 1e-3
    assert scenes.relative_l2(table.shN.grad, sh.grad[:, 1:]) <= 1e-3
    assert scenes.relative_l2(table.means.grad, means.grad) <= 1e-3


@pytest.mark.parametrize("used", [0, 1, 2])
def test_lower_degree_uses_the_first_bands_only(used: int) -> None:
    columns = scenes.random_columns(200, 8, degree=3)
    camera = scenes.random_twin_camera(8, 50, 40)
    table = scenes.table_of(columns)
    records = project(table, scenes.camera_of(camera), sh_degree=used)
    truth = twin.project(
        {k: v.double() for k, v in columns.items()},
        scenes.in_double(camera),
        antialiased=False,
        sh_degree=used,
    )
    assert torch.allclose(records.colors.detach().cpu().double(), truth.colors[records.row.cpu()], atol=1e-5)
    records.colors.sum().backward()
    bands = (used + 1) ** 2 - 1
    assert not table.shN.grad[:, bands:].cpu().any()
    assert bands == 0 or table.shN.grad[:, :bands].cpu().any()


def test_degree_above_the_tables_is_refused() -> None:
    table = scenes.table_of(scenes.random_columns(5, 0, degree=1))
    with pytest.raises(ValueError, match=r"sh_degree is 2, but the table's shN is \[5, 3, 3\]"):
        project(table, scenes.camera_of(scenes.random_twin_camera(0, 20, 20)), sh_degree=2)
