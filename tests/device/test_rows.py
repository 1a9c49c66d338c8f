# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter, indexing, cat, matrix products, convolutions and random fills run on every shard, with torch's order.

Oracle: the same call on the CPU, values and gradients; for random fills, the meshes of other processes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ns_mgpu_splat.device import native

GENERATOR = torch.Generator().manual_seed(0)
ROWS = 1001  # not a multiple of anything
X = torch.randn(ROWS, 7, 3, generator=GENERATOR)
MANY = torch.randint(0, ROWS, (2500,), generator=GENERATOR)  # with duplicates
NEGATIVE = torch.randint(-ROWS, ROWS, (900,), generator=GENERATOR)
ONCE = torch.randperm(ROWS, generator=GENERATOR)[:700]
MASK = torch.rand(ROWS, generator=GENERATOR) > 0.5
MASK_2D = torch.rand(ROWS, 7, generator=GENERATOR) > 0.5
MASK_3D = torch.rand(ROWS, 7, 3, generator=GENERATOR) > 0.5
COLUMNS = torch.tensor([1, 0, 6, 6])


def per_row(rows: int, columns: int, highest: int) -> Tensor:
    """An index of three dimensions."""
    return (torch.arange(rows)[:, None, None] % highest).expand(rows, columns, 3)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, MANY.to(x.device)),
    "index_select of columns": lambda x: x.index_select(1, COLUMNS.to(x.device)),
    "gather of rows": lambda x: x.gather(0, per_row(1000, 5, 7).to(x.device)),
    "gather of columns": lambda x: x.gather(1, per_row(900, 9, 7).to(x.device)),
    "cat": lambda x: torch.cat([x, x[:5], x[:0], x[3:]]),
    "cat of columns": lambda x: torch.cat([x, x[:, :2]], 1),
    "cat of one row": lambda x: torch.cat([x[None], x[None]], 1),
    "cat of types": lambda x: torch.cat([x, x[:5].double(), x[:9] > 0]),
    "cat with torch's empty tensor": lambda x: torch.cat([x.new_zeros(0), x]),
    "stack": lambda x: torch.stack([x, x], 2),
    "rows": lambda x: x[MANY.to(x.device)],
    "rows from the end": lambda x: x[NEGATIVE.to(x.device)],
    "rows by an index on the CPU": lambda x: x[MANY],
    "rows in two dimensions": lambda x: x[MANY.view(50, 50).to(x.device)],
    "mask": lambda x: x[MASK.to(x.device)],
    "mask of two dimensions": lambda x: x[MASK_2D.to(x.device)],
    "mask and column": lambda x: x[MASK.to(x.device), 1],
    "columns": lambda x: x[:, COLUMNS.to(x.device)],
    "pairs": lambda x: x[MANY.to(x.device), (MANY % 7).to(x.device)],
    "pairs apart": lambda x: x[MANY.to(x.device), :, (MANY % 3).to(x.device)],
    "pairs behind": lambda x: x[:, (MANY % 7).to(x.device), (MANY % 3).to(x.device)],
    "outer pairs": lambda x: x[MANY[:, None].to(x.device), COLUMNS.to(x.device)],
    "of a transposed tensor": lambda x: x.permute(1, 0, 2)[COLUMNS.to(x.device)],
    "masked_select": lambda x: x.masked_select(MASK_3D.to(x.device)),
    "masked_select, broadcast": lambda x: x.masked_select(MASK_2D[:, :, None].to(x.device)),
    "masked_fill": lambda x: x.masked_fill(MASK_2D[:, :, None].to(x.device), 3.0),
    "masked_scatter": lambda x: x.clone().masked_scatter_(MASK_3D.to(x.device), x.detach().exp()),
    "index_put": lambda x: x.index_put((ONCE.to(x.device),), x[:700] * 3),
    "index_put of a mask": lambda x: x.index_put((MASK.to(x.device),), x[MASK.to(x.device)] * 2),
    "index_put, added": lambda x: x.index_put((NEGATIVE.to(x.device),), x[:900], accumulate=True),
    "index_put of one row": lambda x: x.index_put((NEGATIVE.to(x.device),), x[0], accumulate=True),
    "index_put, broadcast": lambda x: x.index_put((NEGATIVE.to(x.device),), x[:900, :1], accumulate=True),
    "index_put of pairs": lambda x: x.index_put(
        (MANY.to(x.device), (MANY % 7).to(x.device)), x[MANY.to(x.device), 0], accumulate=True
    ),
    "index_add": lambda x: x.index_add(0, MANY.to(x.device), x[MANY.to(x.device)], alpha=0.5),
    "index_add of columns": lambda x: x.index_add(1, COLUMNS.to(x.device), x[:, :4]),
    "index_copy": lambda x: x.index_copy(0, ONCE.to(x.device), x[:700] * 2),
    "index_fill": lambda x: x.index_fill(0, MANY.to(x.device), 1.5),
    "index_fill from the end": lambda x: x.index_fill(0, NEGATIVE.to(x.device), 1.5),
    "index_reduce": lambda x: x.index_reduce(0, MANY.to(x.device), x[MANY.to(x.device)], "amax"),
    "scatter": lambda x: x.scatter(1, per_row(900, 1, 7).to(x.device), 9.0),
    "scatter_add of rows": lambda x: x.scatter_add(0, per_row(900, 7, 11).to(x.device), x[:900]),
    "scatter_add of columns": lambda x: x.scatter_add(1, per_row(900, 6, 7).to(x.device), x[:900, :6]),
    "scatter_add of a vector": lambda x: x[:, 0, 0].scatter_add(
        0, MANY.to(x.device), x[:, :, 0].flatten()[:2500]
    ),
    "scatter_reduce": lambda x: x.scatter_reduce(0, per_row(900, 7, 11).to(x.device), x[:900], "amax"),
    "embedding": lambda x: F.embedding(MANY.view(50, 50).to(x.device), x[:, :, 0], padding_idx=5),
    "matrix product": lambda x: x[:, :, 0] @ x[:7, :, 1],
    "long matrix product": lambda x: x[:, :, 0].t() @ x[:, :, 1],
    "wide matrix product": lambda x: x[:7, :, 1] @ x[:, :, 0].t(),
    "addmm": lambda x: torch.addmm(x[:, :3, 2], x[:, :, 0], x[:7, :3, 1], beta=0.5, alpha=2),
    "long addmm": lambda x: torch.addmm(x[:7, :7, 2], x[:, :, 0].t(), x[:, :, 1], beta=0.5, alpha=2),
    "linear": lambda x: F.linear(x, x[:5, 0], x[1, :5, 0]),
    "products of a batch": lambda x: x @ x[:, :3],
    "baddbmm": lambda x: torch.baddbmm(x[0, 0, 0], x, x[:, :3], beta=2),
    "matrix and vector": lambda x: x[:, :, 0] @ x[0, :, 0],
    "convolution": lambda x: F.conv1d(x, x[:5, :7], x[0, :5, 0], padding=1),
    "transposed convolution": lambda x: F.conv_transpose1d(x, x[:7, :5], padding=1),
}
# what each of them, and its gradient, may leave to the lead shard: small operands, and operators that are not cut
LEAD = {
    "aten::fill_.Scalar",
    "aten::arange.start_out",
    "aten::_copy_from",
    "aten::zero_",
    "aten::sum.IntList_out",
}


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("name", CASES)
def test_values_order_and_gradients_are_torchs(name: str, shards: int) -> None:
    here, there = X.clone().requires_grad_(), X.to("mgpu").requires_grad_()
    torch.mgpu.reset_op_stats()
    want, got = CASES[name](here), CASES[name](there)
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=2e-5, atol=2e-5)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (want * weights).sum().backward()
    (got * weights.to("mgpu")).sum().backward()
    torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-4)
    stats = torch.mgpu.op_stats(reset=True)
    alone = {key for key, runs in stats.items() if runs["lead"] + runs["fallback"] > 0} - LEAD
    assert not alone, stats


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("order", itertools.permutations(range(3)))
@pytest.mark.parametrize("step", [1, 2])
def test_layouts_of_indexed_views_are_torchs_without_asking_python(
    order: tuple[int, int, int], step: int
) -> None:
    """Python's lock must not be asked for in a turn (cuda/mesh/gate.h): who waits for the turn may have it."""
    here, there = X.permute(order)[::step], X.to("mgpu").permute(order)[::step]
    square = MANY.view(50, 50).t()
    rows, columns, last = (square % size for size in here.shape)
    indices = (
        (rows,),
        (slice(None), columns),
        (Ellipsis, last),
        (rows, columns),
        (rows, slice(None), last),
        (slice(None), columns, last[:1]),
    )
    called: list[str] = []
    for index in indices:
        there_index = tuple(i.to("mgpu") if isinstance(i, Tensor) else i for i in index)
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename))
        try:
            got = there[there_index]
        finally:
            sys.setprofile(None)
        want = here[index]
        assert got.stride() == want.stride()
        assert torch.equal(got.cpu(), want)
    assert not [name for name in called if "torch" in Path(name).parts]


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_indices_of_what_is_not_zero(kind: torch.dtype) -> None:
    x = (MASK_3D * 3).to(kind)
    assert torch.equal(x.to("mgpu").nonzero().cpu(), x.nonzero())
    assert torch.equal(x.to("mgpu")[:0].nonzero().cpu(), x[:0].nonzero())


