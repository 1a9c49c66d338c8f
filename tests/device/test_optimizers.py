# SPDX-License-Identifier: Apache-2.0
"""torch.optim on `mgpu` equals the CPU's; lists are cut over the shards. Oracle: torch.optim on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ns_mgpu_splat.device import native

pytestmark = pytest.mark.usefixtures("split_everything")


def make() -> nn.Module:
    """A small network with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 3))


def train(kind: type[torch.optim.Optimizer], device: str, **settings: Any) -> list[torch.Tensor]:
    """Parameters after five steps."""
    module = make().to(device)
    optimizer = kind(module.parameters(), **settings)
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(module(x), x).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "settings", "variant"),
    [
        (torch.optim.Adam, {"lr": 1e-2}, {}),
        (torch.optim.Adam, {"lr": 1e-2}, {"foreach": True}),
        (torch.optim.Adam, {"lr": 1e-2}, {"foreach": False}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}, {"fused": True}),
        (torch.optim.Adam, {"lr": 1e-2}, {"capturable": True, "foreach": True}),
        (torch.optim.AdamW, {"lr": 1e-2}, {"fused": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"foreach": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"fused": True}),
        (torch.optim.RMSprop, {"lr": 1e-3}, {"foreach": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}, {"foreach": True}),
    ],
)
def test_five_steps_equal_the_cpus(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], variant: dict[str, Any]
) -> None:
    want = train(kind, "cpu", **settings, foreach=False)
    got = train(kind, "mgpu", **settings, **variant)
    for expected, actual in zip(want, got, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_fused_adam_is_cut_over_the_shards() -> None:
    parameter = nn.Parameter(torch.randn(1001, 3).to("mgpu"))
    optimizer = torch.optim.Adam([parameter], fused=True)
    parameter.grad = torch.ones_like(parameter)
    torch.mgpu.reset_op_stats()
    optimizer.step()
    counts = torch.mgpu.op_stats()["aten::_fused_adam_"]
    assert counts == {"sharded": 1, "lead": 0, "fallback": 0, "large": 0}


@pytest.mark.parametrize("rows", [60, 2**20])
def test_a_fused_optimizer_refuses_moments_of_another_size(rows: int) -> None:
    """Its kernels do not ask, and would read and write past their ends."""
    parameter = nn.Parameter(torch.mgpu.reserve((50, 3), 2**20))
    optimizer = torch.optim.Adam([parameter], fused=True)
    (parameter * 2).sum().backward()
    optimizer.step()
    parameter.grad = None
    torch.mgpu.grow(parameter, rows)
    (parameter * 2).sum().backward()
    before = parameter.detach().cpu()
    with pytest.raises(
        ValueError, match=rf"exp_avgs\[0\] is \[50, 3\] and the parameter \[{rows}, 3\].*alike"
    ):
        optimizer.step()
    assert torch.equal(parameter.detach().cpu(), before)
    stale = nn.Parameter(torch.zeros(20, 3, device="mgpu"))
    with pytest.raises(ValueError, match=r"grads\[0\] is \[10, 3\]"):
        torch._fused_sgd_(
            [stale.detach()],
            [torch.ones(10, 3, device="mgpu")],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )


def test_fused_adam_walks_right_over_a_transposed_parameter() -> None:
    start = torch.randn(7, 40, generator=torch.Generator().manual_seed(3))
    gradient = torch.randn(7, 40, generator=torch.Generator().manual_seed(4))
    results = []
    for device, fused in (("cpu", False), ("mgpu", True)):
        parameter = nn.Parameter(
            start.clone().to(device).t()
        )  # dense, but its rows are not one after another
        optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused, foreach=False)
        for _ in range(3):
            parameter.grad = gradient.to(device).t()
            optimizer.step()
        results.append(parameter.detach().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [[(1001, 3), (), (2,), (0, 3)], [(5, 7, 9)], [(1,)]])
def test_lists_of_any_sizes_equal_the_cpus(sizes: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(5)
    here = [torch.rand(size, generator=generator) for size in sizes]
    there = [tensor.to("mgpu") for tensor in here]
    for a, b in zip(torch._foreach_mul(here, 2.5), torch._foreach_mul(there, 2.5), strict=True):
        torch.testing.assert_close(b.cpu(), a)
    for a, b in zip(
        torch._foreach_addcdiv(here, here, here, 3.0),
        torch._foreach_addcdiv(there, there, there, 3.0),
        strict=True,
    ):
        torch.testing.assert_close(b.cpu(), a, equal_nan=True)
    scalars = [float(i + 1) for i in range(len(sizes))]
    torch._foreach_mul_(here, scalars)
    torch._foreach_mul_(there, scalars)
    torch._foreach_add_(here, here, alpha=2)
    torch._foreach_add_(there, there, alpha=2)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(b.cpu(), a)
    for a, b in zip(torch._foreach_norm(here), torch._foreach_norm(there), strict=True):
        torch.testing.assert_close(b.cpu(), a)


def test_clipping_and_scaling() -> None:
    module = make().to("mgpu")
    optimizer = torch.optim.Adam(module.parameters())
    scaler = torch.amp.GradScaler("mgpu", init_scale=8.0)
    x = torch.ones(4, 3, device="mgpu")
    scaler.scale(module(x).sum()).backward()
    scaler.unscale_(optimizer)
    before = [p.grad.clone() for p in module.parameters()]
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=True)
    expected = torch.linalg.vector_norm(torch.cat([g.cpu().flatten() for g in before]))
    torch.testing.assert_close(norm.cpu(), expected)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.is_enabled()
    # an infinite gradient skips the step and halves the scale
    kept = [p.detach().clone() for p in module.parameters()]
    scaler.scale(module(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(p, k) for p, k in zip(module.parameters(), kept, strict=True))


@pytest.mark.parametrize("threshold", [1, 1 << 40])
def test_lists_of_hundreds_of_tensors(threshold: int) -> None:
    native().set_shard_threshold(threshold)
    values = [torch.randn(1 + n % 7, generator=torch.Generator().manual_seed(n)) for n in range(300)]
    shared = [values[0], *values, values[0]]  # one tensor twice
    there = [value.to("mgpu") for value in values]
    sums = torch._foreach_add([there[0], *there, there[0]], 2.0)
    for got, want in zip(sums, shared, strict=True):
        assert torch.equal(got.cpu(), want + 2.0)
    torch._foreach_mul_(there, 3.0)
    for got, want in zip(there, values, strict=True):
        assert torch.equal(got.cpu(), want * 3.0)
    norms = torch._foreach_norm(there)
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.stack([v.norm() * 3 for v in values]))
