# SPDX-License-Identifier: Apache-2.0
"""How long steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ns_mgpu_splat.nerfstudio.device import synchronise


class StepClock:
    """Measures steps over laps, so that the host need not wait for the device after each; stands still while stopped."""

    def __init__(self, window: int = 20) -> None:
        """`window`: laps over which `lap` takes the mean."""
        self._laps: deque[tuple[int, float]] = deque(maxlen=max(1, window))  # steps and seconds of each
        self.start(0)

    def start(self, step: int) -> None:
        """Begin; `step` is the next one."""
        self._idle = 0.0
        self._laps.clear()
        self._began, self._first = time.perf_counter(), step
        self._all_began, self._all_first = self._began, step

    def total(self, step: int) -> tuple[int, float, float]:
        """Since `start`, up to this step, included: steps, seconds, and steps a second while not stopped."""
        now, steps = time.perf_counter(), step + 1 - self._all_first
        seconds = now - self._all_began
        return steps, seconds, steps / max(1e-9, seconds - self._idle)

    def lap(self, step: int) -> float:
        """Mean seconds of a step over the latest laps, the one that ends after this step included; the next lap begins.

        Every step counts the same: the first lap is one step, and the slowest.
        """
        now = time.perf_counter()
        self._laps.append((step + 1 - self._first, now - self._began))
        self._began, self._first = now, step + 1
        steps, seconds = (sum(each) for each in zip(*self._laps, strict=True))
        return max(seconds / max(1, steps), 1e-9)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done in here is no part of a step; steps that the device still works on are waited for before."""
        synchronise()
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._began += seconds
            self._idle += seconds