@pytest.mark.usefixtures("split_everything")
def test_index_add_repeats_to_the_last_bit_under_deterministic_algorithms() -> None:
    index, values = MANY.to("mgpu"), X[MANY].to("mgpu")
    torch.use_deterministic_algorithms(True)
    try:
        first = X.to("mgpu").index_add(0, index, values)
        for _ in range(3):
            assert torch.equal(X.to("mgpu").index_add(0, index, values), first)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(first.cpu(), X.index_add(0, MANY, X[MANY]))


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("at", [-ROWS - 1, ROWS, 10 * ROWS])
def test_an_index_out_of_range_is_named(at: int) -> None:
    if torch.mgpu.mesh().shards[0].startswith("cuda"):
        pytest.skip("a CUDA kernel stops the process")
    x, index = X.to("mgpu"), torch.tensor([0, 5, at, 7], device="mgpu")
    with pytest.raises(IndexError, match=f"index {at} is out of bounds for dimension 0 with size {ROWS}"):
        x[index]
    with pytest.raises(IndexError, match=f"index {at} is out of bounds for dimension 0 with size {ROWS}"):
        x.index_put_((index,), x[:4].clone())
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        x.index_add_(0, index, x[:4].clone())
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        x.gather(0, index[:, None, None].expand(4, 7, 3))


