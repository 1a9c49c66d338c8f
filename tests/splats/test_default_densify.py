# SPDX-License-Identifier: Apache-2.0
"""Default densification against plain torch on the CPU, and its statistics against the float64 twin."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import twin
from splat_scenes import camera_of, double_columns, in_double, random_columns, random_twin_camera, table_of
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable, render
from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.order import RowOrder
from ns_mgpu_splat.splats.densify import DefaultStrategy
from ns_mgpu_splat.splats.loss import l1_ssim_loss
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.statistics import RowStatistics
from ns_mgpu_splat.splats.table import COLUMNS

GONE, KEPT, CLONED, SPLIT = range(4)


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def make(
    rows: int, capacity: int | None = None, seed: int = 0
) -> tuple[SplatTable, SplatAdam, dict[str, Any]]:
    """A table, an optimizer with moments and random statistics, and copies of all on the host."""
    columns = random_columns(rows, seed, degree=1)
    table = SplatTable.from_columns(**columns, capacity=capacity or 2 * rows).requires_grad_(True)
    adam = SplatAdam(table, {})
    for name in COLUMNS:
        adam.exp_avg[name].fill_(1.0)
        adam.exp_avg_sq[name].fill_(2.0)
    generator = torch.Generator().manual_seed(seed)
    statistics = RowStatistics(rows, table.capacity, radius=True)
    views = torch.randint(0, 5, (rows,), generator=generator, dtype=torch.int32)
    gradient = views * torch.rand(rows, generator=generator) * 4e-4
    radius = 0.2 * torch.rand(rows, generator=generator) ** 3
    statistics.views.copy_(views)
    statistics.gradient.copy_(gradient)
    assert statistics.radius is not None
    statistics.radius.copy_(radius)
    adam.statistics = statistics
    return table, adam, {**columns, "views": views, "gradient": gradient, "radius": radius}


def fates(host: dict[str, Tensor], strategy: DefaultStrategy, step: int, room: int) -> Tensor:
    """gsplat's order of rules: grow first, prune all that is there then; under the cap, highest gradients first."""
    scale = host["scales"].exp().amax(1)
    mean = host["gradient"] / host["views"].clamp_min(1)
    high = mean > strategy.grow_gradient
    small = scale <= strategy.split_scale * strategy.scene_scale
    split = high & ~small
    screen, late = step < strategy.screen_stop, step > strategy.reset_every
    if screen:
        split |= host["radius"] > strategy.split_radius
    clone = high & small & ~split
    after = torch.where(split, scale / 1.6, scale)
    gone = host["opacities"].sigmoid() < strategy.prune_opacity
    if late:
        gone |= after > strategy.prune_scale * strategy.scene_scale
        if screen:
            gone |= host["radius"] > strategy.prune_radius
    gone |= ~(
        host["means"].isfinite().all(1) & host["quats"].isfinite().all(1) & host["scales"].isfinite().all(1)
    )
    fate = torch.full((len(scale),), KEPT)
    fate[clone], fate[split], fate[gone] = CLONED, SPLIT, GONE
    wanted = [(-float(mean[row]), row) for row in range(len(scale)) if fate[row] in (CLONED, SPLIT)]
    allowed = max(0, room - int((fate != GONE).sum()))
    for _, row in sorted(wanted)[allowed:]:
        fate[row] = KEPT
    return fate


