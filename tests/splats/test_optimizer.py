# SPDX-License-Identifier: Apache-2.0
"""SplatAdam against torch.optim.Adam in float64, fed with gradients of plain `render(...).backward()`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render
from ns_mgpu_splat.splats import optimizer as optimizer_module
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.table import COLUMNS

LRS = {"means": 2e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 2e-2, "sh0": 2.5e-3, "shN": 2.5e-3 / 20}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return ns_mgpu_splat.init()


def ring(rows: int, *, sh_degree: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Gaussians on a ring of radius 4 around the origin: a camera in the middle sees a part of it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    angle = torch.linspace(0, 2 * math.pi, rows + 1)[:-1]
    return {
        "means": torch.stack([4 * angle.sin(), 0.4 * normal(rows), 4 * angle.cos()], -1)
        + 0.2 * normal(rows, 3),
        "quats": normal(rows, 4),
        "scales": math.log(0.25) + 0.3 * normal(rows, 3),
        "opacities": normal(rows),
        "sh0": normal(rows, 3),
        "shN": 0.2 * normal(rows, (sh_degree + 1) ** 2 - 1, 3),
    }


def camera(angle: float, width: int = 40, height: int = 24) -> Camera:
    """In the origin, looking at `angle` (radians) on the ring; 62 degrees wide."""
    viewmat = torch.eye(4)
    c, s = math.cos(angle), math.sin(angle)
    viewmat[:3, :3] = torch.tensor([[c, 0.0, -s], [0.0, 1.0, 0.0], [s, 0.0, c]])
    return Camera(viewmat, 0.83 * width, 0.83 * width, width / 2, height / 2, width, height)


def target_image(view: Camera, seed: int) -> Tensor:
    return torch.rand((view.height, view.width, 3), generator=torch.Generator().manual_seed(seed))


def loss_of(rgb: Tensor, view: Camera, seed: int) -> Tensor:
    return ((rgb - target_image(view, seed).to(rgb.device)) ** 2).mean()


class DenseAdam:
    """torch.optim.Adam in float64 over all rows; gradients come from a plain render of a table of its own."""

    def __init__(self, columns: dict[str, Tensor], lrs: dict[str, float], eps: float = 1e-15) -> None:
        self.parameters = {name: torch.nn.Parameter(columns[name].double()) for name in COLUMNS}
        groups = [{"params": [p], "lr": lrs[name]} for name, p in self.parameters.items()]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.999), eps=eps)
        self.table = SplatTable.from_columns(**columns)

    def gradients(self, views: list[Camera], seeds: list[int], **settings: object) -> None:
        """Add the gradients of the summed losses to those of the parameters."""
        self.table.write_rows(0, {name: p.detach() for name, p in self.parameters.items()})
        self.table.requires_grad_(True)
        for column in self.table.columns():
            column.grad = None
        images = render(self.table, views, **settings)  # type: ignore[arg-type]
        losses = [
            loss_of(image.rgb, view, seed) for image, view, seed in zip(images, views, seeds, strict=True)
        ]
        torch.stack(losses).sum().backward()
        for name, column in self.table.named_columns().items():
            parameter = self.parameters[name]
            gradient = torch.zeros_like(column).cpu() if column.grad is None else column.grad.cpu()
            parameter.grad = gradient.double() + (0 if parameter.grad is None else parameter.grad)

    def step(self, lrs: dict[str, float]) -> None:
        for group, name in zip(self.adam.param_groups, COLUMNS, strict=True):
            group["lr"] = lrs[name]
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.adam.step()
        self.adam.zero_grad()


def backward(
    table: SplatTable, adam: SplatAdam, views: list[Camera], seeds: list[int], **settings: object
) -> None:
    images = render(table, views, optimizer=adam, **settings)  # type: ignore[arg-type]
    losses = [loss_of(image.rgb, view, seed) for image, view, seed in zip(images, views, seeds, strict=True)]
    torch.stack(losses).sum().backward()


def assert_same(table: SplatTable, adam: SplatAdam, oracle: DenseAdam, tolerance: float) -> None:
    """Parameters and moments within `tolerance` of the tensor's largest value."""
    for name in COLUMNS:
        state = oracle.adam.state[oracle.parameters[name]]
        pairs = {
            name: (table.named_columns()[name], oracle.parameters[name]),
            f"exp_avg of {name}": (adam.exp_avg[name], state["exp_avg"]),
            f"exp_avg_sq of {name}": (adam.exp_avg_sq[name], state["exp_avg_sq"]),
        }
        for what, (mine, theirs) in pairs.items():
            if theirs.numel() == 0:
                continue
            error = (
                mine.detach().cpu().double() - theirs.detach()
            ).abs().max() / theirs.detach().abs().max().clamp(min=1e-30)
            assert float(error) < tolerance, f"{what}: {float(error):.2e}"