@pytest.mark.usefixtures("split_everything")
def test_wrong_shapes_get_torchs_words() -> None:
    x = X.to("mgpu")
    with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 0"):
        torch.cat([x, x[:, :2]])
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x[:, :, 0] @ x[:3, :, 0]
    with pytest.raises(IndexError, match=r"The shape of the mask .* does not match"):
        x[torch.ones(5, dtype=torch.bool, device="mgpu")]
    with pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape"):
        x[MANY.to("mgpu")] = x[:7].clone()
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.index_select(4, MANY.to("mgpu"))
    with pytest.raises(RuntimeError):
        x.gather(1, torch.zeros(ROWS + 5, 1, 3, dtype=torch.int64, device="mgpu"))


def test_results_are_dealt_to_all_shards(shards: int) -> None:
    x = torch.zeros(1_000_000, 4, device="mgpu")
    index = torch.arange(999_999, -1, -1, device="mgpu")
    torch.mgpu.reset_op_stats()
    results = [x[index], x[x[:, 0] == 0], torch.cat([x[:500_000], x]), x.index_select(0, index)]
    results += [x.gather(0, index[:, None].expand(-1, 4)), x @ x[:4], x.masked_select(x == 0)]
    stats = torch.mgpu.op_stats(reset=True)
    for result in results:
        places = torch.mgpu.placement(result)
        assert set(places.tolist()) == set(range(shards))
        assert (places.diff() >= 0).all()
    assert sum(runs["large"] for key, runs in stats.items() if "nonzero" not in key) == 0, stats