def check(table: SplatTable, adam: SplatAdam, host: dict[str, Tensor], fate: Tensor, now: int) -> None:
    """The table holds what these fates make of `host`, in order."""
    copies = torch.tensor([0, 1, 2, 2])[fate]
    parent = torch.arange(len(fate)).repeat_interleave(copies)
    second = torch.zeros(len(parent), dtype=torch.bool)
    second[1:] = parent[1:] == parent[:-1]
    new = second | (fate[parent] == SPLIT)
    split = fate[parent] == SPLIT
    got = {name: column.detach().cpu() for name, column in table.named_columns().items()}
    assert table.num_rows == len(parent)
    for name in ("quats", "opacities", "sh0", "shN"):
        assert torch.equal(got[name].nan_to_num(9), host[name][parent].nan_to_num(9)), name
    assert torch.equal(got["means"][~split], host["means"][parent[~split]])
    assert torch.equal(got["scales"][~split], host["scales"][parent[~split]])
    assert torch.allclose(got["scales"][split], host["scales"][parent[split]] - math.log(1.6), atol=1e-6)
    for name in COLUMNS:
        for moments, value in ((adam.exp_avg, 1.0), (adam.exp_avg_sq, 2.0)):
            moment = (
                moments[name].cpu().flatten(1) if moments[name].dim() > 1 else moments[name].cpu()[:, None]
            )
            assert bool((moment[new] == 0).all()), name
            assert bool((moment[~new] == value).all()), name
    assert bool((adam.last_step.cpu()[new] == now).all())
    if split.any():  # children lie as the parent's Gaussian says
        offset = (got["means"] - host["means"][parent])[split].double()
        rotation = twin.rotation(host["quats"][parent[split]].double())
        normal = (rotation.transpose(1, 2) @ offset[..., None])[..., 0] / host["scales"][
            parent[split]
        ].double().exp()
        assert bool(normal.isfinite().all())
        if len(normal) > 300:
            assert float(normal.mean(0).abs().max()) < 4 / math.sqrt(len(normal))
            assert float((torch.cov(normal.T) - torch.eye(3)).abs().max()) < 6 / math.sqrt(len(normal))
            pairs = normal[:-1][second[split][1:]] * normal[1:][second[split][1:]]
            assert float(pairs.mean(0).abs().max()) < 4 / math.sqrt(len(pairs))  # siblings are independent


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (600, {}),
        (600, {"screen_stop": 4000}),
        (3100, {"screen_stop": 4000, "prune_scale": 0.4}),
        (5000, {"scene_scale": 20.0, "screen_stop": 4000}),
    ],
)
def test_rows_become_what_the_rules_say(step: int, options: dict[str, float]) -> None:
    table, adam, host = make(6_000, seed=step)
    for name, at in (("means", 5), ("quats", 77), ("scales", 901)):
        with torch.no_grad():
            getattr(table, name).detach()[at, 1] = float("nan")
        host[name][at, 1] = float("nan")
    strategy = DefaultStrategy(12_000, **options)
    fate = fates(host, strategy, step, 12_000)
    assert all(int((fate == value).sum()) > 0 for value in (GONE, KEPT))
    assert int((fate == SPLIT).sum()) > 300
    parameters, addresses = table.columns(), [column.data_ptr() for column in table.columns()]
    report = strategy.post_step(table, adam, step)
    assert report == {
        "pruned": int((fate == GONE).sum()),
        "added": int((fate >= CLONED).sum()),
        "total": table.num_rows,
    }
    check(table, adam, host, fate, 0)
    assert all(a is b for a, b in zip(parameters, table.columns(), strict=True))
    assert addresses == [column.data_ptr() for column in table.columns()]
    assert adam.statistics is not None
    assert all(len(t) == table.num_rows and not t.any() for t in adam.statistics.tensors())


@pytest.mark.parametrize("room", [0, 1, 400, 10_000])
def test_the_cap_takes_the_highest_gradients(room: int) -> None:
    table, adam, host = make(4_000, capacity=14_000)
    host["gradient"][::3] = host["views"][::3] * 3e-4  # equal ones: lower rows first
    assert adam.statistics is not None
    adam.statistics.gradient.copy_(host["gradient"])
    mean = (host["gradient"] / host["views"].clamp_min(1)).float()
    cap = 4_000 + room
    strategy = DefaultStrategy(cap, prune_opacity=1e-6)
    fate = fates({**host, "gradient": mean, "views": torch.ones_like(host["views"])}, strategy, 600, cap)
    report = strategy.post_step(table, adam, 600)
    assert report["total"] == table.num_rows <= cap
    assert report["added"] == int((fate >= CLONED).sum())
    check(table, adam, host, fate, 0)


def test_all_may_go_and_nothing_may_happen() -> None:
    table, adam, _ = make(300)
    strategy = DefaultStrategy(600, prune_opacity=0.49)
    with torch.no_grad():
        table.opacities.detach().fill_(-3.0)
    assert strategy.post_step(table, adam, 600) == {"pruned": 300, "added": 0, "total": 0}
    assert table.num_rows == 0
    adam.step()
    assert strategy.post_step(table, adam, 700)["total"] == 0
    table, adam, _ = make(300)
    before = table.means.detach().cpu().clone()
    quiet = DefaultStrategy(600, prune_opacity=1e-9, grow_gradient=math.inf)
    assert quiet.post_step(table, adam, 600) == {"pruned": 0, "added": 0, "total": 300}
    assert torch.equal(table.means.detach().cpu(), before)