@pytest.mark.parametrize("eps", [1e-15, 1e-8])
@pytest.mark.parametrize(
    ("start", "missed"), [(20, 1), (20, 7), (20, 300), (200, 300), (3000, 2), (3000, 300)]
)
def test_missed_steps_equal_dense_steps(start: int, missed: int, eps: float, device: torch.device) -> None:
    """No frame at all: only the replay, from gradients of 1e-16 to 1e-1, the smallest below eps.

    From step 110 on missed steps are replayed as two, before that one by one where eps matters.
    """
    columns = ring(17)
    generator = torch.Generator().manual_seed(1)
    oracle = DenseAdam(columns, LRS, eps)
    table = SplatTable.from_columns(**columns)
    adam = SplatAdam(table, LRS, eps=eps)
    state = adam.state_dict()
    state["steps"] = start
    for name in COLUMNS:
        shape = columns[name].shape
        size = 10.0 ** (torch.rand(shape, generator=generator) * 15 - 16)
        state["exp_avg"][name] = torch.randn(shape, generator=generator) * size
        state["exp_avg_sq"][name] = (size * (0.5 + torch.rand(shape, generator=generator))) ** 2 * (
            1 - 0.999**start
        )
        oracle.adam.state[oracle.parameters[name]] = {
            "step": torch.tensor(float(start)),
            "exp_avg": state["exp_avg"][name].double(),
            "exp_avg_sq": state["exp_avg_sq"][name].double(),
        }
    adam.load_state_dict(state)
    for step in range(missed):
        lrs = {name: lr * (0.99**step) * (3.0 if step == 5 else 1.0) for name, lr in LRS.items()}
        adam.step(lrs)
        oracle.step(lrs)
    assert all(torch.equal(table.named_columns()[n].cpu(), columns[n]) for n in COLUMNS), (
        "nothing was read yet"
    )
    adam.flush()
    assert_same(table, adam, oracle, 1e-6)
    assert int(adam.last_step.min()) == start + missed


