# SPDX-License-Identifier: Apache-2.0
"""What the environment says about the device: MGPU_DEVICES, MGPU_MEMORY, MGPU_SHARD_THRESHOLD, MGPU_CHECK_LOCALITY,
MGPU_LAUNCH_THREADS, and two variables for tests, MGPU_TEST_APART and MGPU_TEST_LATE_GPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

MAX_SHARDS = 64


@dataclass(frozen=True)
class MeshConfig:
    """The mesh that was asked for.

    Attributes:
        flavour: `host` (shards in host memory) or `cuda`.
        shards: their names, in order; the first is the lead shard.
    """

    flavour: str
    shards: tuple[str, ...]


def parse_devices(text: str | None, *, gpus: int) -> MeshConfig:
    """Read a mesh from `cpu:4` (four shards in host memory) or `0,1,1` (a shard on each of these GPUs).

    Args:
        text: None or blank stands for all GPUs, and for `cpu:1` where there is none.
        gpus: how many CUDA devices this process sees.
    Raises: in one sentence, ValueError if `text` is neither form, RuntimeError if it names a GPU that is not there.
    """
    if text is None or not text.strip():
        text = ",".join(str(gpu) for gpu in range(gpus)) if gpus else "cpu:1"
    text = text.strip()
    host = re.fullmatch(r"cpu(?::(\d+))?", text)
    if host:
        count = int(host.group(1) or 1)
        if not 1 <= count <= MAX_SHARDS:
            raise ValueError(f"MGPU_DEVICES is {text!r}, but a mesh has 1 to {MAX_SHARDS} shards.")
        return MeshConfig("host", tuple(f"cpu:{index}" for index in range(count)))
    if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        indices = [int(word) for word in text.split(",")]
        if len(indices) > MAX_SHARDS:
            raise ValueError(f"MGPU_DEVICES is {text!r}, but a mesh has 1 to {MAX_SHARDS} shards.")
        missing = next((index for index in indices if index >= gpus), None)
        if missing is not None:
            there = f"{gpus} CUDA device{'s' if gpus != 1 else ''}" if gpus else "no CUDA device"
            raise RuntimeError(
                f"MGPU_DEVICES is {text!r}, but torch sees {there} here, so there is no GPU {missing}; "
                "use cpu:1 for a machine without GPUs."
            )
        return MeshConfig("cuda", tuple(f"cuda:{index}" for index in indices))
    raise ValueError(
        f"MGPU_DEVICES is {text!r}, expected cpu:COUNT (shards in host memory, as cpu:4) or GPU numbers (as 0,1)."
    )


def shard_threshold() -> int | None:
    """Bytes from which a tensor and its operators are split over the shards (MGPU_SHARD_THRESHOLD); None: what suits them.

    Raises: ValueError if the variable is not a positive whole number.
    """
    text = os.environ.get("MGPU_SHARD_THRESHOLD", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"MGPU_SHARD_THRESHOLD is {text!r}, expected a number of bytes, 1 or more.")
    return int(text)


def memory_kind() -> str:
    """How GPUs shall hold memory (MGPU_MEMORY): `vmm`, `managed`, or blank for what suits them; the host ignores it.

    Raises: ValueError if the variable says something else.
    """
    text = os.environ.get("MGPU_MEMORY", "").strip()
    if text not in ("", "vmm", "managed"):
        raise ValueError(f"MGPU_MEMORY is {text!r}, expected vmm or managed.")
    return text


def locality_checked() -> bool:
    """Whether local stages are held to their own pages (MGPU_CHECK_LOCALITY=1)."""
    return _is_on("MGPU_CHECK_LOCALITY")


def gpus_apart() -> bool:
    """Whether each shard counts as a GPU of its own (MGPU_TEST_APART=1): for tests; the host ignores it."""
    return _is_on("MGPU_TEST_APART")


def late_gpu() -> tuple[int, int] | None:
    """Which GPU is to be late with all that it is given, by its number, and by how many microseconds
    (MGPU_TEST_LATE_GPU=1:300): for tests; the host ignores it, and so does a mesh without that GPU.

    Raises: ValueError if the variable says something else.
    """
    text = os.environ.get("MGPU_TEST_LATE_GPU", "").strip()
    if not text:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if not found:
        raise ValueError(f"MGPU_TEST_LATE_GPU is {text!r}, expected GPU:MICROSECONDS, as 1:300.")
    return int(found.group(1)), int(found.group(2))


def check_launch_threads() -> None:
    """Refuse a MGPU_LAUNCH_THREADS that the native module would not know: cuda/mesh/lanes.h reads it.

    Raises: ValueError.
    """
    text = os.environ.get("MGPU_LAUNCH_THREADS", "")
    if text not in ("", "0", "shards"):
        raise ValueError(f"MGPU_LAUNCH_THREADS is {text!r}, expected 0, shards, or nothing.")


def _is_on(variable: str) -> bool:
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable} is {text!r}, expected 0 or 1.")
    return text == "1"
