# SPDX-License-Identifier: Apache-2.0
"""A `mgpu` tensor is an ordinary tensor. Oracle: the same operators on CPU tensors. All operands are split."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("split_everything")

ROWS = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Same values, shape and dtype."""
    assert actual.device.type == "mgpu"
    torch.testing.assert_close(
        actual.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


EXPRESSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elementwise": lambda x: (x * 2 + x.exp() - 1).sigmoid() / x.abs().add(1),
    "broadcast": lambda x: x - x.mean(0) + x[:, :1],
    "cpu scalar": lambda x: x * torch.tensor(2.0),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0, keepdim=True),
    "mean of columns": lambda x: x[:998].mean(0),
    "max of rows": lambda x: x.max(1).values,
    "argmax": lambda x: x.argmax(),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(),
    "any": lambda x: (x > 3).any(0),
    "matmul": lambda x: x @ x.T[:, :7],
    "einsum": lambda x: torch.einsum("ni,nj->ij", x, x),
    "inverse": lambda x: torch.linalg.inv(x[:3] + 3 * torch.eye(3, device=x.device)),
    "mask": lambda x: x[x[:, 0] > 0],
    "where": lambda x: torch.where(x > 0, x, -x),
    "nonzero": lambda x: (x > 1).nonzero(),
    "sort": lambda x: torch.sort(x, 0).indices,
    "topk": lambda x: x.flatten().topk(5).values,
    "unique": lambda x: torch.unique((x * 3).int(), dim=0, return_counts=True)[1],
    "cumsum of rows": lambda x: x.cumsum(1),
    "cumsum": lambda x: x.cumsum(0),
    "bincount": lambda x: torch.bincount((x.abs() * 3).long().flatten()),
    "cat": lambda x: torch.cat([x, x[:5]]),
    "stack": lambda x: torch.stack([x, x], 1),
    "repeat": lambda x: x.repeat(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(3),
    "unfold": lambda x: x.unfold(0, 4, 2),
    "permute": lambda x: x[:, None].expand(-1, 4, -1).permute(2, 0, 1),
    "transposed": lambda x: x.t().exp(),
    "strided": lambda x: x[::2, 1:] * 2,
    "softmax": lambda x: F.softmax(x, 1),
    "complex": lambda x: torch.fft.fft(x, dim=0).conj().angle().abs(),
    "quantile": lambda x: x.quantile(0.5),
    "int division": lambda x: (x * 100).int() // 7,
    "comparison": lambda x: x > x.roll(1),
    "no rows": lambda x: x[:0] * 2,
    "sum of no rows": lambda x: x[:0].sum(0),
    "scalar": lambda x: x[0, 0] + 1,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression_equals_the_cpus(name: str) -> None:
    expression = EXPRESSIONS[name]
    same(expression(ROWS.to("mgpu")), expression(ROWS), 1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.int16]
)
def test_casts_there_and_back(dtype: torch.dtype) -> None:
    same(ROWS.abs().to("mgpu").to(dtype).to(torch.float32), ROWS.abs().to(dtype).to(torch.float32))


def test_writing_through_indices_equals_the_cpus() -> None:
    index = torch.randint(0, 1000, (100,), generator=torch.Generator().manual_seed(1)).unique()
    here, there = ROWS.clone(), ROWS.to("mgpu")
    for tensor in (here, there):
        at = index.to(tensor.device)
        tensor[tensor > 1] = 0
        tensor[at] = 1
        tensor.index_add_(0, at, tensor[: len(at)].clone())
        tensor.scatter_add_(0, at[:, None].expand(-1, 3), tensor[: len(at)].clone())
    same(there, here)
    same(there[index], here[index])  # a CPU index, as on CUDA


def test_views_share_memory_and_know_their_base() -> None:
    base = ROWS.to("mgpu").clone()
    column = base.t()[1]
    column.zero_()
    assert base[:, 1].abs().sum().item() == 0
    assert column.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert column._base is base
    assert base.view(torch.int32).dtype == torch.int32
    assert base.as_strided((2,), (1,)).shape == (2,)