def test_children_depend_on_seed_step_and_row_alone() -> None:
    def children(seed: int, step: int) -> Tensor:
        table, adam, _ = make(500)
        DefaultStrategy(1_000, seed=seed).post_step(table, adam, step)
        return table.means.detach().cpu()

    assert torch.equal(children(1, 600), children(1, 600))
    assert not torch.equal(children(1, 600), children(1, 700))
    assert not torch.equal(children(1, 600), children(2, 600))


def test_opacities_are_reset_at_their_steps() -> None:
    table, adam, host = make(200)
    strategy = DefaultStrategy(400, refine_start=10_000)
    assert [step for step in range(16_000) if strategy.resets_at(step)] == [3000, 6000, 9000, 12_000]
    strategy.post_step(table, adam, 2999)
    assert torch.equal(table.opacities.detach().cpu(), host["opacities"])
    strategy.post_step(table, adam, 3000)
    expected = host["opacities"].sigmoid().clamp_max(0.01)
    assert torch.allclose(table.opacities.detach().cpu().sigmoid(), expected, atol=1e-6)
    assert not adam.exp_avg["opacities"].any()
    assert not adam.exp_avg_sq["opacities"].any()
    assert bool((adam.exp_avg["means"] == 1).all())


def test_refinement_schedule_and_pause() -> None:
    strategy = DefaultStrategy(10, refine_stop=3500, reset_every=3000, pause_after_reset=150)
    refined = [step for step in range(5000) if strategy.refines_at(step)]
    assert refined == [*range(600, 3000, 100), 3200, 3300, 3400]


@pytest.mark.parametrize("absgrad", [False, True])
def test_statistics_are_the_twins_gradients(absgrad: bool) -> None:
    """Two views in one step, then one more step: sums over views of the gradient in half image sizes, and their number."""
    columns = random_columns(60, 4, degree=0)
    table = table_of(columns)
    adam = SplatAdam(table, {})
    adam.statistics = RowStatistics(60, 60, absgrad=absgrad, radius=True)
    cameras = [random_twin_camera(seed, 16 + 8 * seed, 12) for seed in range(3)]
    weights = [
        torch.randn(c.height, c.width, 3, generator=torch.Generator().manual_seed(i))
        for i, c in enumerate(cameras)
    ]
    expected, seen, radius = torch.zeros(60).double(), torch.zeros(60), torch.zeros(60).double()
    for views in ([0, 1], [2]):
        images = render(table, [camera_of(cameras[v]) for v in views], optimizer=adam)
        loss = sum(
            (image.rgb * weights[v].to(image.rgb.device)).sum()
            for image, v in zip(images, views, strict=True)
        )
        (loss / len(views)).backward()
        adam.step()
        for v in views:
            camera = in_double(cameras[v])
            p = twin.project(double_columns(columns), camera, antialiased=False, sh_degree=0)
            shape = (camera.height, camera.width)
            half = torch.tensor([camera.width / 2, camera.height / 2]).double()
            pull = torch.zeros(60, 2).double()
            if absgrad:
                pull = pixel_pulls(p, camera, weights[v].double())
            else:
                p.means2d.retain_grad()
                image, *_ = twin.blend(p, camera, None)
                (image * weights[v].double()).sum().backward()
                pull = p.means2d.grad
            records = native_rows(table, cameras[v])
            visible = torch.zeros(60, dtype=torch.bool)
            visible[records] = True
            expected += torch.where(visible, (pull * half).norm(dim=1), 0.0)
            seen += visible
            a, b, c = p.conics.detach().unbind(1)
            variance = 1 / (0.5 * (a + c) - (0.25 * (a - c) ** 2 + b * b).sqrt())
            radius = torch.maximum(radius, torch.where(visible, 3 * variance.sqrt() / max(shape), 0.0))
    assert torch.equal(adam.statistics.views.cpu(), seen.int())
    got = adam.statistics.gradient.cpu().double()
    assert float((got - expected).norm() / expected.norm()) < 1e-3
    assert adam.statistics.radius is not None
    assert torch.allclose(adam.statistics.radius.cpu().double(), radius, rtol=1e-3)


