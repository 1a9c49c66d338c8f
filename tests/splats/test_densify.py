# SPDX-License-Identifier: Apache-2.0
"""MCMC densification against the paper's formulas in float64, and a chi-square test of the draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.loss import l1_ssim_loss
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.table import COLUMNS

MIN_OPACITY = 0.005


@pytest.fixture(scope="module")
def device() -> torch.device:
    return ns_mgpu_splat.init()


def random_columns(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "means": normal(rows, 3),
        "quats": normal(rows, 4),
        "scales": normal(rows, 3) - 2,
        "opacities": normal(rows),
        "sh0": normal(rows, 3),
        "shN": normal(rows, 3, 3),
    }


def make(
    rows: int, capacity: int | None = None, **changes: Tensor
) -> tuple[SplatTable, SplatAdam, dict[str, Tensor]]:
    """A table, an optimizer with non-zero moments, and the table's columns on the host."""
    columns = {**random_columns(rows), **changes}
    table = SplatTable.from_columns(**columns, capacity=capacity)
    adam = SplatAdam(table, {})
    for name in COLUMNS:
        adam.exp_avg[name].fill_(1.0)
        adam.exp_avg_sq[name].fill_(2.0)
    return table, adam, columns


def natives(table: SplatTable) -> list[Tensor]:
    return [column.detach() for column in table.columns()]


def host(table: SplatTable) -> dict[str, Tensor]:
    return {name: column.detach().cpu().clone() for name, column in table.named_columns().items()}


def row_list(rows: list[int] | Tensor, num_rows: int) -> Any:
    return native().RowList(torch.as_tensor(rows, dtype=torch.int64), num_rows)


def sample(table: SplatTable, count: int, seed: int, step: int) -> Tensor:
    return native().sample_rows(natives(table), MIN_OPACITY, count, seed, step).tensor()


def paper_relocation(opacity: float, copies: int) -> tuple[float, float]:
    """Equation 9 of Kheradmand et al. 2024 as printed: new opacity, and new scale per old scale."""
    new = 1 - (1 - opacity) ** (1 / copies)
    total = sum(
        math.comb(i - 1, k) * (-1) ** k / math.sqrt(k + 1) * new ** (k + 1)
        for i in range(1, copies + 1)
        for k in range(i)
    )
    return new, opacity / total


@pytest.mark.parametrize("copies", [1, 2, 3, 9, 50])
def test_relocation_is_equation_9(copies: int, device: torch.device) -> None:
    """`copies` copies of one row: all n = copies + 1 get its formula; the rest of the table stays."""
    opacities = torch.tensor([0.02, 0.3, 0.9, 0.999])
    rows = 4 + 4 * copies + 1
    logits = torch.cat([torch.logit(opacities), torch.full((rows - 4,), -9.0)])
    table, adam, before = make(rows, opacities=logits)
    sources = torch.arange(4).repeat_interleave(copies)
    adam.history = native().AdamHistory(7, 0.9, 0.999, 1e-15, 0)
    listed, to = row_list(sources, rows), native().RowList.consecutive(4, rows - 1)
    native().relocate(natives(table), adam.state(), listed, to, MIN_OPACITY, 7)
    after = host(table)
    for source, opacity in enumerate(opacities.double().tolist()):
        new, ratio = paper_relocation(opacity, copies + 1)
        mine = [source, *range(4 + source * copies, 4 + (source + 1) * copies)]
        expected = min(max(new, MIN_OPACITY), 1 - 2**-23)
        assert torch.allclose(
            after["opacities"][mine].double().sigmoid(), torch.tensor(expected).double(), rtol=1e-5
        )
        scale = before["scales"][source].double() + math.log(ratio)
        assert torch.allclose(after["scales"][mine].double(), scale.expand(len(mine), 3), atol=2e-5)
        for name in ("means", "quats", "sh0", "shN"):
            assert torch.equal(after[name][mine], before[name][[source] * len(mine)]), name
    for name in COLUMNS:
        assert torch.equal(after[name][-1], before[name][-1]), name
        for moments, untouched in ((adam.exp_avg, 1.0), (adam.exp_avg_sq, 2.0)):
            assert float(moments[name].cpu()[:-1].abs().sum()) == 0.0
            assert bool((moments[name].cpu()[-1] == untouched).all())
    assert adam.last_step.cpu().tolist() == [7] * (rows - 1) + [0]


def test_more_copies_than_51_count_as_51(device: torch.device) -> None:
    logits = torch.cat([torch.logit(torch.tensor([0.9])), torch.full((80,), -9.0)])
    table, _, before = make(81, opacities=logits)
    listed, to = row_list([0] * 80, 81), row_list(torch.arange(1, 81), 81)
    native().relocate(natives(table), None, listed, to, MIN_OPACITY, 0)
    new, ratio = paper_relocation(0.9, 51)
    after = host(table)
    assert torch.allclose(after["opacities"].double().sigmoid(), torch.tensor(new).double(), rtol=1e-5)
    assert torch.allclose(after["scales"], before["scales"][:1].expand(81, 3) + math.log(ratio), atol=2e-5)


