# SPDX-License-Identifier: Apache-2.0
"""The aggregate device `mgpu`: building, loading and registering it. Its face is `torch.mgpu` (module.py)."""

from __future__ import annotations

import atexit
import contextvars
import logging
import os
import threading
import time
import weakref
from types import ModuleType

import torch

from ns_mgpu_splat.device import build, config

__all__ = ["init", "is_initialized", "native"]

_log = logging.getLogger("ns_mgpu_splat")
_lock = threading.RLock()
_mesh: config.MeshConfig | None = None
_flavour: str | None = None  # of the native module that this process has loaded


def native() -> ModuleType:
    """The native module `_mgpu`; built and loaded (a minute, once per torch version), not registered, on first use.

    Its flavour is that of the mesh: `host` for `cpu:COUNT`, else `cuda`. Before `init()`: of the mesh that it would take.
    """
    global _flavour
    if _flavour is None:
        with _lock:
            if _flavour is None:
                _flavour = _wanted_mesh(None).flavour
    return build.load(_flavour)


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
    Raises: RuntimeError if a GPU of the mesh is not there or too old, if another mesh or another PrivateUse1 backend is
        registered, or in a forked process; ValueError if `devices` cannot be read; TypeError if it is no text;
        ns_mgpu_splat.device.build.BuildError if the module cannot be built.
    """
    global _mesh, _flavour
    if devices is not None and not isinstance(devices, str):
        raise TypeError(f"devices is {devices!r}, expected text such as 'cpu:4' or '0,1'.")
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
        try:
            mesh = _wanted_mesh(devices)
        except (
            RuntimeError,
            ValueError,
        ) as error:  # the sentence says it all; how it was read is nobody's business
            raise error.with_traceback(None) from None
        if mesh.flavour == "cuda":
            _check_gpus(mesh)
        if _flavour not in (None, mesh.flavour):
            raise RuntimeError(
                f"The native module's flavour {_flavour!r} is loaded, and the mesh {', '.join(mesh.shards)} needs "
                f"{mesh.flavour!r}; call init() before anything else of ns_mgpu_splat, or set MGPU_DEVICES."
            )
        _flavour = mesh.flavour
        memory = config.memory_kind()
        if mesh.flavour == "cuda":
            torch.cuda.init()
        native_module = native()
        wanted_threshold = config.shard_threshold()
        checked = config.locality_checked()
        config.check_launch_threads()
        on_gpus = mesh.flavour == "cuda"
        apart, late = config.gpus_apart() and on_gpus, config.late_gpu()

        native_module.set_mesh(list(mesh.shards), apart)
        chosen = native_module.start(memory)
        if chosen:
            _log.info("mgpu (%s): %s", ", ".join(mesh.shards), chosen)
        if wanted_threshold:
            native_module.set_shard_threshold(wanted_threshold)
        native_module.set_locality_checked(checked)
        if late is not None and on_gpus:
            native_module.set_late_gpu(*late)
        native_module.mark_stage_threads()
        # at least two, so that a mesh of several shards really forks; a mesh of one keeps torch's own threads
        native_module.set_num_threads(max(torch.get_num_threads(), min(2, len(mesh.shards))))

        from ns_mgpu_splat.device import files, layouts, module

        native_module.install_allocation_scope()
        torch.utils.rename_privateuse1_backend("mgpu")
        torch._register_device_module("mgpu", module)
        torch.utils.generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
        )
        files.register()
        layouts.refuse_layouts()
        atexit.register(_wait_for_autograd, os.getpid())
        _mesh = mesh
        if apart:
            _log.info("MGPU_TEST_APART=1: each shard counts as a GPU of its own, for tests")
        if checked:
            _log.info("MGPU_CHECK_LOCALITY=1: shards run in turn, each with the others' pages protected")
        device = torch.device("mgpu", 0)
        torch.empty(
            0, device=device
        )  # before torch's own lazy initialisation its synchronize() does not wait
        return device


def _wanted_mesh(devices: str | None) -> config.MeshConfig:
    """The mesh that `devices`, or else MGPU_DEVICES, names. Asks CUDA only if GPUs may be in it."""
    wanted = devices if devices is not None else os.environ.get("MGPU_DEVICES")
    on_host = (wanted or "").strip().startswith("cpu")
    return config.parse_devices(wanted, gpus=0 if on_host else torch.cuda.device_count())


def _check_gpus(mesh: config.MeshConfig) -> None:
    """Raise RuntimeError, in one sentence, if the kernels cannot run on a GPU of the mesh."""
    for name in dict.fromkeys(mesh.shards):
        major, minor = torch.cuda.get_device_capability(name)
        if (major, minor) < build.LEAST_CAPABILITY:
            least = ".".join(map(str, build.LEAST_CAPABILITY))
            raise RuntimeError(
                f"{name} ({torch.cuda.get_device_name(name)}) has compute capability {major}.{minor}, and mgpu needs {least} "
                "(Ampere) or newer; name other GPUs in MGPU_DEVICES, or use cpu:1."
            )


def _wait_for_autograd(owner: int, timeout_s: float = 2.0) -> None:
    """At exit: let autograd's device thread put down the Python objects of the last backward().

    It does so after backward() has returned. If the interpreter has ended by then, the thread is cancelled where it asks
    for the GIL, in a destructor, and the process aborts ("terminate called without an active exception"; torch 2.14).
    The thread works in order: once it has dropped a backward of ours, it has dropped all earlier ones.

    Args:
        owner: the process that registered the device; a forked child has no such thread.
    """
    if os.getpid() != owner:
        return
    try:
        result = torch.zeros((), device="mgpu", requires_grad=True) * 1
        context = contextvars.copy_context()
        dropped = weakref.ref(context)
        torch._C._stash_obj_in_tls("context", context)  # what torch/autograd/graph.py does before a backward
        del context
        seed = (torch.ones_like(result),)
        torch.autograd.Variable._execution_engine.run_backward(
            (result,), seed, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        # this thread's own, as torch does after a backward: with it, the wait was the whole timeout in every process
        remove = getattr(torch._C, "_remove_obj_from_tls", None)  # of torch 2.14
        if remove is not None:
            remove("context")
        else:
            torch._C._stash_obj_in_tls("context", None)
    except Exception:  # a process that ends in trouble ends as it would have
        _log.debug("no orderly end of autograd's thread", exc_info=True)
        return
    end = time.monotonic() + timeout_s
    while dropped() is not None and time.monotonic() < end:
        time.sleep(0.001)


def _check_same_mesh(devices: str | None, mesh: config.MeshConfig) -> None:
    if devices is None or not devices.strip():  # blank asks for nothing in particular
        return
    if config.parse_devices(devices, gpus=config.MAX_SHARDS) == mesh:
        return
    raise RuntimeError(
        f"mgpu is registered with the shards {', '.join(mesh.shards)} and cannot change to {devices!r} in this process; "
        "set MGPU_DEVICES, or call init() with other devices, in a new process."
    )
