# SPDX-License-Identifier: Apache-2.0
"""What all rooms' tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# A shell that starts a command in the background has it ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def late_gpu() -> Iterator[None]:
    """MGPU_TEST_LATE_GPU=1:300 makes GPU 1 of the mesh 300 microseconds late with every operator and stage: whoever does not
    wait for its results reads what is not there yet. For one run by hand of any room's tests on several GPUs."""
    asked = os.environ.get("MGPU_TEST_LATE_GPU")
    if not asked:
        yield
        return
    import ns_mgpu_splat
    from ns_mgpu_splat.device import native

    ns_mgpu_splat.init()
    gpu, microseconds = asked.split(":")
    native().set_late_gpu(int(gpu), int(microseconds))
    yield
    native().set_late_gpu(-1, 0)
