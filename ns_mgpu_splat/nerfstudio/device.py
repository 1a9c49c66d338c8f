# SPDX-License-Identifier: Apache-2.0
"""Register `mgpu` when the method starts, and say in one line what it is made of."""

from __future__ import annotations

import os
from typing import Any

import torch

from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.nerfstudio.tools import speaker
from ns_mgpu_splat.words import counted

_announced = False


def start_device(announce: bool = True) -> torch.device:
    """Register `mgpu` (idempotent) and return it.

    Exits with one sentence where it cannot be had: no compiler, an unknown MGPU_DEVICES.
    """
    global _announced
    import ns_mgpu_splat

    try:
        device = ns_mgpu_splat.init()
    except (RuntimeError, ValueError, OSError) as error:
        raise SystemExit(f"{speaker()}: {error}") from error
    if announce and not _announced:
        _announced = True
        shards = shard_names()
        if all(name.startswith("cpu") for name in shards):
            why = "MGPU_DEVICES asks for it" if os.environ.get("MGPU_DEVICES") else "no GPU was found"
            say(f"mgpu-splat runs on the CPU ({counted(len(shards), 'shard')}): {why}.")
        else:
            say(f"mgpu-splat runs on {counted(len(shards), 'shard')}: {', '.join(shards)}.")
    return device


def shard_names() -> tuple[str, ...]:
    """The members of the aggregate device, e.g. ("cpu:0", "cpu:1")."""
    return tuple(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def run_layout(wanted: Any, reorder_decay: float) -> Any:
    """How a run lays rows out on this mesh ("space" or "stripes"), by its options; rows that are never sorted have no stripes."""
    from ns_mgpu_splat.partition.stripes import chosen_layout

    return chosen_layout(wanted if reorder_decay > 0 else "space", len(shard_names()))


def synchronise() -> None:
    """Wait until the device has done all that it was given."""
    torch.mgpu.synchronize()  # type: ignore[attr-defined]


def shard_memory() -> list[int]:
    """Bytes allocated on each shard now."""
    return [int(shard["allocated"]) for shard in torch.mgpu.memory_stats()["shards"]]  # type: ignore[attr-defined]