def native_rows(table: SplatTable, camera: twin.TwinCamera) -> Tensor:
    """Rows that our projection keeps."""
    from ns_mgpu_splat.splats.project import project

    return project(table, camera_of(camera)).row.cpu()


def pixel_pulls(p: twin.Projected, camera: twin.TwinCamera, weights: Tensor) -> Tensor:
    """(N, 2): sums over pixels of |dL/d(position)|, one pixel's loss at a time."""
    image, *_ = twin.blend(p, camera, None)
    losses = (image * weights).sum(-1).flatten()
    each = torch.eye(len(losses), dtype=losses.dtype)
    (pulls,) = torch.autograd.grad(losses, p.means2d, each, is_grads_batched=True)
    return pulls.abs().sum(0)


def test_statistics_are_saved_and_end_with_the_refinements() -> None:
    table, adam, host = make(50)
    again = SplatAdam(table, {})
    again.load_state_dict(adam.state_dict())
    assert again.statistics is not None
    assert torch.equal(again.statistics.gradient.cpu(), host["gradient"])
    assert torch.equal(again.statistics.views.cpu(), host["views"])
    strategy = DefaultStrategy(100, refine_stop=700)
    strategy.post_step(table, adam, 700)
    assert adam.statistics is None


def test_training_with_default_densification_fits_and_keeps_the_cap() -> None:
    """From 200 grey points to the picture of a coloured ball, by splits and clones alone."""
    generator = torch.Generator().manual_seed(0)
    ball = torch.randn(2000, 3, generator=generator)
    ball = ball / ball.norm(dim=1, keepdim=True) + torch.tensor([0.0, 0.0, 4.0])
    truth = SplatTable.from_points(ball, 0.5 + 0.5 * torch.sin(6 * ball), sh_degree=0, opacity=0.9)
    cameras = [camera_of(random_twin_camera(seed, 80, 60)) for seed in range(6)]
    with torch.no_grad():
        targets = [image.rgb.clamp(0, 1) for image in render(truth, cameras)]
    table = SplatTable.from_points(ball[::10].clone(), max_gaussians=450, sh_degree=0).requires_grad_(True)
    lrs = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 1e-2}
    adam = SplatAdam(table, lrs)
    strategy = DefaultStrategy(
        450, refine_start=20, refine_stop=200, refine_every=20, reset_every=120, order=RowOrder(1.05)
    )
    losses = []
    for step in range(1, 301):
        view = step % 6
        loss = l1_ssim_loss(render(table, cameras[view], optimizer=adam)[0].rgb, targets[view])
        loss.backward()
        adam.step()
        report = strategy.post_step(table, adam, step)
        assert report["total"] == table.num_rows <= 450
        losses.append(float(loss.detach()))
    assert table.num_rows > 300
    assert all(bool(column.isfinite().all()) for column in table.columns())
    assert sum(losses[-12:]) < 0.5 * sum(losses[:12])


def test_misuse_is_explained() -> None:
    table, adam, _ = make(20)
    with pytest.raises(ValueError, match="20 rows, above the cap of 10"):
        DefaultStrategy(10).post_step(table, adam, 1)
    for options, words in (
        ({"max_gaussians": 0}, "max_gaussians is 0"),
        ({"prune_opacity": 0.6}, r"prune_opacity is 0.6"),
        ({"reset_every": 0}, "reset_every is 0"),
        ({"scene_scale": 0.0}, "scene_scale is 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            DefaultStrategy(**{"max_gaussians": 10, **options})
    plan = native().plan_densification(
        table.columns(), adam.other_rows(), grow_gradient=math.inf, split_scale=1.0, split_radius=math.inf,
        prune_opacity=0.0, prune_scale=math.inf, prune_radius=math.inf, max_rows=20,
    )  # fmt: skip
    table.shrink(19)
    with pytest.raises(ValueError, match="the table has 19 rows, and the plan for 20 rows needs 20"):
        native().densify(table.columns(), None, plan, 0, 0, 0)