def test_a_few_rows_of_a_large_tensor_do_not_count_as_large() -> None:
    x = torch.zeros(1_000_000, 4, device="mgpu")
    index = torch.arange(3, device="mgpu")
    torch.mgpu.reset_op_stats()
    x[index]
    x[index] = 1.0
    x.index_add_(0, index, x[:3].clone())
    stats = torch.mgpu.op_stats(reset=True)
    assert sum(runs["large"] for runs in stats.values()) == 0, stats


def test_a_small_tensor_may_have_a_large_choice(shards: int) -> None:
    x = torch.randn(10, 100, device="mgpu")
    index = torch.arange(30_000, device="mgpu") % 10
    assert set(torch.mgpu.placement(x[index]).tolist()) == set(range(shards))
    assert torch.equal(x[index][19_999], x[9])


# ---- random fills

FILLS: dict[str, Callable[[int], Tensor]] = {
    "uniform_": lambda n: torch.rand(n, device="mgpu"),
    "normal_": lambda n: torch.randn(n // 4, 4, device="mgpu"),
    "random_": lambda n: torch.randint(-5, 1000, (n,), device="mgpu", dtype=torch.int32),
    "bernoulli_": lambda n: torch.empty(n, device="mgpu").bernoulli_(0.3),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.7, device="mgpu")),
    "exponential_": lambda n: torch.empty(n, device="mgpu").exponential_(),
    "dropout": lambda n: F.dropout(torch.ones(n, device="mgpu"), 0.25),
}
LARGE = 9_000_004  # three chunks

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import ns_mgpu_splat
ns_mgpu_splat.init()
import test_rows
print(test_rows.digests())
"""


def digests() -> list[str]:
    """A hash of every large fill with one seed, and of a small one behind it."""
    out = []
    for draw in FILLS.values():
        torch.manual_seed(5)
        for count in (LARGE, 40):
            out.append(hashlib.sha256(draw(count).cpu().numpy().tobytes()).hexdigest()[:16])
    return out


def test_large_random_fills_have_the_same_numbers_on_any_mesh(shards: int) -> None:
    here = digests()
    assert len(set(here)) > len(FILLS)
    on_gpus = torch.mgpu.mesh().shards[0].startswith("cuda")
    if on_gpus:
        native().set_parts_merged(False)
        try:
            assert digests() == here
        finally:
            native().set_parts_merged(True)
        return
    other = "cpu:2" if shards != 2 else "cpu:5"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={**os.environ, "MGPU_DEVICES": other, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == str(here)


@pytest.mark.parametrize("name", FILLS)
def test_large_random_fills_run_on_every_shard_and_repeat_no_chunk(name: str) -> None:
    torch.manual_seed(1)
    torch.mgpu.reset_op_stats()
    draws = FILLS[name](LARGE).flatten().float()
    stats = torch.mgpu.op_stats(reset=True)
    assert sum(runs["large"] for runs in stats.values()) == 0, stats
    chunk = 1 << 22
    first, second, rest = draws[:chunk], draws[chunk : 2 * chunk], draws[2 * chunk :]
    assert not torch.equal(first, second)
    assert not torch.equal(first[: rest.numel()], rest)
    mean = draws.double().mean().item()
    wanted = {"uniform_": 0.5, "normal_": 0, "random_": 497, "bernoulli_": 0.3, "bernoulli": 0.7}.get(name, 1)
    deviation = draws.double().std().item() / LARGE**0.5
    assert abs(mean - wanted) < 5 * deviation
    for part in (first, second):
        assert abs(part.double().mean().item() - wanted) < 10 * deviation


def test_dropout_of_a_large_tensor_has_its_gradient() -> None:
    x = torch.full((LARGE,), 2.0, device="mgpu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() / 2)
    assert y.unique().tolist() == [0.0, pytest.approx(2 / 0.75)]
