# SPDX-License-Identifier: Apache-2.0
"""Operators are cut over the shards, counted, and give the CPU's numbers on uneven and awkward operands."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

from ns_mgpu_splat.device import native

GENERATOR = torch.Generator().manual_seed(0)


def counts(run: Callable[[], object]) -> dict[str, dict[str, int]]:
    """What op_stats says of one run."""
    torch.mgpu.reset_op_stats()
    run()
    return torch.mgpu.op_stats(reset=True)


def total(stats: dict[str, dict[str, int]], kind: str) -> int:
    """Runs of a kind over all operators."""
    return sum(entry[kind] for entry in stats.values())


LARGE = torch.randn(300_001, 3, generator=GENERATOR)  # not a multiple of anything

SHARDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "functional": lambda x: x.exp(),
    "binary": lambda x: x + x,
    "broadcast row": lambda x: x * x[0],
    "broadcast column": lambda x: x + x[:, :1].contiguous(),
    "scalar": lambda x: x * 2 + 1,
    "in place": lambda x: x.clone().mul_(3).clamp_(-1, 1),
    "cast": lambda x: x.double(),
    "compare": lambda x: x > 0,
    "fill": lambda x: torch.empty_like(x).fill_(3),
    "zero": lambda x: torch.zeros_like(x),
    "transposed": lambda x: x.t() * 2,
    "sum": lambda x: x.sum(),
    "rows": lambda x: x.norm(dim=1),
    "columns": lambda x: x.mean(0),
    "both": lambda x: x.amax((0, 1)),
    "pairs": lambda x: x.max(1).indices,
    "all": lambda x: (x < 100).all(),
    "softmax": lambda x: x.softmax(1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "lists": lambda x: torch._foreach_add([x, x[:7].clone()], 2.0)[0],
    "copy": lambda x: x.clone(),
    "sigmoid": lambda x: torch.sigmoid(x),
    "nan_to_num": lambda x: x.log().nan_to_num(),
}


@pytest.mark.parametrize("name", SHARDED)
def test_large_operands_run_on_every_shard_with_the_cpus_result(name: str) -> None:
    there = LARGE.to("mgpu")
    results: list[torch.Tensor] = []
    stats = counts(lambda: results.append(SHARDED[name](there)))
    assert total(stats, "large") == 0, stats
    assert total(stats, "sharded") >= 1, stats
    want = SHARDED[name](LARGE)
    assert results[0].stride() == want.stride()
    torch.testing.assert_close(results[0].cpu(), want, rtol=2e-5, atol=2e-5)


def test_small_operands_stay_on_the_lead_shard() -> None:
    x = torch.ones(10, device="mgpu")
    stats = counts(lambda: x + 1)
    assert (total(stats, "sharded"), total(stats, "lead"), total(stats, "large")) == (0, 1, 0)


def test_an_operator_without_a_sharded_kernel_counts_as_fallback() -> None:
    x = torch.rand(500_000, device="mgpu")
    stats = counts(lambda: torch.sort(x))
    assert total(stats, "fallback") == 1
    assert total(stats, "large") == 1


def test_views_are_not_counted() -> None:
    x = torch.rand(500_000, 2, device="mgpu")
    assert counts(lambda: x[1:].t().reshape(2, -1)[:, ::2].unsqueeze(0).view_as(x[1::2].t()[None])) == {}


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 1000])
def test_any_number_of_rows(rows: int) -> None:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows))
    y = x.to("mgpu")
    for function in (
        lambda t: t.exp() + t[:, :1],
        lambda t: t.sum(),
        lambda t: t.sum(0),
        lambda t: t.sum(1, keepdim=True),
        lambda t: t.t().contiguous(),
        lambda t: t.mean(0),
        lambda t: t.any(),
        lambda t: t.prod(1),
    ):
        torch.testing.assert_close(function(y).cpu(), function(x), equal_nan=True)


@pytest.mark.usefixtures("split_everything")
def test_overlapping_operands_are_refused_as_on_the_cpu() -> None:
    x = torch.arange(12.0, device="mgpu").reshape(4, 3)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        x[1:].add_(x[:-1])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, 3, device="mgpu").expand(4, 3).add_(1)


@pytest.mark.usefixtures("split_everything")
def test_the_kernels_own_error_comes_out() -> None:
    x = torch.arange(12, device="mgpu")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x // torch.zeros(12, dtype=torch.int64, device="mgpu")
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        x.add_(0.5 * x)
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        x + x[:5]
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(3)


@pytest.mark.usefixtures("split_everything")
def test_type_promotion_is_the_cpus() -> None:
    for left, right in (
        (torch.arange(9), torch.tensor(2.5)),
        (torch.arange(9), 2.5),
        (torch.arange(9, dtype=torch.uint8), torch.arange(9)),
        (torch.rand(9, dtype=torch.float16), torch.tensor(2.5, dtype=torch.float64)),
        (torch.rand(9, dtype=torch.float16), torch.rand(1, dtype=torch.float64)),
        (torch.ones(9, dtype=torch.bool), torch.tensor(3)),
    ):
        other = right.to("mgpu") if isinstance(right, torch.Tensor) else right
        got, want = left.to("mgpu") * other, left * right
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.usefixtures("split_everything")
def test_16_bit_sums_are_not_rounded_twice() -> None:
    x = torch.randn(4001, generator=torch.Generator().manual_seed(9)).bfloat16()
    assert torch.equal(x.to("mgpu").sum().cpu(), x.sum())
    assert torch.equal(x.to("mgpu").mean().cpu(), x.mean())


def test_the_threshold_counts_bytes() -> None:
    before = native().shard_threshold()
    try:
        native().set_shard_threshold(4000)
        at, below = torch.ones(1000, device="mgpu"), torch.ones(999, device="mgpu")
        assert total(counts(lambda: at + 1), "sharded") == 1
        assert total(counts(lambda: below + 1), "sharded") == 0
    finally:
        native().set_shard_threshold(before)


@pytest.mark.usefixtures("split_everything")
def test_python_may_replace_an_operator() -> None:
    library = torch.library.Library("aten", "IMPL")
    hits = []
    try:
        library.impl("erfinv", lambda t: (hits.append(1), torch.zeros_like(t))[1], "PrivateUse1")
        assert torch.erfinv(torch.ones(3, device="mgpu")).tolist() == [0, 0, 0]
    finally:
        library._destroy()
    assert hits == [1]


def test_operators_that_torch_would_put_together_run_as_one() -> None:
    x = torch.randn(20, 8, device="mgpu")
    weight = torch.ones(8, device="mgpu")
    for name, run in {
        "aten::silu_backward": lambda: torch.ops.aten.silu_backward(x, x),
        "aten::native_layer_norm": lambda: torch.nn.functional.layer_norm(x, (8,), weight),
        "aten::native_group_norm": lambda: torch.nn.functional.group_norm(x, 2),
    }.items():
        stats = counts(run)
        assert [key for key in stats if key != "aten::fill_.Scalar"] == [name], stats


TWO_RESULTS = """
import torch
import ns_mgpu_splat
from ns_mgpu_splat.device import native

