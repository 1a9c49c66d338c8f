# SPDX-License-Identifier: Apache-2.0
"""`torch.mgpu`: the module that torch asks about device `mgpu`, and this project's own functions on it.

Registered by `ns_mgpu_splat.init()`. Part one is what `torch.cuda` has too, part two what only this device has.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ns_mgpu_splat.device import native, topology
from ns_mgpu_splat.device.files import load as load
from ns_mgpu_splat.device.files import save as save

_C = native()

# ---- part one: what torch wants of a device module -------------------------------------------------------------------

Stream = torch.Stream
Event = torch.Event
default_generators: tuple[torch.Generator, ...] = (_C.default_generator(),)


def is_available() -> bool:
    """True: this module exists only where the device does."""
    return True


def is_initialized() -> bool:
    """True: registration is initialisation."""
    return True


def init() -> None:
    """Nothing is left to do."""


def _lazy_init() -> None:
    if _is_in_bad_fork():
        raise RuntimeError(
            "mgpu cannot be used in a forked process. Start workers with multiprocessing's 'spawn' method, or let them "
            "return CPU tensors and move those to mgpu in the parent."
        )


def _is_in_bad_fork() -> bool:
    return bool(_C.in_forked_child())


def device_count() -> int:
    """1: all shards together are one device."""
    return 1


def current_device() -> int:
    """0, the only index."""
    return 0


def _index(device: Any) -> int:
    """The index that a device argument names. Raises ValueError if it is not this device."""
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != "mgpu":
            raise ValueError(f"Expected a mgpu device, and got {named}.")
        index = named.index or 0
    if index not in (0, -1):
        raise ValueError(
            f"There is one mgpu device, mgpu:0, and no mgpu:{index}; its shards are in torch.mgpu.mesh()."
        )
    return 0


def set_device(device: Any) -> None:
    """Accept the only device there is. Raises ValueError for any other."""
    _index(device)


class device:
    """Context manager that makes `mgpu` current; it always is."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def get_device_name(device: Any = None) -> str:
    """`mgpu (cpu:0, cpu:1)`."""
    _index(device)
    return f"mgpu ({', '.join(mesh().shards)})"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The lowest compute capability among the GPUs; (0, 0) in the host flavour, which has none."""
    _index(device)
    return min((torch.cuda.get_device_capability(gpu) for gpu in _gpus()), default=(0, 0))


@dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` returns; memory in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name, memory (bytes) and number of shards."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1], len(mesh().shards))


def synchronize(device: Any = None) -> None:
    """Wait for all work on all GPUs; the host flavour's is done when a call returns."""
    _index(device)
    torch._C._accelerator_synchronizeDevice(0)


