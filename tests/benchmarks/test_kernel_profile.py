# SPDX-License-Identifier: Apache-2.0
"""What benchmarks make of torch's profile of kernels. Only a GPU gives a real one: here events made up after one of an H200."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kernel_profile import Profile

pytestmark = pytest.mark.any_mesh

PROJECT = (
    "void mgpu::splat::(anonymous namespace)::project_kernel<{}, false>(mgpu::splat::SplatColumns, View)"
)
EVENTS = [
    SimpleNamespace(key=key, device_time_total=microseconds, count=count)
    for key, microseconds, count in (
        ("cudaLaunchKernel", 0.0, 45),
        ("cudaStreamSynchronize", 0.0, 10),
        ("Memset (Device)", 50.0, 20),
        (PROJECT.format("3"), 1_500.0, 5),
        (PROJECT.format("0"), 500.0, 5),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
            2_500.0,
            10,
        ),
        ("cudaDeviceSynchronize", 0.0, 1),
    )
]


def test_times_and_launches_are_those_of_one_round() -> None:
    found = Profile.of(EVENTS, rounds=5)
    assert [(kernel.ms, kernel.launches) for kernel in found.kernels] == [
        (0.5, 2),
        (0.3, 1),
        (0.1, 1),
        (0.01, 4),
    ]
    assert found.kernels[1].name == PROJECT.format("3"), "the whole name"
    assert found.waits == {"cudaStreamSynchronize": 2, "cudaDeviceSynchronize": 0.2}


def test_kernels_that_differ_in_template_arguments_are_one_by_their_short_name() -> None:
    found = Profile.of(EVENTS, rounds=5).by_short_name()
    assert list(found) == ["at::native::vectorized_elementwise_kernel", "project_kernel", "Memset "]
    assert found["project_kernel"] == pytest.approx(0.4)
    assert sum(found.values()) == pytest.approx(sum(kernel.ms for kernel in Profile.of(EVENTS, 5).kernels))


def test_work_on_the_host_has_no_kernels() -> None:
    """Whatever events this version of torch makes, they have the fields that are read."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(3) + 1
    events = seen.key_averages()
    assert any(event.key == "aten::add" for event in events)
    assert Profile.of(events, rounds=1) == Profile([], {})