def test_300_steps_with_cameras_turning_away_equal_dense_adam(device: torch.device) -> None:
    """Test 4 of the issue: rows leave the view for up to 60 steps; rates decay; noise off."""
    columns = ring(60)
    oracle = DenseAdam(columns, LRS)
    table = SplatTable.from_columns(**columns).requires_grad_(True)
    adam = SplatAdam(table, LRS)
    seen = set()
    for step in range(300):
        lrs = {name: lr * 0.01 ** (step / 300) for name, lr in LRS.items()}
        lrs["shN"] = 0.0 if step < 40 else lrs["shN"]
        angle = 2 * math.pi * ((step // 5) * 5 / 60)
        view = camera(angle)
        oracle.gradients([view], [step % 60])
        oracle.step(lrs)
        backward(table, adam, [view], [step % 60])
        adam.step(lrs)
        seen.add(adam.report["rows_seen"])
    assert min(seen) > 0, "a view that sees nothing tests nothing"
    assert max(seen) < 40, "every row must be out of view at times"
    assert int(adam.last_step.min()) < 300, "some rows must wait for the flush"
    adam.flush()
    assert_same(table, adam, oracle, 1e-5)


def test_frames_of_several_renders_accumulate(device: torch.device) -> None:
    """Two calls, three cameras of two sizes, overlapping views: gradients add up, then one step."""
    columns = ring(50, sh_degree=2)
    oracle = DenseAdam(columns, LRS)
    table = SplatTable.from_columns(**columns).requires_grad_(True)
    adam = SplatAdam(table, LRS)
    views = [camera(0.0), camera(0.3, 33, 50), camera(2.0)]
    for step in range(12):
        oracle.gradients(views[:2], [step, step + 1])
        oracle.gradients(views[2:], [step + 2])
        oracle.step(LRS)
        backward(table, adam, views[:2], [step, step + 1])
        backward(table, adam, views[2:], [step + 2])
        assert len(adam.pending) == 2
        adam.step()
        assert not adam.pending
    adam.flush()
    assert_same(table, adam, oracle, 1e-5)
    assert all(column.grad is None for column in table.columns()), "no gradient of N rows is stored"


def test_lower_degree_leaves_higher_bands_alone(device: torch.device) -> None:
    columns = ring(30, sh_degree=3)
    oracle = DenseAdam(columns, LRS)
    table = SplatTable.from_columns(**columns).requires_grad_(True)
    adam = SplatAdam(table, LRS)
    for step in range(6):
        degree = step // 2
        oracle.gradients([camera(0.0)], [step], sh_degree=degree)
        oracle.step(LRS)
        backward(table, adam, [camera(0.0)], [step], sh_degree=degree)
        adam.step()
    adam.flush()
    assert_same(table, adam, oracle, 1e-5)
    assert torch.equal(table.shN.detach().cpu()[:, 8:], columns["shN"][:, 8:])


def test_regularisers_are_means_over_the_rows_seen(device: torch.device) -> None:
    columns = ring(50)
    views = [camera(0.0), camera(0.6)]
    oracle = DenseAdam(columns, LRS)
    table = SplatTable.from_columns(**columns).requires_grad_(True)
    adam = SplatAdam(table, LRS, opacity_reg=0.03, scale_reg=0.02)
    for step in range(3):
        oracle.gradients(views, [step, step])
        rows = torch.cat(
            [ns_mgpu_splat.splats.project(oracle.table, view).row.cpu() for view in views]
        ).unique()
        opacity, scale = oracle.parameters["opacities"], oracle.parameters["scales"]
        means = opacity[rows].sigmoid().mean(), scale[rows].exp().mean()
        (0.03 * means[0] + 0.02 * means[1]).backward()
        oracle.step(LRS)
        backward(table, adam, views, [step, step])
        adam.step()
        assert adam.report["rows_seen"] == len(rows)
        assert 0 < len(rows) < 50
        assert abs(adam.report["mean_opacity"] - float(means[0].detach())) < 1e-6
        assert abs(adam.report["mean_scale"] - float(means[1].detach())) < 1e-6
    adam.flush()
    assert_same(table, adam, oracle, 1e-5)


def expected_noise_covariance(columns: dict[str, Tensor], sigma: float) -> Tensor:
    """(N, 3, 3) float64 of gsplat's inject_noise_to_position: covariance x normal x gate x sigma."""
    w, x, y, z = (columns["quats"].double() / columns["quats"].double().norm(dim=-1, keepdim=True)).unbind(-1)
    rotation = torch.stack(
        [
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ],
        -1,
    ).reshape(-1, 3, 3)  # fmt: skip
    covariance = rotation @ torch.diag_embed(columns["scales"].double().exp() ** 2) @ rotation.transpose(1, 2)
    gate = 1 / (1 + torch.exp(-100 * ((1 - columns["opacities"].double().sigmoid()) - 0.995)))
    spread = covariance * (gate * sigma)[:, None, None]
    return spread @ spread.transpose(1, 2)


def whitened(noise: Tensor, covariance: Tensor) -> Tensor:
    """Standard normal if `noise` has `covariance`, row by row."""
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), noise[..., None], upper=False)[
        ..., 0
    ]


def assert_standard_normal(values: Tensor) -> None:
    """Mean, covariance and fourth moment of (N, 3) within five standard errors."""
    rows = values.shape[0]
    error = 5 / math.sqrt(rows)
    assert float(values.mean(0).abs().max()) < error
    assert float((values.T @ values / rows - torch.eye(3)).abs().max()) < error * math.sqrt(2)
    assert float(((values**4).mean(0) - 3).abs().max()) < error * math.sqrt(96)


