# SPDX-License-Identifier: Apache-2.0
"""What memory the host has left."""

from __future__ import annotations

import os
from pathlib import Path

kCgroup = Path("/sys/fs/cgroup")
kUnlimited = 1 << 60  # what cgroups write where there is no limit


def available_memory() -> int:
    """Bytes that this process can still take without swapping: the machine's, or the container's if that is less."""
    return max(0, min(_machine(), _container()))


def _machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container() -> int:
    """What the limit of the control group leaves (version 2, then 1); file pages that can be dropped are free."""
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            most = int((kCgroup / limit).read_text())
            taken = int((kCgroup / used).read_text())
            stat = (kCgroup / used).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # absent, or "max"
            continue
        if most >= kUnlimited:
            continue
        droppable = next(
            (int(row.split()[1]) for row in stat.splitlines() if row.startswith(inactive + " ")), 0
        )
        return most - taken + droppable
    return kUnlimited
