# SPDX-License-Identifier: Apache-2.0
"""What only GPUs have: streams, CUDA aliases, plain CUDA to compare with. Memory: test_memory_gpu.py.

Comparisons with plain CUDA are made with tensors outside any graph, or in another process: once `mgpu` is registered,
autograd on CUDA tensors is dead in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ns_mgpu_splat.device import native

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_byte_is_left")]

PAGE = 2 << 20


@pytest.fixture
def parts_apart() -> Iterator[None]:
    """Every shard gets a call of its own, also on one GPU."""
    native().set_parts_merged(False)
    yield
    native().set_parts_merged(True)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A copy on plain CUDA."""
    return x.cpu().cuda()


# ---- streams


def test_streams_are_cuda_streams_that_are_not_the_default() -> None:
    torch.ones(1, device="mgpu")
    default = torch.cuda.current_stream().cuda_stream
    assert default != 0
    stream = torch.Stream(device="mgpu")
    with stream:
        torch.ones(1, device="mgpu")
        inside = torch.cuda.current_stream().cuda_stream
    assert inside not in (0, default)
    assert torch.cuda.current_stream().cuda_stream == default


def test_memory_used_on_a_side_stream_is_not_reused_too_early() -> None:
    side = torch.Stream(device="mgpu")
    for size in (1000, 4 * PAGE):  # of a slab, of an arena of its own
        x = torch.full((size,), 3, dtype=torch.int32, device="mgpu")
        torch.mgpu.synchronize()
        with side:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            y = x + 1
        x.record_stream(side)
        address = x.data_ptr()
        del x
        other = torch.full((size,), 9, dtype=torch.int32, device="mgpu")
        # on a machine so busy that the side stream has come past by now, its memory may be used again
        assert side.query() or other.data_ptr() != address
        torch.mgpu.synchronize()
        assert (y == 4).all()


@pytest.mark.sanitize
def test_events_order_streams() -> None:
    side, event = torch.Stream(device="mgpu"), torch.Event(device="mgpu")
    x = torch.zeros(1 << 20, device="mgpu")
    torch.mgpu.synchronize()
    with side:
        torch.cuda._sleep(100_000_000)
        x.add_(1)
        event.record()
    torch.accelerator.current_stream().wait_event(event)
    assert x.sum().item() == 1 << 20


@pytest.mark.sanitize
def test_backward_on_a_side_stream() -> None:
    x = torch.arange(100.0, device="mgpu").requires_grad_()
    stream = torch.Stream(device="mgpu")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        (x * x).sum().backward()
    torch.accelerator.current_stream().wait_stream(stream)
    assert torch.equal(x.grad.cpu(), torch.arange(100.0) * 2)


def test_threads_train_on_streams_of_their_own() -> None:
    results: dict[int, torch.Tensor] = {}
    x = torch.randn(3000, 40, generator=torch.Generator().manual_seed(3))

    def train(seed: int) -> None:
        stream = torch.Stream(device="mgpu")
        with stream:
            there = x.to("mgpu")
            weight = torch.full((40, 40), 0.01 * seed, device="mgpu", requires_grad=True)
            optimizer = torch.optim.Adam([weight], lr=1e-2)
            for _ in range(20):
                optimizer.zero_grad()
                (there @ weight - there).square().mean().backward()
                optimizer.step()
            results[seed] = weight.detach().cpu()

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    together = dict(results)
    for seed in range(3):
        train(seed)
        assert torch.equal(results[seed], together[seed])


def test_a_tensor_of_a_torch_kernel_is_kept_for_another_stream() -> None:
    side = torch.Stream(device="mgpu")
    x = torch.arange(1_000_000, device="mgpu").flip(0)  # memory of torch's own allocator
    torch.mgpu.synchronize()
    with side:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        y = x + 1
    x.record_stream(side)
    del x
    others = [torch.arange(1_000_000, device="mgpu").flip(0) * 0 for _ in range(3)]
    torch.mgpu.synchronize()
    assert torch.equal(y, torch.arange(1_000_000, 0, -1, device="mgpu"))
    del others


def test_events_tell_the_time_of_a_stream() -> None:
    stream = torch.Stream(device="mgpu")
    first, second = (torch.Event(device="mgpu", enable_timing=True) for _ in range(2))
    with stream:
        first.record()
        torch.cuda._sleep(100_000_000)
        second.record()
    assert not second.query()
    second.synchronize()
    assert second.query()
    assert 10 < first.elapsed_time(second) < 1000  # ms
    assert stream.query()


def test_a_graph_capture_is_refused_in_words() -> None:
    x = torch.ones(4, device="mgpu")
    torch.mgpu.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"), torch.cuda.graph(graph):
        x + 1
    assert (x + 1).sum().item() == 8