def faint(rows: int) -> dict[str, Tensor]:
    columns = ring(rows, sh_degree=0, seed=7)
    columns["opacities"] = torch.logit(
        torch.rand(rows, generator=torch.Generator().manual_seed(8)) * 0.05 + 0.004
    )
    return columns


def test_noise_of_missed_steps_has_the_summed_variance(device: torch.device) -> None:
    rows = 20_000
    columns = faint(rows)
    table = SplatTable.from_columns(**columns)
    adam = SplatAdam(table, LRS, noise_lr=300.0, seed=5)
    sigmas = []
    for step in range(9):
        adam.step({"means": 1e-3 * 0.8**step})
        sigmas.append(300.0 * 1e-3 * 0.8**step)
    adam.flush()
    noise = table.means.detach().cpu().double() - columns["means"].double()
    covariance = expected_noise_covariance(columns, math.sqrt(sum(s * s for s in sigmas)))
    assert_standard_normal(whitened(noise, covariance))
    for name in COLUMNS[1:]:
        assert torch.equal(table.named_columns()[name].detach().cpu(), columns[name]), name


def test_noise_of_seen_rows_is_drawn_each_step(device: torch.device) -> None:
    """The same two steps with and without noise differ by it, in the first step exactly."""
    columns = faint(6_000)
    views = [camera(angle) for angle in (0.0, 1.57, 3.14, 4.71)]
    moved = []
    for noise_lr in (0.0, 300.0):
        table = SplatTable.from_columns(**columns).requires_grad_(True)
        adam = SplatAdam(table, {"means": 1e-3}, noise_lr=noise_lr, seed=6)
        backward(table, adam, views, [0, 1, 2, 3])
        adam.step()
        seen = adam.last_step.cpu() == 1
        moved.append(table.means.detach().cpu().double())
    assert int(seen.sum()) > 2_000
    noise = (moved[1] - moved[0])[seen]
    assert_standard_normal(whitened(noise, expected_noise_covariance(columns, 0.3)[seen]))


def test_rendering_reads_rows_that_wait_as_the_flush_writes_them(device: torch.device) -> None:
    """In registers (project stage) and in memory (flush): the same bits, noise included."""
    table = SplatTable.from_columns(**ring(60)).requires_grad_(True)
    adam = SplatAdam(table, LRS, noise_lr=50.0, seed=3)
    for step in range(10):
        backward(table, adam, [camera(0.3 * step)], [step])
        adam.step()
    views = [camera(angle) for angle in (0.0, 2.0, 4.0)]
    with torch.no_grad():
        waiting = [image.rgb.cpu() for image in render(table, views, optimizer=adam)]
        stale = [image.rgb.cpu() for image in render(table, views)]
        adam.flush()
        flushed = [image.rgb.cpu() for image in render(table, views)]
    assert not all(torch.equal(a, b) for a, b in zip(stale, flushed, strict=True))
    for a, b in zip(waiting, flushed, strict=True):
        assert float((a - b).abs().max()) < 1e-6


@pytest.mark.usefixtures("deterministic")
def test_state_survives_a_file_and_training_continues_bit_for_bit(
    device: torch.device, tmp_path: Path
) -> None:
    table = SplatTable.from_columns(**ring(40)).requires_grad_(True)
    adam = SplatAdam(table, LRS, noise_lr=10.0, seed=11)

    def train(table: SplatTable, adam: SplatAdam, steps: range) -> None:
        for step in steps:
            backward(table, adam, [camera(0.4 * step)], [step])
            adam.step({"means": 1e-3 * 0.9**step})

    train(table, adam, range(8))
    state = {
        "adam": adam.state_dict(),
        "columns": {n: c.detach().cpu() for n, c in table.named_columns().items()},
    }
    torch.save(state, tmp_path / "state.pt")
    train(table, adam, range(8, 14))
    adam.flush()

    loaded = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    other = SplatTable.from_columns(**ring(3, seed=9)).requires_grad_(True)
    again = SplatAdam(other, {"means": 1.0}, noise_lr=10.0, seed=0)
    parameters = other.columns()
    other.resize(40)
    other.write_rows(0, loaded["columns"])
    again.load_state_dict(loaded["adam"])
    assert all(a is b for a, b in zip(parameters, other.columns(), strict=True)), (
        "parameters keep their identity"
    )
    assert again.steps == 8
    train(other, again, range(8, 14))
    again.flush()
    for name in COLUMNS:
        assert torch.equal(table.named_columns()[name].cpu(), other.named_columns()[name].cpu()), name
        assert torch.equal(adam.exp_avg_sq[name].cpu(), again.exp_avg_sq[name].cpu()), name


