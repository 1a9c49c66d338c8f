# SPDX-License-Identifier: Apache-2.0
"""Device tests run on whatever mesh MGPU_DEVICES names; `make test` runs them on cpu:1 and on cpu:3, `make test-gpu` on
meshes of GPUs. `HOST_ONLY` lists those that claim something of the host flavour."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat.device import config, native

HOST_ONLY = {
    "test_operators_give_the_cpus_values_and_gradients": "on GPUs, opinfo_cuda.py compares with plain CUDA",
    "test_host_aliases_share_memory_and_have_no_gradient": "as_host is of shards in host memory",
    "test_aliases_of_the_wrong_device_are_refused": "as_host is of shards in host memory",
    "test_cuda_aliases_need_gpus": "here are GPUs",
    "test_the_page_lists_every_function_and_exception": "reads docs, once is enough",
    "test_gpus_that_are_not_there_get_one_sentence": "here are GPUs",
    "test_the_kernels_own_error_comes_out": "CUDA kernels do not raise on a division by zero",
    "test_16_bit_sums_are_not_rounded_twice": "another order of addition than the CPU's",
    "test_inner_threads_are_off_on_the_shards_only": "shards are threads only on the host",
    "test_an_operator_for_the_cpu_runs_through_the_fallback": "the fallback goes to CUDA",
    "test_init_again_with_the_same_devices_is_harmless": "names cpu shards",
    "test_device_arguments": "names cpu shards",
}
NOT_APART = "the shards' memory is one GPU's: what goes from one to another needs it twice"
HOST_FILES = {"test_locality.py": "the locality check is the host flavour's"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what cannot hold on this mesh; say so where GPUs were promised and are missing."""
    on_gpus = ns_mgpu_splat.init() and torch.mgpu.mesh().shards[0].startswith("cuda")
    if os.environ.get("MGPU_REQUIRE_GPU") == "1" and not on_gpus:
        pytest.exit(f"MGPU_REQUIRE_GPU=1, but the mesh is {torch.mgpu.mesh().shards}", returncode=3)
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a mesh of GPUs"))
        if item.get_closest_marker("whole_gpu") and on_gpus and config.gpus_apart():
            item.add_marker(pytest.mark.skip(reason=f"MGPU_TEST_APART=1: {NOT_APART}"))
        reason = HOST_ONLY.get(getattr(item, "originalname", item.name)) or HOST_FILES.get(item.path.name)
        if reason and on_gpus:
            item.add_marker(pytest.mark.skip(reason=f"host flavour only: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The registered device."""
    there = ns_mgpu_splat.init()
    gc.collect()
    gc.freeze()  # torch and its database of operators: half a second of each of `no_byte_is_left`'s collections
    if "MGPU_SHARD_THRESHOLD" not in os.environ:
        native().set_shard_threshold(1 << 20)  # the host's, so that the same operands are split on GPUs
    return there


def clear_finished_frames() -> None:
    """Let go of what functions that are over had in their local variables. A tool may keep their frames:
    compute-sanitizer has those of every call that asked the driver for memory, to show where it was."""
    suspended = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    for frame in gc.get_objects():
        if isinstance(frame, FrameType) and not frame.f_code.co_flags & suspended:
            with contextlib.suppress(RuntimeError):  # still at work
                frame.clear()


@pytest.fixture
def no_byte_is_left(device: torch.device) -> Iterator[None]:
    """What a test allocates is free again after it."""
    gc.collect()
    before = torch.mgpu.memory_allocated()
    yield
    clear_finished_frames()
    gc.collect()
    torch.mgpu.synchronize()
    assert torch.mgpu.memory_allocated() == before


@pytest.fixture
def shards(device: torch.device) -> int:
    """How many shards the mesh has."""
    return len(torch.mgpu.mesh().shards)


@pytest.fixture
def split_everything(device: torch.device) -> Iterator[None]:
    """Operators split operands of any size, so that small samples take the sharded path."""
    before = native().shard_threshold()
    native().set_shard_threshold(1)
    yield
    native().set_shard_threshold(before)
