# SPDX-License-Identifier: Apache-2.0
"""The aggregate device `mgpu`: building, loading and registering it. Its face is `torch.mgpu` (module.py)."""

from __future__ import annotations

import logging
import os
import threading
from types import ModuleType

import torch

from ns_mgpu_splat.device import build, config

__all__ = ["init", "is_initialized", "native"]

_log = logging.getLogger("ns_mgpu_splat")
_lock = threading.RLock()
_mesh: config.MeshConfig | None = None


def native() -> ModuleType:
    """The native module `_mgpu`; built and loaded (a minute, once per torch version), not registered, on first use."""
    return build.load("host")


def is_initialized() -> bool:
    """Whether `init()` has run in this process (or in the one it was forked from)."""
    return _mesh is not None


def init(devices: str | None = None) -> torch.device:
    """Build or load the native module and register device `mgpu` with torch; do nothing if that is done already.

    Call it when work on the device starts, never on import: once `mgpu` is registered, torch's autograd works on
    `mgpu` and CPU tensors and no longer on CUDA ones (docs/device.md).

    Args:
        devices: the mesh, as in MGPU_DEVICES: `cpu:4`, `0,1`, `0,0,0,0`. None: what MGPU_DEVICES says, else all GPUs,
            else `cpu:1`; and any mesh at all if the device is registered.
    Returns: `torch.device("mgpu")`; a process has one mesh, index 0.
    Raises: RuntimeError if another mesh or another PrivateUse1 backend is registered, or in a forked process;
        ValueError if `devices` cannot be read; ns_mgpu_splat.device.build.BuildError if the module cannot be built.
    """
    global _mesh
    with _lock:
        if _mesh is not None:
            _check_same_mesh(devices, _mesh)
            return torch.device("mgpu", 0)
        name = torch._C._get_privateuse1_backend_name()
        if name != "privateuseone":
            raise RuntimeError(
                f"Another backend, {name!r}, holds torch's PrivateUse1 place in this process, and there is only one; "
                "start a process without it to use mgpu."
            )
        wanted = devices if devices is not None else os.environ.get("MGPU_DEVICES")
        mesh = config.parse_devices(wanted, gpus=_visible_gpus(wanted))
        native_module = native()
        threshold = config.shard_threshold(native_module.shard_threshold())
        checked = config.locality_checked()

        native_module.set_mesh(list(mesh.shards))
        native_module.set_shard_threshold(threshold)
        native_module.set_locality_checked(checked)
        native_module.mark_stage_threads()
        # at least two, so that a mesh of several shards really forks; a mesh of one keeps torch's own threads
        native_module.set_num_threads(max(torch.get_num_threads(), min(2, len(mesh.shards))))

        from ns_mgpu_splat.device import module

        native_module.install_allocation_scope()
        torch.utils.rename_privateuse1_backend("mgpu")
        torch._register_device_module("mgpu", module)
        torch.utils.generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
        )
        _mesh = mesh
        if checked:
            _log.info("MGPU_CHECK_LOCALITY=1: shards run in turn, each with the others' pages protected")
        return torch.device("mgpu", 0)


def _visible_gpus(wanted: str | None) -> int:
    """How many GPUs the mesh may name. The host flavour has none: say so where somebody could expect them."""
    text = (wanted or "").strip()
    if text[:1].isdecimal():
        raise RuntimeError(
            f"MGPU_DEVICES is {text!r}, but this build of ns-mgpu-splat has the host flavour only; use cpu:COUNT, as cpu:1."
        )
    if not text and torch.cuda.is_available():
        _log.warning("This build of ns-mgpu-splat has the host flavour only; the GPUs are left alone (mesh cpu:1).")
    return 0


def _check_same_mesh(devices: str | None, mesh: config.MeshConfig) -> None:
    if devices is None:
        return
    if devices.strip() and config.parse_devices(devices, gpus=config.MAX_SHARDS) == mesh:
        return
    raise RuntimeError(
        f"mgpu is registered with the shards {', '.join(mesh.shards)} and cannot change to {devices!r} in this process; "
        "set MGPU_DEVICES, or call init() with other devices, in a new process."
    )