def test_split_keeps_the_opacity_of_the_whole(device: torch.device) -> None:
    """What equation 9 preserves: the opacity at the centre, and its integral along a line through it."""
    logits = torch.cat([torch.logit(torch.tensor([0.8])), torch.full((4,), -9.0)])
    columns = {
        **random_columns(5),
        "opacities": logits,
        "means": torch.tensor([[0.0, 0.0, 5.0]]).repeat(5, 1),
    }
    columns["scales"] = torch.full(
        (5, 3), math.log(1.0)
    )  # 16 pixels: the dilation by 0.3 pixels does not count
    table = SplatTable.from_columns(**columns)
    view = Camera(torch.eye(4), 80.0, 80.0, 64.5, 64.5, 129, 129)
    before = render(table, view)[0].accumulation.detach().cpu()[..., 0]
    native().relocate(natives(table), None, row_list([0] * 4, 5), row_list([1, 2, 3, 4], 5), MIN_OPACITY, 0)
    after = render(table, view)[0].accumulation.detach().cpu()[..., 0]
    assert abs(float(before[64, 64]) - 0.8) < 1e-3
    assert abs(float(after[64, 64] - before[64, 64])) < 1e-3
    assert abs(float(after[64].sum() / before[64].sum()) - 1) < 0.02


def test_draws_are_proportional_to_opacity(device: torch.device) -> None:
    """Chi-square over 40 rows and 200,000 draws; the seed is fixed, so it cannot fail by chance tomorrow."""
    rows, draws = 40, 200_000
    table, _, columns = make(rows)
    sampled = sample(table, draws, 3, 17)
    assert torch.equal(sampled, sampled.sort().values)
    expected = columns["opacities"].double().sigmoid()
    expected = expected / expected.sum() * draws
    count = torch.bincount(sampled, minlength=rows).double()
    chi_square = float(((count - expected) ** 2 / expected).sum())
    assert 15 < chi_square < 75, chi_square  # 39 degrees of freedom: outside with probability 1e-3


def test_draws_depend_on_seed_and_step(device: torch.device) -> None:
    table, _, _ = make(500)
    first = sample(table, 300, 1, 1)
    assert torch.equal(first, sample(table, 300, 1, 1))
    assert not torch.equal(first, sample(table, 300, 1, 2))
    assert not torch.equal(first, sample(table, 300, 2, 1))


def test_dead_and_broken_rows_are_found_and_never_drawn(device: torch.device) -> None:
    rows = 20_000  # several pieces of the row range
    columns = random_columns(rows)
    columns["opacities"][::7] = math.log(0.004 / 0.996)
    columns["means"][5, 1] = float("nan")
    columns["quats"][6, 0] = float("inf")
    columns["scales"][9, 2] = float("nan")
    columns["opacities"][15_000] = float("nan")
    table, _, _ = make(rows, **columns)
    dead = native().dead_rows(natives(table), MIN_OPACITY).tensor()
    expected = sorted({*range(0, rows, 7), 5, 6, 9, 15_000})
    assert dead.tolist() == expected
    sampled = sample(table, 30_000, 0, 0)
    assert len(sampled) == 30_000
    assert not set(sampled.tolist()) & set(expected)
    assert int(sampled.max()) > 19_000
    assert int(sampled.min()) < 1_000


def test_nothing_alive_gives_no_draws_and_moves_nothing(device: torch.device) -> None:
    table, adam, before = make(30, capacity=60, opacities=torch.full((30,), -9.0))
    sources = native().sample_rows(natives(table), MIN_OPACITY, 10, 0, 0)
    assert sources.tensor().tolist() == [-1] * 10
    native().relocate(natives(table), adam.state(), sources, row_list(list(range(5, 15)), 30), MIN_OPACITY, 0)
    assert all(torch.equal(column, before[name]) for name, column in host(table).items())
    strategy = McmcStrategy(60, refine_start=0, refine_every=1)
    assert strategy.post_step(table, adam, 1) == {"relocated": 0, "added": 0, "total": 30}
    empty = SplatTable(0, capacity=10)
    assert strategy.post_step(empty, SplatAdam(empty, {}), 1)["total"] == 0


def test_strategy_grows_in_place_up_to_the_cap(device: torch.device) -> None:
    table, adam, _ = make(100, capacity=130)
    table.requires_grad_(True)
    parameters, addresses = table.columns(), [column.data_ptr() for column in table.columns()]
    strategy = McmcStrategy(120, refine_start=0, refine_stop=100, refine_every=10)
    totals = []
    for step in range(1, 61):
        adam.step()
        report = strategy.post_step(table, adam, step)
        assert report["total"] == table.num_rows == adam.last_step.shape[0] <= 120
        if report["added"]:
            totals.append(report["total"])
    assert totals == [105, 111, 117, 120]
    assert all(a is b for a, b in zip(parameters, table.columns(), strict=True))
    assert addresses == [column.data_ptr() for column in table.columns()]
    assert all(column.requires_grad for column in table.columns())
    assert all(bool(column.isfinite().all()) for column in table.columns())
    assert adam.last_step.cpu().tolist() == [60] * 120


