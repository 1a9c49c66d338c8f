# SPDX-License-Identifier: Apache-2.0
"""Aliases of the same memory, DLPack, other libraries' operators, and the rest of torch.mgpu's face."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from ns_mgpu_splat.device import module

DOCS = Path(__file__).resolve().parents[2] / "docs" / "device.md"


def test_host_aliases_share_memory_and_have_no_gradient() -> None:
    x = torch.zeros(4, 3, device="mgpu", requires_grad=True)
    view = torch.mgpu.as_host(x[1:])
    assert view.device.type == "cpu"
    assert not view.requires_grad
    assert view.data_ptr() == x[1:].data_ptr()
    view.fill_(2)
    assert x.sum().item() == 18
    here = torch.zeros(5)
    there = torch.mgpu.from_host(here)
    assert there.is_mgpu
    there.add_(1)
    assert here.tolist() == [1] * 5
    del x
    assert view.sum().item() == 18  # the alias keeps the memory


def test_aliases_of_the_wrong_device_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a tensor on mgpu"):
        torch.mgpu.as_host(torch.zeros(3))
    with pytest.raises(ValueError, match="needs a strided CPU tensor"):
        torch.mgpu.from_host(torch.zeros(3, device="mgpu"))


def test_cuda_aliases_need_gpus() -> None:
    with pytest.raises(RuntimeError, match="needs shards on GPUs, and this mesh is cpu:0"):
        torch.mgpu.as_cuda(torch.zeros(3, device="mgpu"))
    with pytest.raises(RuntimeError, match="needs shards on GPUs, and this mesh is cpu:0"):
        torch.mgpu.from_cuda(torch.zeros(3))


def test_dlpack_capsules() -> None:
    x = torch.ones(3, device="mgpu")
    y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert y.is_mgpu
    assert y.data_ptr() == x.data_ptr()


def test_a_custom_operator_with_gradient() -> None:
    @torch.library.custom_op("mgpu_test::square", mutates_args=(), device_types="mgpu")
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_autograd(
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    x = torch.tensor([1.0, 3.0], device="mgpu", requires_grad=True)
    square(x).sum().backward()
    assert x.grad.tolist() == [2, 6]


def test_an_operator_for_the_cpu_runs_through_the_fallback() -> None:
    @torch.library.custom_op("mgpu_test::shift", mutates_args=("x",), device_types="cpu")
    def shift(x: torch.Tensor, by: float) -> None:
        x.add_(by)

    x = torch.zeros(3, device="mgpu")
    shift(x, 2.0)
    assert x.tolist() == [2, 2, 2]


def test_profiler_sees_the_operators() -> None:
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(100, device="mgpu")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        (x * 2).sum().item()
    assert "aten::mul" in {event.key for event in seen.key_averages()}


def test_device_arguments() -> None:
    torch.mgpu.set_device("mgpu:0")
    torch.mgpu.set_device(0)
    with torch.mgpu.device(0):
        pass
    with pytest.raises(ValueError, match="There is one mgpu device, mgpu:0, and no mgpu:1"):
        torch.mgpu.set_device(1)
    with pytest.raises(ValueError, match="Expected a mgpu device"):
        torch.mgpu.synchronize("cpu")
    assert torch.mgpu.get_device_name().startswith("mgpu (cpu:0")
    free, total = torch.mgpu.mem_get_info()
    assert 0 < free <= total == torch.mgpu.get_device_properties().total_memory
    assert torch.mgpu.is_available()
    assert torch.mgpu.is_initialized()


def public_names() -> set[str]:
    """What torch.mgpu offers beside what every device module has."""
    source = inspect.getsource(module)
    own = source[source.index("# ---- part two") :]
    return set(re.findall(r"^def ([a-z]\w+)", own, re.M))


def test_the_page_lists_every_function_and_exception() -> None:
    from test_opinfo import EXCEPTIONS

    page = DOCS.read_text()
    assert len(public_names()) > 10
    missing = [name for name in public_names() if f"`{name}" not in page and f"torch.mgpu.{name}" not in page]
    assert not missing
    assert [name for name in EXCEPTIONS if f"`{name}`" not in page] == []
