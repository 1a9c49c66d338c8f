# SPDX-License-Identifier: Apache-2.0
"""Kernels of other libraries on the PrivateUse1 key run as they are (MGPU_MEMORY=managed): what gsplat 1.6 and fvdb-core
need of a backend, in a library built here from foreign/, which knows torch and CUDA and nothing of ours. gsplat 1.6 itself is
not on PyPI. Oracle: arithmetic.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_mgpu_splat.device import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("MGPU_MEMORY") != "managed", reason="run with MGPU_MEMORY=managed"),
]

FOLDER = Path(__file__).with_name("foreign")
LONG = 100_000_000  # cycles of the GPU's clock: about 50 ms


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The foreign library, compiled (half a minute) and loaded."""
    out = tmp_path_factory.mktemp("foreign")
    jobs = []
    for name, compiler in (
        ("foreign.cu", build.cuda_compiler()),
        ("foreign_ops.cpp", build.host_compiler("cuda")),
    ):
        flags = [
            flag.replace(",-fvisibility=hidden", "")
            for flag in compiler.flags
            if flag != "-fvisibility=hidden"
        ]
        jobs.append(
            subprocess.Popen(
                [*compiler.command, *flags, "-c", str(FOLDER / name), "-o", str(out / f"{name}.o")]
            )
        )
    assert [job.wait() for job in jobs] == [0, 0]
    target = out / "libforeign.so"
    objects = [str(path) for path in out.glob("*.o")]
    link = [
        *build.host_compiler("cuda").command,
        "-shared",
        *objects,
        "-o",
        str(target),
        *build._link_flags("cuda"),
    ]
    subprocess.run(link, check=True)
    torch.ops.load_library(target)
    return target


@pytest.fixture
def ops(library: Path) -> Any:
    return torch.ops.mgpu_foreign


@pytest.mark.parametrize("count", [1, 1000, 3_000_017])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_dispatched_kernel_sees_our_tensors_and_we_see_its(ops: Any, count: int, prefetch: bool) -> None:
    x = torch.arange(count, dtype=torch.float32, device="mgpu") % 1000  # made by an operator of torch's
    y = ops.scale(x + 1, 2.0, prefetch)
    assert y.device.type == "mgpu"
    assert torch.equal((y * 0.5).cpu(), torch.arange(count) % 1000 + 1.0)
    torch.mgpu.place(x, 0) if x.nbytes >= 1 << 20 else None
    assert torch.equal(ops.scale(x, 1.0, prefetch).cpu(), torch.arange(count) % 1000.0)


def test_autograd_goes_through_a_foreign_kernel(ops: Any) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return ops.scale(x, 3.0, True)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ops.scale(grad.contiguous(), 3.0, True)  # in autograd's thread

    x = torch.ones(100_000, device="mgpu", requires_grad=True)
    (Scale.apply(x) * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.eq(6).all()


def test_foreign_work_comes_after_ours_and_before_ours(ops: Any) -> None:
    x = torch.zeros(1_000_000, device="mgpu")
    torch.mgpu.synchronize()
    for turn in range(3):
        torch.cuda._sleep(LONG)
        x.fill_(turn)  # late
        y = ops.scale(x, 2.0, False)
        ops.slow_fill_(x, -1.0, LONG // 10)  # late, too
        z = x + y
        assert z.eq(2 * turn - 1).all()


def test_foreign_work_on_a_side_stream(ops: Any) -> None:
    side = torch.Stream(device="mgpu")
    x = torch.zeros(1_000_000, device="mgpu")
    torch.mgpu.synchronize()
    with side:
        ops.slow_fill_(x, 5.0, LONG // 10)
        y = ops.scale(x, 2.0, True)
    torch.accelerator.current_stream().wait_stream(side)
    assert (x + y).eq(15).all()


def test_the_host_reads_what_kernels_wrote(ops: Any) -> None:
    x = torch.full((10_000,), 0.5, device="mgpu")
    results = [x, x + 1, x @ torch.eye(10_000, 3, device="mgpu"), torch.sort(x).values, torch.cat([x, x])]
    want = [5000.0, 15000.0, 1.5, 5000.0, 10000.0]  # of our pool, of operators, of torch's own kernels
    assert [ops.host_sum(result) for result in results] == want


def test_raw_memory_is_given_and_taken_back(ops: Any) -> None:
    gc.collect()
    before = torch.mgpu.memory_allocated()
    for count in (10, 100_000, 1_000_000):
        assert ops.raw_round_trip(count) == 3.0 * count
    torch.mgpu.synchronize()
    assert torch.mgpu.memory_allocated() == before


def test_pinned_memory(ops: Any) -> None:
    x = torch.zeros(1, device="mgpu")
    assert ops.pinned_offsets(x, 1000).sum().item() == 499_500


def test_plain_cuda_tensors_inside_a_foreign_operator(ops: Any) -> None:
    x = torch.arange(300_000, dtype=torch.float32, device="mgpu")
    assert torch.equal(ops.through_cuda(x).cpu(), torch.arange(300_000) * 3.0)
    assert torch.equal(
        (x * 2).cpu(), torch.arange(300_000) * 2.0
    )  # the device that it left current does not matter


@pytest.mark.parametrize("batched", [0, 1])
def test_prefetch_by_plain_calls(library: Path, batched: int) -> None:
    """By ctypes: to the host, there and back, with the tensor at work in between."""
    foreign = ctypes.CDLL(str(library))
    x = torch.ones(2_000_000, device="mgpu")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for gpu in (-1, 0, -1, 0):
        code = foreign.foreign_prefetch(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.nbytes), ctypes.c_int(gpu), batched, stream
        )
        assert code == 0
        x.add_(1)
    torch.mgpu.synchronize()
    values = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    assert values[0] == values[x.numel() - 1] == 5
    assert x.eq(5).all()