def test_strategy_moves_the_dead_onto_the_living(device: torch.device) -> None:
    logits = random_columns(300)["opacities"]
    logits[50:80] = -9.0
    table, adam, before = make(300, opacities=logits)
    strategy = McmcStrategy(300, refine_start=0, refine_every=1)
    assert strategy.post_step(table, adam, 1) == {"relocated": 30, "added": 0, "total": 300}
    after = host(table)
    assert float(after["opacities"].sigmoid().min()) >= MIN_OPACITY * (1 - 1e-5)
    living = {tuple(row) for row in before["means"].tolist()[:50] + before["means"].tolist()[80:]}
    assert {tuple(row) for row in after["means"].tolist()} <= living
    moved = (after["opacities"] != before["opacities"]).nonzero()[:, 0].tolist()
    for name in COLUMNS:
        assert float(adam.exp_avg[name].cpu()[moved].abs().sum()) == 0.0


def orbit(angle: float, height: float) -> Camera:
    """On a circle of radius 4, looking at the origin; 80 x 60 pixels."""
    centre = torch.tensor([4 * math.cos(angle), height, 4 * math.sin(angle)])
    forward = -centre / centre.norm()
    right = torch.linalg.cross(forward, torch.tensor([0.0, 1.0, 0.0]))
    right = right / right.norm()
    viewmat = torch.eye(4)
    viewmat[:3, :3] = torch.stack([right, torch.linalg.cross(forward, right), forward])
    viewmat[:3, 3] = -viewmat[:3, :3] @ centre
    return Camera(viewmat, 90.0, 90.0, 40.0, 30.0, 80, 60)


def test_training_with_densification_fits_held_out_views(device: torch.device) -> None:
    """All parts together: from 300 grey points at random places to the picture of a coloured, dented ball."""
    generator = torch.Generator().manual_seed(0)
    ball = torch.randn(2000, 3, generator=generator)
    ball = ball / ball.norm(dim=1, keepdim=True)
    ball = ball * (1 + 0.3 * torch.sin(5 * ball[:, :1]))
    truth = SplatTable.from_points(ball, 0.5 + 0.5 * torch.sin(6 * ball), sh_degree=0, opacity=0.9)
    train = [orbit(2 * math.pi * i / 10, math.sin(i)) for i in range(10)]
    held = [orbit(2 * math.pi * (i + 0.5) / 10, 0.3) for i in range(0, 10, 3)]
    with torch.no_grad():
        targets = [(image.rgb.clamp(0, 1) * 255).round().to(torch.uint8) for image in render(truth, train)]
        unseen = [image.rgb for image in render(truth, held)]
    seeds = 0.8 * torch.randn(300, 3, generator=generator)
    table = SplatTable.from_points(seeds, max_gaussians=600, sh_degree=1, opacity=0.5).requires_grad_(True)
    lrs = {"means": 1.6e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 1e-2, "shN": 5e-4}
    adam = SplatAdam(table, lrs, opacity_reg=0.01, scale_reg=0.01, noise_lr=5e4)
    strategy = McmcStrategy(600, refine_start=20, refine_stop=300, refine_every=10)

    def psnr() -> float:
        adam.flush()
        with torch.no_grad():
            pairs = zip(render(table, held), unseen, strict=True)
            return sum(
                float(-10 * ((image.rgb - truth) ** 2).mean().log10()) for image, truth in pairs
            ) / len(held)

    before = psnr()
    for step in range(1, 401):
        view = 7 * step % 10
        l1_ssim_loss(render(table, train[view], optimizer=adam)[0].rgb, targets[view]).backward()
        adam.step({"means": 1.6e-3 * 0.01 ** (step / 400)})
        strategy.post_step(table, adam, step)
    assert table.num_rows == 600
    assert psnr() > before + 8
    assert psnr() > 18


def test_refinement_schedule(device: torch.device) -> None:
    strategy = McmcStrategy(10, refine_start=500, refine_stop=1000, refine_every=100)
    assert [step for step in range(1200) if strategy.refines_at(step)] == [600, 700, 800, 900]
    again = McmcStrategy(10)
    again.load_state_dict(McmcStrategy(10, seed=42).state_dict())
    assert again.seed == 42


def test_misuse_is_explained(device: torch.device) -> None:
    table, adam, _ = make(20)
    with pytest.raises(ValueError, match="20 rows, above the cap of 10"):
        McmcStrategy(10).post_step(table, adam, 1)
    with pytest.raises(ValueError, match="max_gaussians is 0"):
        McmcStrategy(0)
    with pytest.raises(ValueError, match="rows must ascend"):
        row_list([3, 1], 20)
    with pytest.raises(ValueError, match=r"rows must ascend and lie in \[0, 20\)"):
        row_list([5, 20], 20)
    with pytest.raises(ValueError, match="1 source rows for 2 destination rows"):
        native().relocate(natives(table), None, row_list([1], 20), row_list([5, 6], 20), MIN_OPACITY, 0)
    columns = natives(table)
    columns[1] = columns[1][:, :3]
    with pytest.raises(ValueError, match=r"quats is .*expected contiguous float32 with 20 rows"):
        native().dead_rows(columns, MIN_OPACITY)
