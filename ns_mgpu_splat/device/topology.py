# SPDX-License-Identifier: Apache-2.0
"""How two shards are linked. cuda-python (cuda.bindings with NVML) tells NVLink from PCIe, where it is installed."""

from __future__ import annotations

import functools
from typing import Any

import torch


def link(a: str, b: str) -> str:
    """The way from shard `a` to shard `b`'s memory, by their names: see `Mesh.links`."""
    if not (a.startswith("cuda") and b.startswith("cuda")) or a == b:
        return "same"
    first, second = torch.device(a).index, torch.device(b).index
    if not torch.cuda.can_device_access_peer(first, second):
        return "none"
    return _kind(first, second)


def _kind(first: int, second: int) -> str:
    nvml = _nvml()
    if nvml is None:
        return "peer"
    try:
        handles = [nvml.device_get_handle_by_uuid(_uuid(gpu)) for gpu in (first, second)]
        status = nvml.device_get_p2p_status(*handles, nvml.GpuP2PCapsIndex.P2P_CAPS_INDEX_NVLINK)
    except Exception:  # NVML has a hundred ways to be absent or old; the link works all the same
        return "peer"
    return "nvlink" if int(status) == int(nvml.GpuP2PStatus.P2P_STATUS_OK) else "pci"


def _uuid(gpu: int) -> str:
    """NVML counts GPUs without CUDA_VISIBLE_DEVICES: go by their identity."""
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"


@functools.cache
def _nvml() -> Any:
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
    except Exception:  # not installed, or no NVML on this machine
        return None
    return nvml
