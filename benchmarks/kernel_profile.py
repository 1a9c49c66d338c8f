# SPDX-License-Identifier: Apache-2.0
"""Times of kernels, by torch's profiler, for the benchmarks: what the GPUs did in some rounds of work, a kernel a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelTime:
    """A kernel, or a copy or fill: its whole name, milliseconds and launches in one round, in sum over all GPUs."""

    name: str
    ms: float
    launches: float

    @property
    def short_name(self) -> str:
        """Without namespaces of ours, template arguments and parameters."""
        name = self.name.replace("(anonymous namespace)::", "").replace("mgpu::splat::", "")
        return name.removeprefix("void ").split("(")[0].split("<")[0]


@dataclass(frozen=True)
class Profile:
    """Kernels, those that took longest first; and calls of one round that wait for a GPU."""

    kernels: list[KernelTime]
    waits: dict[str, float]

    @classmethod
    def of(cls, events: Iterable[Any], rounds: int) -> Profile:
        """Of what the profiler's `key_averages()` are after so many rounds."""
        events = list(events)
        kernels = [
            KernelTime(event.key, event.device_time_total / 1e3 / rounds, event.count / rounds)
            for event in events
            if event.device_time_total > 0  # calls of the host have none
        ]
        waits = {event.key: event.count / rounds for event in events if "Synchronize" in event.key}
        return cls(sorted(kernels, key=lambda kernel: -kernel.ms), waits)

    def by_short_name(self) -> dict[str, float]:
        """Milliseconds, longest first; kernels that differ in template arguments alone are one."""
        found: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            found[kernel.short_name] += kernel.ms
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def profiled(work: Callable[[], object], rounds: int) -> Profile:
    """Profile `work`, which does so many rounds and then waits for the GPUs; that wait is in it, too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
    return Profile.of(seen.key_averages(), rounds)
