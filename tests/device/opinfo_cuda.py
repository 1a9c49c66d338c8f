# SPDX-License-Identifier: Apache-2.0
"""torch's operator database: `python opinfo_cuda.py cuda FILE` stores what plain CUDA gives, `... mgpu FILE` compares.

Two processes, because autograd on CUDA tensors is dead where `mgpu` is registered. Forward and first-order gradient,
float32. Exits with 1 if fewer than 97 % of the operators that pass on CUDA are equal on `mgpu`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 5
WANTED = 0.97
UNINITIALISED = ("empty",)
# kernels that add with atomics give other last digits on every run; unordered ones another order
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def name_of(op: Any) -> str:
    """Name and variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def to(value: Any, device: str) -> Any:
    """The same inputs as leaves on another device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(device).requires_grad_(leaf.requires_grad)
        return device if leaf in ("cpu", torch.device("cpu")) else leaf

    return pytree.tree_map(move, value)


def dense(value: Any) -> list[torch.Tensor]:
    """All strided tensors of a result."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]


def run(op: Any, sample: Any, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results and gradients, on the CPU."""
    there = to((sample.input, sample.args, dict(sample.kwargs)), device)
    torch.manual_seed(0)
    outputs = dense(op(there[0], *there[1], **there[2]))
    gradients: list[torch.Tensor | None] = []
    roots = [t for t in outputs if t.requires_grad and t.dtype.is_floating_point]
    if op.supports_autograd and roots:
        leaves = [t for t in dense(there) if t.requires_grad]
        torch.manual_seed(1)
        gradients = list(torch.autograd.grad(sum(t.sum() for t in roots), leaves, allow_unused=True))
    return [t.detach().cpu() for t in outputs], [
        t.cpu() if t is not None and t.layout == torch.strided else None for t in gradients
    ]


def samples(op: Any) -> Iterator[Any]:
    """The first inputs, the same in both processes."""
    torch.manual_seed(7)
    for count, sample in enumerate(
        op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    ):
        if count >= SAMPLES:
            return
        yield sample


def results(op: Any, device: str) -> list[Any]:
    """One entry a sample: what it gave, or the error in words."""
    out: list[Any] = []
    try:
        for sample in samples(op):
            try:
                out.append(run(op, sample, device))
            except Exception as error:
                out.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")
    except Exception as error:  # the samples need something that is not there
        print(f"no samples of {name_of(op)}: {error}"[:200])
    return out


def difference(name: str, want: Any, got: Any) -> str | None:
    """Why two results differ, in a line; None if they do not."""
    if isinstance(got, str):
        return got
    if any(word in name for word in UNINITIALISED):
        return None
    for kind, wanted, given in (("output", want[0], got[0]), ("gradient", want[1], got[1])):
        if len(wanted) != len(given):
            return f"{len(given)} {kind}s instead of {len(wanted)}"
        for a, b in zip(wanted, given, strict=True):
            if (a is None) != (b is None):
                return f"a {kind} is missing"
            if a is None or b is None:
                continue
            try:
                torch.testing.assert_close(b, a, equal_nan=True, **TOLERANCE)
            except AssertionError as error:
                return f"{kind}: " + " ".join(str(error).split())[:160]
    return None


def main() -> int:
    """See the module's docstring."""
    if sys.flags.hash_randomization:  # some of the database's samples come in the order of a set of words
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    mode, path = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["NVIDIA_TF32_OVERRIDE"] = (
        "0"  # cuDNN's convolutions too: its flags are frozen by torch's test code
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    reference: dict[str, list[Any]] = torch.load(path, weights_only=False) if mode == "mgpu" else {}
    if mode == "mgpu":
        import ns_mgpu_splat

        ns_mgpu_splat.init()
    stored: dict[str, list[Any]] = {}
    passed, failed = 0, {}
    for op in op_db:
        if torch.float32 not in op.dtypes:
            continue
        name = name_of(op)
        if mode == "cuda":
            stored[name] = results(op, "cuda")
            continue
        want = reference.get(name, [])
        if not any(not isinstance(entry, str) for entry in want):
            continue  # nothing runs on CUDA
        got = results(op, "mgpu")
        why = [difference(name, a, b) for a, b in zip(want, got, strict=True) if not isinstance(a, str)]
        reasons = [reason for reason in why if reason]
        if reasons:
            failed[name] = reasons[0]
            print(f"FAIL {name}: {reasons[0]}", flush=True)
        else:
            passed += 1
    if mode == "cuda":
        torch.save(stored, path)
        print(f"{len(stored)} operators stored")
        return 0
    share = passed / max(1, passed + len(failed))
    print(
        f"{passed} of {passed + len(failed)} operators equal plain CUDA ({share:.2%}), torch {torch.__version__}"
    )
    return 0 if share >= WANTED and passed > 500 else 1


if __name__ == "__main__":
    sys.exit(main())
