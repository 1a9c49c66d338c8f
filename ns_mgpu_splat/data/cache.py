# SPDX-License-Identifier: Apache-2.0
"""Decoded images in a bounded number of bytes, read ahead by threads. They belong to one process."""

from __future__ import annotations

import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

import numpy as np

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by index, read by a few threads ahead of use; beyond a byte limit some are dropped.

    Dropped is the least recently used, or, where the order of use is known ahead, the one that is wanted last: with a
    new permutation each epoch and room for half of the values, half of them are then found, where the least recently
    used would find a seventh.

    Args:
        load: makes the value of an index; called from worker threads.
        size: bytes of a value.
        limit: bytes to keep; at least one value is always kept. Values on their way and not asked for yet come on top.
        workers: threads.
        next_use: indices (n,) int64 to when each is wanted next, in any unit; None: not known.
    """

    def __init__(
        self,
        load: Callable[[int], Value],
        size: Callable[[Value], int],
        limit: int,
        workers: int = 2,
        next_use: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._load, self._size, self.limit, self._next_use = load, size, limit, next_use
        self._ready: OrderedDict[int, Value] = OrderedDict()
        self._coming: dict[int, Future[Value]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="read-images")
        self.bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a BoundedCache belongs to one process")

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these, unless they are there or on their way."""
        with self._lock:
            for index in indices:
                if index not in self._ready and index not in self._coming:
                    self._begin(index)

    def _begin(self, index: int) -> Future[Value]:
        # an interrupt while the pool starts a thread leaves it unknown to the pool: the process would not end
        with _interrupts_after():
            self._coming[index] = self._pool.submit(self._load, index)
        return self._coming[index]

    def ready(self, index: int) -> Value | None:
        """Return a value if it is there or has just come, without waiting. An error of `load` waits for `get`."""
        with self._lock:
            if index in self._ready:
                return self._ready[index]
            future = self._coming.get(index)
        came = future is not None and future.done() and future.exception() is None
        return self.get(index) if came else None

    def get(self, index: int) -> Value:
        """Return a value, waiting for it if need be. Errors of `load` are raised here."""
        with self._lock:
            if index in self._ready:
                self._ready.move_to_end(index)
                return self._ready[index]
            future = self._coming.get(index)
            if future is None:
                future = self._begin(index)
        try:
            value = future.result()
        finally:
            with self._lock:
                self._coming.pop(index, None)
        with self._lock:
            if index not in self._ready:
                self._ready[index] = value
                self.bytes += self._size(value)
            self._ready.move_to_end(index)
            while self.bytes > self.limit and len(self._ready) > 1:
                self.bytes -= self._size(self._ready.pop(self._dispensable()))
        return value

    def _dispensable(self) -> int:
        if self._next_use is None:
            return next(iter(self._ready))
        indices = np.fromiter(self._ready, dtype=np.int64, count=len(self._ready))
        return int(indices[int(np.argmax(self._next_use(indices)))])

    def close(self) -> None:
        """Stop the threads; values stay readable."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _interrupts_after() -> Iterator[None]:
    """An interrupt that comes in here is answered at the end."""
    answer = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(answer):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if came:
            answer(*came[0])
