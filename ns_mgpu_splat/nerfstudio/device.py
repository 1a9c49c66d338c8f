# SPDX-License-Identifier: Apache-2.0
"""Register `mgpu` when the method starts, and say in one line what it is made of."""

from __future__ import annotations

import os

import torch
from nerfstudio.utils.rich_utils import CONSOLE

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
        raise SystemExit(f"mgpu-splat: {error}") from error
    if announce and not _announced:
        _announced = True
        shards = shard_names()
        if all(name.startswith("cpu") for name in shards):
            why = "MGPU_DEVICES asks for it" if os.environ.get("MGPU_DEVICES") else "no GPU was found"
            CONSOLE.print(
                f"mgpu-splat runs on the CPU ({len(shards)} shard{'s' * (len(shards) > 1)}): {why}."
            )
        else:
            CONSOLE.print(f"mgpu-splat runs on {len(shards)} shards: {', '.join(shards)}.")
    return device


def shard_names() -> tuple[str, ...]:
    """The members of the aggregate device, e.g. ("cpu:0", "cpu:1")."""
    return tuple(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def synchronise() -> None:
    """Wait until the device has done all that it was given."""
    torch.mgpu.synchronize()  # type: ignore[attr-defined]


def shard_memory() -> list[int]:
    """Bytes allocated on each shard now."""
    return [int(shard["allocated"]) for shard in torch.mgpu.memory_stats()["shards"]]  # type: ignore[attr-defined]
