# SPDX-License-Identifier: Apache-2.0
"""Autograd on `mgpu`: the engine's own threads, side streams, higher orders. Oracle: the same graph on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("split_everything")

ROWS = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """The same leaf on the CPU and on `mgpu`."""
    return ROWS.clone().requires_grad_(), ROWS.to("mgpu").requires_grad_()


def test_gradients_equal_the_cpus() -> None:
    here, there = pair()
    for leaf in (here, there):
        (leaf.exp().norm(dim=1).sum() + (leaf[10:20] * 2).sum() + leaf.mean()).backward()
    assert there.grad is not None
    assert there.grad.is_mgpu
    torch.testing.assert_close(there.grad.cpu(), here.grad)


def test_backward_of_a_function_runs_in_the_engines_thread() -> None:
    seen: list[int] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, dL_dy: torch.Tensor) -> torch.Tensor:
            seen.append(threading.get_ident())
            (x,) = ctx.saved_tensors
            return 2 * x * dL_dy

    _, there = pair()
    Square.apply(there).sum().backward()
    torch.testing.assert_close(there.grad.cpu(), 2 * ROWS)
    assert seen != [threading.get_ident()]


def test_backward_on_a_side_stream_gets_that_stream() -> None:
    seen: list[int] = []

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, dL_dy: torch.Tensor) -> torch.Tensor:
            seen.append(torch.accelerator.current_stream().stream_id)
            return dL_dy

    side = torch.Stream(device="mgpu")
    _, there = pair()
    with side:
        assert torch.accelerator.current_stream() == side
        loss = Pass.apply(there).sum()
    loss.backward()
    assert seen == [side.stream_id]


def test_higher_orders() -> None:
    small = ROWS[:4].double().to("mgpu").requires_grad_()
    torch.autograd.gradcheck(lambda x: (x**3).sum(1), (small,))
    torch.autograd.gradgradcheck(lambda x: (x**3).sum(1), (small,))
    checkpoint(lambda x: x.exp(), small, use_reentrant=False).sum().backward()
    torch.testing.assert_close(small.grad.cpu(), small.detach().exp().cpu())
    hessian = torch.autograd.functional.hessian(lambda x: (x**3).sum(), small[0].detach())
    torch.testing.assert_close(hessian.cpu(), torch.diag(6 * ROWS[0].double()))


def test_function_transforms() -> None:
    x = ROWS.to("mgpu")
    torch.testing.assert_close(torch.func.vmap(lambda row: row.sum())(x).cpu(), ROWS.sum(1))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: row.pow(2)))(x)
    torch.testing.assert_close(jacobian.cpu(), torch.diag_embed(2 * ROWS))


def test_a_graph_may_cross_between_the_cpu_and_the_device() -> None:
    leaf = ROWS.clone().requires_grad_()
    (leaf.to("mgpu").exp().cpu() * 2).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * ROWS.exp())


def test_in_place_writes_are_noticed() -> None:
    _, there = pair()
    y = there.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_modes() -> None:
    x = ROWS.to("mgpu").requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
        assert y.is_inference()
    assert (x * 2).requires_grad
    assert not (x.detach() * 2).is_inference()