ns_mgpu_splat.init()
here = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
there = here.to("mgpu")
calls = {
    "max": lambda x: x.max(1), "min": lambda x: x.min(1), "mode": lambda x: x.mode(1), "median": lambda x: x.median(1),
    "kthvalue": lambda x: x.kthvalue(2, 1), "topk": lambda x: x.topk(2, 1), "sort": lambda x: x.sort(1),
    "cummax": lambda x: x.cummax(1), "aminmax": lambda x: x.aminmax(dim=1), "frexp": lambda x: x.frexp(),
}
for threshold in (1, 1 << 20):
    native().set_shard_threshold(threshold)
    for name, call in calls.items():
        for _ in range(3):
            values, rest = call(there)
        wanted = call(here)
        assert torch.equal(values.cpu(), wanted[0]) and torch.equal(rest.cpu(), wanted[1]), name
print("all")
"""


def test_operators_with_two_results_leave_the_heap_whole() -> None:
    # torch 2.11 drops a boxed call's arguments before it copies the references to its out= tensors. Without the caches of
    # threads, glibc notices at the next free() that somebody wrote to memory that was given back.
    done = subprocess.run(
        [sys.executable, "-c", TWO_RESULTS],
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.strip() == "all"


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("shape", [(4, 3), (5, 4, 3), (1, 3), (0,), (7,)])
def test_an_out_of_another_size_is_resized_as_on_the_cpu(shape: tuple[int, ...]) -> None:
    """The result has the shape of what is read, even where it would fit into a larger out=."""
    x = torch.randn(3, generator=GENERATOR)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "exp": lambda a, out: torch.exp(a, out=out),
        "add": lambda a, out: torch.add(a, a, out=out),
        "mul by one": lambda a, out: torch.mul(a, a[:1], out=out),
        "_foreach_exp": lambda a, out: torch.ops.aten._foreach_exp.out([a], out=[out]),
    }
    for name, call in calls.items():
        want, got = torch.full(shape, 7.0), torch.full(shape, 7.0, device="mgpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, on resizing
            call(x, want)
            call(x.to("mgpu"), got)
        assert got.shape == want.shape == (3,), name
        torch.testing.assert_close(got.cpu(), want, msg=name)


def test_layouts_that_the_device_has_not_are_refused() -> None:
    x = torch.eye(3, device="mgpu")
    for make in (
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda y: y.to_sparse_bsr((1, 1)),
        lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.quint8),
    ):
        with pytest.raises(RuntimeError, match=r"strided tensors of plain numbers only.*to the CPU first"):
            make(x)
    assert torch.equal(x.cpu(), torch.eye(3))