def test_in_place_keeps_the_address_and_out_resizes() -> None:
    x = ROWS.to("mgpu")
    fixed = torch.empty(1000, 3, device="mgpu")
    address = fixed.data_ptr()
    torch.mul(x, x, out=fixed)
    assert fixed.data_ptr() == address
    same(fixed, ROWS * ROWS)
    fresh = torch.empty(0, device="mgpu")
    torch.cat([x, x], out=fresh)
    same(fresh, torch.cat([ROWS, ROWS]))
    same(x.add_(1).mul_(2).clamp_(min=0), ((ROWS + 1) * 2).clamp(min=0))
    assert torch.empty(4, device="mgpu").resize_(10).shape == (10,)


def test_factories_make_tensors_on_the_device() -> None:
    made = [
        *(
            make(3, 4, device="mgpu")
            for make in (torch.zeros, torch.ones, torch.rand, torch.randn, torch.empty)
        ),
        torch.arange(5, device="mgpu"),
        torch.linspace(0, 1, 5, device="mgpu"),
        torch.eye(3, device="mgpu"),
        torch.full((2,), 3.0, device="mgpu"),
        torch.tensor([1, 2], device="mgpu"),
        torch.randperm(10, device="mgpu"),
        torch.tril_indices(3, 3, device="mgpu"),
        torch.zeros_like(torch.empty(2, device="mgpu")),
        torch.empty(2, device="mgpu").new_ones(3),
    ]
    assert {str(tensor.device) for tensor in made} == {"mgpu:0"}
    same(torch.full((5,), 3.0, device="mgpu"), torch.full((5,), 3.0))
    with torch.device("mgpu"):
        assert torch.zeros(2).is_mgpu


def test_a_cpu_operand_with_dimensions_is_refused() -> None:
    with pytest.raises(RuntimeError, match="found at least two devices, mgpu:0 and cpu"):
        ROWS.to("mgpu") + ROWS


def test_sparse_layouts_are_refused_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"strided tensors only|Sparse"):
        torch.empty(3, 3, device="mgpu", layout=torch.sparse_csr)


def compressed(layout: torch.layout) -> torch.Tensor:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return torch.eye(4).to_sparse(layout=layout, blocksize=blocks)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_a_move_of_a_sparse_tensor_is_refused_in_words(name: str) -> None:
    """Torch made the compressed ones of three strided tensors without asking the device, and they could not be printed."""
    tensor = compressed(getattr(torch, name))
    said = (
        f"Device mgpu has strided tensors only, and got layout {name.title().replace('_', '')}. Use to_dense"
    )
    for move in (
        lambda: tensor.to("mgpu"),
        lambda: tensor.mgpu(),
        lambda: tensor.to("mgpu", torch.float64),
        lambda: repr(torch.empty_like(tensor, device="mgpu")),  # torch's own kernel makes it
        lambda: tensor.clone().requires_grad_().to("mgpu"),
    ):
        with pytest.raises(RuntimeError, match=said):
            move()
    same(tensor.to_dense().to("mgpu"), torch.eye(4))
    assert torch.equal(tensor.to(torch.float64).to_dense(), torch.eye(4, dtype=torch.float64))  # as before


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_of_strided_ones_is_refused_in_words() -> None:
    rows, columns, values = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2)
    for make in (
        lambda: torch.sparse_csr_tensor(rows, columns, values, (2, 2), device="mgpu"),
        lambda: torch.sparse_csr_tensor(rows.to("mgpu"), columns.to("mgpu"), values.to("mgpu"), (2, 2)),
        lambda: torch.sparse_coo_tensor(torch.stack([rows[:2], columns]), values, (2, 2), device="mgpu"),
    ):
        with pytest.raises(RuntimeError, match="Device mgpu has strided tensors only, and got layout Sparse"):
            make()
    assert torch.sparse_csr_tensor(rows, columns, values, (2, 2)).values().tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore")  # torch's own, on prototypes and on what it will remove