def test_cuda_work_of_a_thread_comes_before_its_first_use_of_mgpu() -> None:
    seen: list[float] = []

    def work() -> None:
        y = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(100_000_000)
        y.add_(1)
        seen.append(torch.mgpu.from_cuda(y).sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [1 << 20]


# ---- the same numbers as plain CUDA


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.randn(3_000_001, device=d),
        lambda d: torch.rand(1000, 7, device=d),
        lambda d: torch.empty(2_000_000, device=d).exponential_(),
        lambda d: torch.bernoulli(torch.full((1_000_003,), 0.3, device=d)),
        lambda d: torch.randint(0, 1000, (100_001,), device=d),
        lambda d: torch.randperm(100_000, device=d),
    ],
)
def test_random_fills_are_cudas_on_any_mesh(draw: Callable[[str], torch.Tensor]) -> None:
    torch.cuda.manual_seed(11)
    want = draw("cuda").cpu()
    torch.mgpu.manual_seed(11)
    assert torch.equal(draw("mgpu").cpu(), want)


LARGE = torch.randn(2_000_003, 3, generator=torch.Generator().manual_seed(0))

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda x: x.exp(),
    "in place": lambda x: x.clone().mul_(3).add_(x),
    "sum": lambda x: x.double().sum(),
    "rows": lambda x: x.norm(dim=1),
    "columns": lambda x: x.amax(0),
    "cast": lambda x: x.half().float(),
    "copy": lambda x: x.t().contiguous(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "index_select": lambda x: x.index_select(0, torch.arange(0, 2_000_003, 2, device=x.device)),
    "gather": lambda x: x.gather(1, (x > 0).long()),
    "cat": lambda x: torch.cat([x, x[:100]]),
    "mask": lambda x: x[x[:, 0] > 0],
    "lists": lambda x: torch._foreach_mul([x, x[:9].clone()], 2.0)[0],
    "scatter": lambda x: torch.zeros(5, 3, device=x.device).index_add_(
        0, torch.arange(5, device=x.device), x[:5]
    ),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_large_operators_equal_plain_cuda(name: str, apart: bool) -> None:
    native().set_parts_merged(not apart)
    try:
        got = OPERATORS[name](LARGE.to("mgpu"))
        want = OPERATORS[name](LARGE.cuda())
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-6, atol=1e-6)
    finally:
        native().set_parts_merged(True)


@pytest.mark.usefixtures("parts_apart", "split_everything")
def test_a_fused_adam_step_of_every_shard_is_cudas() -> None:
    sizes = [(1001, 3), (7,), (200_000, 4)]
    start = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in sizes]
    results = []
    for device in ("cuda", "mgpu"):
        parameters = [value.to(device).requires_grad_() for value in start]
        optimizer = torch.optim.Adam(parameters, lr=1e-2, fused=True)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.5
            optimizer.step()
        results.append([parameter.detach().cpu() for parameter in parameters])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