def current_stream(device: Any = None) -> torch.Stream:
    """The calling thread's stream."""
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` the calling thread's."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A context manager in which `stream` is current."""
    return stream


def manual_seed(seed: int) -> None:
    """Seed the device's default generator."""
    default_generators[0].manual_seed(int(seed) & 0xFFFF_FFFF_FFFF_FFFF)


def manual_seed_all(seed: int) -> None:
    """The same as `manual_seed`: there is one generator, whose numbers do not depend on the mesh."""
    manual_seed(seed)


def seed() -> int:
    """Seed from the system's entropy; returns the seed."""
    return default_generators[0].seed()


def seed_all() -> int:
    """The same as `seed`."""
    return seed()


def initial_seed() -> int:
    """The seed that was set last."""
    return default_generators[0].initial_seed()


def get_rng_state(device: Any = "mgpu") -> Tensor:
    """State of the default generator: a uint8 CPU tensor."""
    _index(device)
    return default_generators[0].get_state()


def set_rng_state(new_state: Tensor, device: Any = "mgpu") -> None:
    """Put back what `get_rng_state` returned."""
    _index(device)
    default_generators[0].set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    """A list of one state."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Put back what `get_rng_state_all` returned."""
    for state in new_states:
        set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast("mgpu") may lower to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """True."""
    return True


def is_autocast_enabled() -> bool:
    """Whether autocast for this device is on in this thread."""
    return torch.is_autocast_enabled("mgpu")


def memory_allocated(device: Any = None) -> int:
    """Bytes in use by tensors and stages, over all shards and host pages."""
    _index(device)
    return int(_C.memory_totals()["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    """The largest `memory_allocated()` since the start or `reset_peak_memory_stats()`, in bytes."""
    _index(device)
    return int(_C.memory_totals()["peak"])


def memory_reserved(device: Any = None) -> int:
    """Bytes of mapped pages, in use or kept for reuse."""
    _index(device)
    return int(_C.memory_totals()["reserved"])


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let peaks start from what is in use now."""
    _index(device)
    _C.reset_peak()


def empty_cache() -> None:
    """Give mapped pages that nothing uses back to the system."""
    _C.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of the memory behind the shards: the GPUs', added up, or the host's."""
    _index(device)
    if _gpus():
        free, total = zip(*(torch.cuda.mem_get_info(gpu) for gpu in _gpus()), strict=True)
        return sum(free), sum(total)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


# ---- part two: the mesh, pages and growth ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """The shards behind the device; the first is the lead shard.

    Attributes:
        shards: their names, `cuda:0` or `cpu:0`; a GPU may be named more than once.
        peer_matrix: `peer_matrix[a][b]`: shard `a` can read shard `b`'s memory directly.
        links: `links[a][b]`: `same` (one memory), `nvlink`, `pci`, `none` (no direct access), or `peer` (direct, of a kind
            that nobody tells: cuda-bindings and NVML are optional).
    """

    shards: tuple[str, ...]
    peer_matrix: tuple[tuple[bool, ...], ...] = ()
    links: tuple[tuple[str, ...], ...] = ()


@functools.cache
def mesh() -> Mesh:
    """The mesh of this process."""
    shards = tuple(_C.mesh_shards())
    links = tuple(tuple(topology.link(a, b) for b in shards) for a in shards)
    return Mesh(shards, tuple(tuple(kind != "none" for kind in row) for row in links), links)


@functools.cache
def _gpus() -> tuple[int, ...]:
    """Ordinals of the GPUs in the mesh, each once; none in the host flavour."""
    return tuple(dict.fromkeys(torch.device(name).index for name in mesh().shards if name.startswith("cuda")))


def memory_stats() -> dict[str, Any]:
    """Memory by shard: `{"shards": [{"allocated", "reserved", "peak", "pages"}, ...], "host": bytes}`.

    `allocated` counts the bytes of tensors and stages, `reserved` those of mapped pages (also those kept for reuse),
    `peak` the largest `allocated`, `pages` mapped pages of 2 MiB; `host` the bytes of pages parked in host memory.
    """
    return _C.memory_stats()


def op_stats(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """How often each operator ran where, since the start or the last reset: `{"aten::add.Tensor": {...}, ...}`.

    Counts: `sharded`: on every shard. `lead`: on the lead shard alone, though the operator can be split (the operands
    were below MGPU_SHARD_THRESHOLD, or of a layout that cannot be cut). `fallback`: on the lead shard, because there is
    no sharded kernel. `large`: those of the last two kinds with an operand of at least the threshold. Views touch no
    memory and are not counted.
    """
    counts = _C.op_stats()
    if reset:
        _C.reset_op_stats()
    return counts


def reset_op_stats() -> None:
    """Set all counts of `op_stats()` to zero."""
    _C.reset_op_stats()


def link_stats(*, reset: bool = False) -> dict[str, Any]:
    """What renders and training steps sent between shards, since the start or the last reset; asks no GPU.

    `frames`: renders. `records`, `gradients`, `pixels`: bytes, `[from][to]`: visible Gaussians to the shards that blend
    them, their gradients back, and of `train_step` the colours (and their gradients) that one shard blends and the loss
    of another reads. `records_sent`: pairs of a visible Gaussian and a shard, not its own, that blends it.
    `remote_rows`: visible Gaussians that another shard than their own blends. `visible_rows`: all visible Gaussians.
    `cells`, `cells_kept`: runs of rows that are culled as one, and those that some camera may see; `candidates`: pairs of
    a row and a camera that were projected. `load`: by shard, what its tiles cost, in pairs of a tile and a Gaussian (and
    4 a tile). `imbalance`: largest load / mean load, mean over the frames; `imbalance_max`: the largest of a frame. All
    but these two are sums over frames. `pages_moved`: pages of 2 MiB that have changed their shard, or gone to or come
    from host memory.
    """
    counts = _C.link_stats() | {"pages_moved": _C.pages_moved()}
    if reset:
        reset_link_stats()
    return counts


def reset_link_stats() -> None:
    """Set all counts of `link_stats()` to zero."""
    _C.reset_link_stats()
    _C.reset_pages_moved()


def reserve(shape: Sequence[int], capacity_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A zeroed tensor that can grow in place: addresses for `capacity_rows` rows, memory for `shape[0]`.

    Args:
        shape: N rows and the shape of a row.
        capacity_rows: rows it may ever have, at least N. Costs address space, no memory.
        dtype: of the elements.
    Raises: ValueError if the capacity is less than N; torch.OutOfMemoryError.
    """
    sizes = [_whole_number("reserve", "size", size) for size in shape]
    return _C.reserve(sizes, _whole_number("reserve", "capacity", capacity_rows), dtype)


def grow(tensor: Tensor, rows: int) -> Tensor:
    """Let a tensor of `reserve` have `rows` rows in total: same object, same address; new rows are zero.

    Grow between steps. Raises: RuntimeError, and nothing has changed, if the tensor was not reserved, shares its memory
    with a view or has a `.grad`, if `rows` is less than it has or more than its capacity; torch.OutOfMemoryError.
    """
    _resize(_C.grow, tensor, _whole_number("grow", "number of rows", rows))
    return tensor


def _resize(function: Callable[[Tensor, int], None], tensor: Tensor, rows: int) -> None:
    try:
        function(tensor, rows)
    except RuntimeError as error:
        if "share this memory" not in str(error):
            raise
        gc.collect()  # what holds it may be garbage that refers to itself
        function(tensor, rows)


def shrink(tensor: Tensor, rows: int) -> Tensor:
    """Let a tensor of `reserve` have its first `rows` rows only: same object, same address, no copy.

    Its memory is kept for growing again. Raises: RuntimeError as `grow` does, or if `rows` is more than it has.
    """
    _resize(_C.shrink, tensor, _whole_number("shrink", "number of rows", rows))
    return tensor


def placement(tensor: Tensor) -> Tensor:
    """Where a tensor lies: an int16 CPU tensor, one shard for each 2 MiB page it touches, -1 for host memory."""
    return _C.placement(tensor)


def place(tensor: Tensor, shards: int | Sequence[int] | Tensor) -> Tensor:
    """Move a tensor's pages; its address and contents stay.

    Args:
        tensor: on `mgpu`, of at least 1 MiB or made by `reserve` (smaller ones share their page with others).
        shards: one shard for each page, as `placement` returns; or one for all. -1 is host memory.
    Returns: the tensor. Raises: ValueError for a wrong count or shard; TypeError for one that is no whole number;
        RuntimeError if it shares its page.
    """
    wanted = _whole_numbers("place", "shard", shards)
    if isinstance(wanted, int):
        wanted = [wanted] * placement(tensor).numel()
    _C.place(tensor, wanted)
    return tensor


def place_rows(tensor: Tensor, homes: Sequence[tuple[int, int]]) -> int:
    """Say which rows of a tensor are at home on which shard, and move its pages so; address and contents stay.

    A page goes to the home of the row in its middle: at most half a page beside each boundary lies on the neighbour's
    shard (`misplaced_bytes`). Stages read the homes of a splat table from its means; where rows were added or taken away
    since, the ranges are stretched. Without a call of this, rows are in equal chunks.

    Args:
        tensor: on `mgpu`, of at least 1 MiB or made by `reserve`.
        homes: (begin, end) for each shard, ascending, without gaps; some may be empty.
    Returns: how many pages have moved. Pages in host memory stay there.
    Raises: ValueError for ranges that do not fit; RuntimeError if the tensor shares its page.
    """
    try:
        ranges = [(operator.index(begin), operator.index(end)) for begin, end in homes]
    except (TypeError, ValueError):
        raise TypeError(
            f"torch.mgpu.place_rows got {homes!r}, expected a list of (begin, end) for each shard, as whole numbers."
        ) from None
    return int(_C.place_rows(tensor, ranges))


def row_homes(tensor: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of each shard's rows, as `place_rows` has dealt them; else equal chunks."""
    return _C.row_homes(tensor)


def misplaced_bytes(tensor: Tensor) -> int:
    """Bytes of rows that lie on another shard than their home, because pages hold rows of two shards or were not moved."""
    if tensor.numel() == 0 or tensor.dim() == 0:  # no rows
        return 0
    nbytes, page = tensor.numel() * tensor.element_size(), 2 << 20
    homes = torch.tensor([*row_homes(tensor), (0, 0)]) * (tensor.element_size() * tensor.stride(0))
    begin, end = homes[placement(tensor).long()].unbind(
        1
    )  # of the page's shard; -1, the host, is nobody's home
    first = torch.arange(len(begin)) * page
    last = (first + page).clamp_(max=nbytes)
    at_home = (torch.minimum(end, last) - torch.maximum(begin, first)).clamp_(min=0)
    return nbytes - int(at_home.sum())


def _whole_numbers(function: str, what: str, values: Any) -> int | list[int]:
    """A number or a list of numbers. Raises TypeError for anything that is only close to one, such as 0.5 or 1.0."""
    plain = values.tolist() if hasattr(values, "tolist") else values  # tensors, arrays
    try:
        return (
            [operator.index(value) for value in plain]
            if isinstance(plain, Sequence)
            else operator.index(plain)
        )
    except TypeError:
        raise TypeError(
            f"torch.mgpu.{function} got {values!r}, expected one {what} or a list of them, as whole numbers."
        ) from None


def _whole_number(function: str, what: str, value: Any) -> int:
    """One number. Raises TypeError for anything that is only close to one, ValueError for one beyond 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"torch.mgpu.{function} got {value!r}, expected a whole {what}.") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"torch.mgpu.{function} got {number}: no {what} is that large.")
    return number


def _pages(function: str, pages: int | Sequence[int] | Tensor | None) -> list[int] | None:
    if pages is None:
        return None
    chosen = _whole_numbers(function, "page", pages)
    return [chosen] if isinstance(chosen, int) else chosen


def to_host(tensor: Tensor, pages: int | Sequence[int] | Tensor | None = None) -> Tensor:
    """Park pages of a tensor in host memory (`placement` then says -1); None: all of them. Returns the tensor."""
    _C.to_host(tensor, _pages("to_host", pages))
    return tensor


def to_device(tensor: Tensor, pages: int | Sequence[int] | Tensor | None = None) -> Tensor:
    """Bring pages back to the shards that `to_host` took them from; None: all of them. Returns the tensor."""
    _C.to_device(tensor, _pages("to_device", pages))
    return tensor


def as_cuda(tensor: Tensor) -> Tensor:
    """The same memory as a CUDA tensor on the lead shard's GPU, without gradient; no copy.

    Through it go DLPack and `__cuda_array_interface__`: cupy, numba, Warp, cuda-python. Work on it belongs on torch's
    current CUDA stream, where this device's work is too.

    Args: tensor: on `mgpu`. Raises: ValueError if it is elsewhere; RuntimeError in the host flavour.
    """
    if not _gpus():
        raise RuntimeError(
            f"torch.mgpu.as_cuda needs shards on GPUs, and this mesh is {', '.join(mesh().shards)}; "
            "torch.mgpu.as_host(tensor) gives a CPU tensor over the same memory."
        )
    if tensor.device.type != "mgpu":
        raise ValueError(f"torch.mgpu.as_cuda needs a tensor on mgpu, and got one on {tensor.device}.")
    return _C.as_backing(tensor)


def from_cuda(tensor: Tensor) -> Tensor:
    """A CUDA tensor's memory as a `mgpu` tensor, without gradient; no copy. It stays where it is.

    Args: tensor: strided, on a GPU of the mesh. Raises: ValueError if it is not; RuntimeError in the host flavour.
    """
    if not _gpus():
        raise RuntimeError(
            f"torch.mgpu.from_cuda needs shards on GPUs, and this mesh is {', '.join(mesh().shards)}; "
            "tensor.to('mgpu') copies."
        )
    if tensor.device.type != "cuda" or tensor.layout != torch.strided or tensor.device.index not in _gpus():
        raise ValueError(
            f"torch.mgpu.from_cuda needs a strided tensor on a GPU of the mesh, and got {tensor.layout} on "
            f"{tensor.device}; tensor.to('mgpu') copies."
        )
    return _C.from_backing(tensor)


def as_host(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, without gradient: for readers such as tests and the viewer; no copy.

    Args: tensor: on `mgpu`. Raises: ValueError if it is elsewhere.
    """
    if _gpus():
        raise RuntimeError(
            "torch.mgpu.as_host needs shards in host memory; tensor.cpu() copies, torch.mgpu.as_cuda(tensor) does not."
        )
    if tensor.device.type != "mgpu":
        raise ValueError(f"torch.mgpu.as_host needs a tensor on mgpu, and got one on {tensor.device}.")
    return _C.as_backing(tensor)


def from_host(tensor: Tensor) -> Tensor:
    """A CPU tensor's memory as a `mgpu` tensor, without gradient; no copy. Its pages count as nobody's.

    Args: tensor: on the CPU, strided. Raises: ValueError if it is elsewhere.
    """
    if _gpus():
        raise RuntimeError("torch.mgpu.from_host needs shards in host memory; tensor.to('mgpu') copies.")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"torch.mgpu.from_host needs a strided CPU tensor, and got {tensor.layout} on {tensor.device}."
        )
    return _C.from_backing(tensor)
