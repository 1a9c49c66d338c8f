# SPDX-License-Identifier: Apache-2.0
"""What tests of the splat operators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ns_mgpu_splat

HOST_FILES = {"test_stage_locality.py": "the locality check is the host flavour's"}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in list order: on GPUs the order of atomics would make two equal sums, and so two equal steps, differ."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what starts processes on the host's mesh while the tests run on GPUs."""
    on_gpus = ns_mgpu_splat.init() and torch.mgpu.mesh().shards[0].startswith("cuda")  # type: ignore[attr-defined]
    for item in items:
        reason = HOST_FILES.get(item.path.name)
        if reason and on_gpus:
            item.add_marker(pytest.mark.skip(reason=f"host flavour only: {reason}"))