UNET = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from test_modules import losses
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
print(json.dumps(losses("cuda", 200, 8, 128, 192)))
"""


def test_a_unet_trains_with_plain_cudas_losses() -> None:
    from test_modules import losses

    done = subprocess.run(
        [sys.executable, "-c", UNET, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    want = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.mgpu.reset_op_stats()
    try:
        # not by assignment: torch's operator database, imported by another test, forbids that
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            got = torch.tensor(losses("mgpu", 200, 8, 128, 192))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
    difference = ((got[:10] - want[:10]) / want[:10]).abs().max().item()
    end, end_wanted = got[150:].mean().item(), want[150:].mean().item()
    print(f"first ten within {difference:.1e}; steps 150 to 200: {end:.6f}, plain CUDA {end_wanted:.6f}")
    assert difference <= 1e-4
    assert end == pytest.approx(end_wanted, rel=0.02)
    assert end < 0.5 * want[0].item()


@pytest.mark.usefixtures("parts_apart")
def test_a_unet_trains_with_a_call_for_every_shard() -> None:
    from test_modules import losses

    native().set_parts_merged(True)
    want = losses("mgpu", 10, 8, 64, 96)
    native().set_parts_merged(False)
    # cut batches, so sums in another order; TF32 rounds them to 10 bits
    assert losses("mgpu", 10, 8, 64, 96) == pytest.approx(want, rel=1e-2)


# ---- interop


@pytest.mark.sanitize
def test_cuda_aliases_share_memory_both_ways() -> None:
    x = torch.zeros(5, 3, device="mgpu", requires_grad=True)
    y = torch.mgpu.as_cuda(x[1:])
    assert y.is_cuda
    assert not y.requires_grad
    assert y.data_ptr() == x[1:].data_ptr()
    y.fill_(2)
    assert x.sum().item() == 24
    z = torch.ones(6, device="cuda")
    w = torch.mgpu.from_cuda(z)
    assert w.is_mgpu
    w.mul_(5)
    assert z.sum().item() == 30
    del x, z
    assert y.sum().item() == 24
    assert w.sum().item() == 30
    with pytest.raises(ValueError, match="on a GPU of the mesh"):
        torch.mgpu.from_cuda(torch.ones(3))
    with pytest.raises(ValueError, match="needs a tensor on mgpu"):
        torch.mgpu.as_cuda(torch.ones(3))


def test_a_cuda_operand_is_refused() -> None:
    x, y = torch.ones(3, device="mgpu"), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="at least two devices, mgpu:0 and cuda:0"):
        x + y
    with pytest.raises(RuntimeError, match=r"mgpu:0 and cuda:0.*torch.mgpu.from_cuda"):
        x.scatter_add_(0, torch.zeros(3, dtype=torch.int64, device="mgpu"), y)


def test_cupy_works_on_the_alias() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is optional")
    x = torch.arange(6.0, device="mgpu")
    torch.mgpu.synchronize()
    array = cupy.asarray(torch.mgpu.as_cuda(x))
    array += 1
    cupy.cuda.Device().synchronize()
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    through_dlpack = cupy.from_dlpack(torch.mgpu.as_cuda(x))
    assert float(through_dlpack.sum()) == 21


def test_dlpack_and_the_cuda_array_interface_go_through_the_alias() -> None:
    x = torch.arange(6.0, device="mgpu").view(2, 3)
    alias = torch.mgpu.as_cuda(x)
    assert alias.__cuda_array_interface__["data"][0] == x.data_ptr()
    again = torch.mgpu.from_cuda(torch.from_dlpack(alias))
    assert again.is_mgpu
    assert again.data_ptr() == x.data_ptr()
    again.t()[1].fill_(7)
    assert x.tolist() == [[0, 7, 2], [3, 7, 5]]


def test_numba_works_on_the_alias() -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba is optional")
    x = torch.arange(6.0, device="mgpu")
    torch.mgpu.synchronize()
    array = cuda.as_cuda_array(torch.mgpu.as_cuda(x))
    array[2:4].copy_to_device(array[0:2])  # no kernel: what numba can compile depends on its numpy
    cuda.synchronize()
    assert x.tolist() == [0, 1, 0, 1, 4, 5]


def test_warp_works_on_the_alias() -> None:
    warp = pytest.importorskip("warp", reason="Warp is optional")
    x = torch.zeros(6, device="mgpu")
    torch.mgpu.synchronize()
    array = warp.from_torch(torch.mgpu.as_cuda(x))
    assert array.ptr == x.data_ptr()
    array.fill_(3.0)
    warp.synchronize()
    assert x.sum().item() == 18


def test_cuda_python_reads_and_writes_a_tensor() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is optional")
    x, y = torch.arange(1000.0, device="mgpu"), torch.zeros(1000, device="mgpu")
    stream = torch.accelerator.current_stream()
    native_stream = torch.cuda.current_stream().cuda_stream
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    (error,) = runtime.cudaMemcpyAsync(y.data_ptr(), x.data_ptr(), x.nbytes, kind, native_stream)
    assert int(error) == 0
    stream.synchronize()
    assert torch.equal(x, y)
    error, attributes = runtime.cudaPointerGetAttributes(x.data_ptr())
    assert int(error) == 0
    assert attributes.device == torch.cuda.current_device()


def test_pinned_memory_is_cudas() -> None:
    x = torch.arange(1000.0).pin_memory()
    assert x.is_pinned()
    y = x.to("mgpu", non_blocking=True)
    assert torch.equal(y.cpu(), x)


def test_topology() -> None:
    mesh = torch.mgpu.mesh()
    count = len(mesh.shards)
    assert [len(row) for row in mesh.peer_matrix] == [count] * count
    for a in range(count):
        for b in range(count):
            same = mesh.shards[a] == mesh.shards[b]
            assert (mesh.links[a][b] == "same") == same
            assert mesh.peer_matrix[a][b] == (
                same or torch.cuda.can_device_access_peer(mesh.shards[a], mesh.shards[b])
            )


# ---- the operator database against plain CUDA, which runs in another process


def test_operators_give_plain_cudas_values_and_gradients(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("opinfo_cuda.py"))
    reference = str(tmp_path / "cuda.pt")
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    subprocess.run([sys.executable, script, "cuda", reference], env=here, check=True, timeout=900)
    done = subprocess.run(
        [sys.executable, script, "mgpu", reference], env=here, capture_output=True, text=True, timeout=900
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