def test_nested_and_quantised_tensors_are_refused_in_a_sentence() -> None:
    """Torch listed all of its backends, on pages."""
    plain = "Device mgpu has strided tensors of plain numbers only, and got a "
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    by_channel = torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8)
    for tensor, what in ((nested, "nested"), (quantised, "quantised"), (by_channel, "quantised")):
        for move in (
            lambda tensor=tensor: tensor.to("mgpu"),
            lambda tensor=tensor: tensor.mgpu(),
            lambda tensor=tensor: torch.zeros(2, 3, device="mgpu").copy_(tensor),
        ):
            with pytest.raises(RuntimeError, match=plain + what) as refused:
                move()
            assert str(refused.value).endswith("or leave the tensor on the CPU.")
    with pytest.raises(RuntimeError, match=plain + "quantised"):
        torch.empty(3, dtype=torch.qint8, device="mgpu")
    assert quantised.dequantize().to("mgpu").cpu().tolist() == pytest.approx([1.0] * 3)  # as it advises


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_jagged_nested_tensors_are_strided_ones_to_the_device() -> None:
    """What the refusal of other nested tensors advises."""
    parts = [torch.rand(2, 3), torch.rand(1, 3)]
    moved = torch.nested.nested_tensor(parts, layout=torch.jagged).to("mgpu").requires_grad_()
    doubled = moved * 2
    same(doubled.values(), torch.cat(parts) * 2)
    doubled.values().sum().backward()
    same(moved.grad.values(), torch.full((3, 3), 2.0))


def test_an_unsupported_numpy_view_is_refused_as_on_cuda() -> None:
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        ROWS.to("mgpu").numpy()


def test_values_reach_the_host() -> None:
    x = torch.tensor([1.5, 2.0], device="mgpu")
    assert x.tolist() == [1.5, 2.0]
    assert float(x[0]) == 1.5
    assert bool((x > 1).all())
    assert f"{x[0]:.2f}" == "1.50"
    assert repr(x) == "tensor([1.5000, 2.0000], device='mgpu:0')"
    assert "requires_grad=True" in repr(torch.nn.Parameter(x))
    if torch.mgpu.mesh().shards[0].startswith("cpu"):
        assert (ctypes.c_float * 2).from_address(x.data_ptr())[1] == 2.0  # addresses are plain


def test_copies_between_layouts_devices_and_dtypes() -> None:
    x = torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(2))
    there = torch.empty(6, 40, 5, device="mgpu", dtype=torch.float64).permute(1, 2, 0)
    there.copy_(x)
    same(there, x.double())
    there.copy_(x[:, :1])  # broadcast
    same(there, x[:, :1].double().expand(40, 5, 6).contiguous())
    here = torch.empty(40, 5, 6)
    here.copy_(there)
    torch.testing.assert_close(here, x[:, :1].expand(40, 5, 6).contiguous())
    torch.testing.assert_close(x.to("mgpu").t_().cpu() if x.dim() == 2 else x.to("mgpu").cpu(), x)


def test_a_deep_copy_is_a_copy() -> None:
    x = ROWS.to("mgpu")
    y = copy.deepcopy(x)
    assert y.data_ptr() != x.data_ptr()
    same(y, ROWS)
    assert copy.deepcopy(torch.nn.Parameter(x)).is_mgpu


def test_default_device_and_module_methods() -> None:
    module = torch.nn.Linear(3, 2).mgpu()
    assert next(module.parameters()).is_mgpu
    assert not next(module.cpu().parameters()).is_mgpu
    assert ROWS.mgpu().is_mgpu


def test_another_index_than_the_only_one_is_refused() -> None:
    for make in (
        lambda: torch.ones(3, device="mgpu:1"),
        lambda: torch.empty_strided((3,), (1,), device="mgpu:2"),
        lambda: torch.ones(3).to("mgpu:1"),
        lambda: torch.ones(3, device="mgpu").to("mgpu:1"),
    ):
        with pytest.raises(
            RuntimeError, match=r"There is one mgpu device, mgpu:0, and no mgpu:\d; its shards"
        ):
            make()
