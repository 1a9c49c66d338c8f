# SPDX-License-Identifier: Apache-2.0
"""Several threads and processes: the viewer renders while training runs, and DataLoader workers fork."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_programs import build_program
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ns_mgpu_splat.device import native


def run_together(work: list[Callable[[], None]]) -> None:
    """Run all at once; the first exception comes out."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("split_everything")
def test_threads_train_and_read_at_once() -> None:
    before = torch.mgpu.memory_allocated()

    def train(seed: int) -> None:
        x = torch.randn(2000, 3, generator=torch.Generator().manual_seed(seed))
        here, there = x.clone().requires_grad_(), x.to("mgpu").requires_grad_()
        for _ in range(30):
            for leaf in (here, there):
                leaf.grad = None
                ((leaf * 2).exp().sum() + leaf.norm()).backward()
            torch.testing.assert_close(there.grad.cpu(), here.grad)

    def allocate() -> None:
        for size in range(1, 200):
            x = torch.mgpu.reserve((size, 7), 100_000)
            torch.mgpu.grow(x, size * 100)
            assert torch.full((size * 1000,), 2.0, device="mgpu").sum().item() == size * 2000

    run_together([lambda: train(0), lambda: train(1), allocate, allocate])
    assert torch.mgpu.memory_allocated() == before


def test_inner_threads_are_off_on_the_shards_only(shards: int) -> None:
    threads = torch.get_num_threads()
    x = torch.rand(1_000_000, device="mgpu")
    for _ in range(3):
        x.add_(1)
    assert torch.get_num_threads() == threads
    seen: list[int] = []
    run_together([lambda: seen.append(torch.get_num_threads())])
    assert seen == [threads]


class Numbers(Dataset[torch.Tensor]):
    """CPU tensors, made in a worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), float(index)).sort().values * 2


def test_forked_workers_make_cpu_tensors() -> None:
    torch.rand(1_000_000, device="mgpu").exp()  # the pool's threads run before the fork
    total = 0.0
    for batch in DataLoader(
        Numbers(), batch_size=10, num_workers=2, multiprocessing_context="fork", timeout=60
    ):
        total += batch.to("mgpu", non_blocking=True).sum().item()
    assert total == 2 * 1000 * sum(range(40))


def test_a_forked_child_gets_an_error_and_ends() -> None:
    x = torch.ones(500_000, device="mgpu")
    rows = torch.ones(1000, 3, device="mgpu")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(1)  # as DataLoader does: OpenMP's threads do not survive a fork
        texts = []
        for use in (
            lambda: x + 1,
            lambda: torch.zeros(3, device="mgpu"),
            lambda: x.sum().item(),
            lambda: x.cpu(),
            lambda: native().measure_rows(rows),
        ):
            try:
                use()
                texts.append("no error")
            except RuntimeError as error:
                texts.append(str(error).splitlines()[0])
        texts.append(str(torch.mgpu._is_in_bad_fork()))
        texts.append(str((torch.ones(100_000) * 2).sum().item()))
        del x, rows
        os.write(write, "\n".join(texts).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    lines = os.read(read, 10_000).decode().splitlines()
    os.close(read)
    assert status == 0
    assert all(line.startswith("mgpu cannot be used in a forked process") for line in lines[:5]), lines
    assert lines[5:] == ["True", "200000.0"]
    assert not torch.mgpu._is_in_bad_fork()
    assert not native().in_forked_child()


def test_a_child_that_is_forked_while_the_pool_works_has_a_pool(tmp_path: Path) -> None:
    """200 times, and a child of each. What another thread locks at that moment would stay locked: tests/cuda/check_fork.cpp."""
    sources = ["tests/cuda/check_fork.cpp", "cuda/mesh/fork_join.cpp"]
    program = build_program(tmp_path / "check_fork", sources, ["-O1"], cuda_headers=False)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 hung, 0 wrong\n"


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_pinning_never_fails() -> None:
    x = torch.arange(10.0)
    assert torch.equal(x.pin_memory(), x)
    assert not torch.ones(3, device="mgpu").is_pinned()
    seen = [batch.to("mgpu") for (batch,) in DataLoader(TensorDataset(x), batch_size=5, pin_memory=True)]
    assert torch.equal(torch.cat(seen).cpu(), x)


def test_streams_and_events() -> None:
    first, second = (
        torch.Event(device="mgpu", enable_timing=True),
        torch.Event(device="mgpu", enable_timing=True),
    )
    stream = torch.Stream(device="mgpu")
    default = torch.accelerator.current_stream()
    first.record()
    with stream:
        y = torch.ones(10, device="mgpu") * 2
        assert torch.mgpu.current_stream() == stream
    assert torch.accelerator.current_stream() == default
    second.record()
    stream.wait_event(second)
    stream.synchronize()
    second.synchronize()
    y.record_stream(stream)
    torch.mgpu.synchronize()
    torch.accelerator.synchronize()
    assert first.elapsed_time(second) >= 0
    assert torch.accelerator.current_accelerator() == torch.device("mgpu")