def test_history_stays_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An automatic flush in between changes nothing beyond rounding."""
    ends = []
    for flush_every in (1000, 10):
        monkeypatch.setattr(optimizer_module, "FLUSH_EVERY", flush_every)
        table = SplatTable.from_columns(**ring(40)).requires_grad_(True)
        adam = SplatAdam(table, LRS)
        for step in range(35):
            if step % 7 == 0:
                backward(table, adam, [camera(0.1 * step)], [step])
            adam.step()
            assert adam.history.now - adam.history.base < flush_every
        adam.flush()
        ends.append([column.detach().cpu() for column in table.columns()])
    for a, b in zip(*ends, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_default_history_fits_the_native_limit(device: torch.device) -> None:
    adam = SplatAdam(SplatTable(0), LRS)
    assert adam.history.max_steps > optimizer_module.FLUSH_EVERY
    for _ in range(optimizer_module.FLUSH_EVERY + 30):
        adam.step()
    assert adam.steps == optimizer_module.FLUSH_EVERY + 30


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_small_tables_train(rows: int, device: torch.device) -> None:
    table = SplatTable.from_columns(**ring(rows)).requires_grad_(True)
    adam = SplatAdam(table, LRS, noise_lr=1.0)
    for step in range(3):
        backward(table, adam, [camera(0.0)], [step])
        adam.step()
    adam.flush()
    assert adam.steps == 3
    assert all(bool(column.isfinite().all()) for column in table.columns())
    if rows:
        assert int(adam.last_step.min()) == 3


def test_growing_keeps_old_moments_and_starts_new_rows_now(device: torch.device) -> None:
    columns = ring(40)
    table = SplatTable.from_columns(**columns, capacity=64).requires_grad_(True)
    adam = SplatAdam(table, LRS)
    for step in range(4):
        backward(table, adam, [camera(0.0)], [step])
        adam.step()
    adam.flush()
    before = {name: adam.exp_avg[name].cpu().clone() for name in COLUMNS}
    addresses = [tensor.data_ptr() for tensor in adam.state()]
    table.grow(64)
    adam.grow(64)
    assert [tensor.data_ptr() for tensor in adam.state()] == addresses
    assert adam.last_step.cpu().tolist() == [4] * 64
    for name in COLUMNS:
        assert torch.equal(adam.exp_avg[name].cpu()[:40], before[name])
        assert float(adam.exp_avg[name].cpu()[40:].abs().sum()) == 0.0
    adam.reset_rows(torch.tensor([5, 3]))
    assert float(adam.exp_avg["means"].cpu()[[3, 5]].abs().sum()) == 0.0
    assert torch.equal(adam.exp_avg["means"].cpu()[6:40], before["means"][6:])


def test_misuse_is_explained(device: torch.device) -> None:
    table = SplatTable.from_columns(**ring(20), capacity=30).requires_grad_(True)
    with pytest.raises(ValueError, match="lrs names"):
        SplatAdam(table, {"colour": 1.0})
    with pytest.raises(ValueError, match="beta1"):
        SplatAdam(table, LRS, betas=(1.0, 0.999))
    adam = SplatAdam(table, LRS)
    images = render(table, [camera(0.0)], optimizer=adam)
    adam.step()
    images[0].rgb.sum().backward()
    with pytest.raises(ValueError, match="was not rendered with this optimizer at its step 1"):
        adam.step()
    with pytest.raises(ValueError, match="pending"):
        adam.flush()
    with pytest.raises(ValueError, match="pending"):
        adam.grow(30)
    adam.zero_pending()
    state = adam.state_dict()
    table.grow(30)
    with pytest.raises(ValueError, match=r"exp_avg of means is \[20, 3\].*\[30, 3\]"):
        adam.load_state_dict(state)
