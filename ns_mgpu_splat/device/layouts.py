# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not strided ones of plain numbers, which are all that the device has, are refused in a sentence.

The native module refuses sparse ones in its own operators. But torch copies and makes the compressed layouts (CSR, CSC, BSR, BSC)
as three strided tensors without asking the device, and the result could not even be printed. So both are refused here, and so is
every operator on a sparse tensor that has come into being in another way (`empty_like` of one on the CPU). Nested tensors of the
strided layout and quantised ones have no operator on the device at all, of which torch says so in pages: here, in a sentence.
Nested tensors of `torch.jagged` are strided tensors to the device, and work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

kSparse = ("SparsePrivateUse1", "SparseCsrPrivateUse1")
kSparseMakers = ("_to_copy", "sparse_compressed_tensor.comp_plain_value_size")
"""Operators for which torch has one kernel for all devices, so that the fallback is not asked."""
kOthers = {
    "NestedTensorPrivateUse1": "a nested one. Make it with layout=torch.jagged",
    "QuantizedPrivateUse1": "a quantised one. Use dequantize()",
}
"""Keys of what has no operator on the device, and what is said of it."""

_libraries: list[torch.library.Library] = []  # what is registered lives as long as these


def refuse_layouts() -> None:
    """Register the refusals with torch."""
    makers, fallbacks = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for key in kSparse:
        for name in kSparseMakers:
            makers.impl(name, _refuse_sparse, key)
        fallbacks.fallback(_without_operator(_refuse_sparse), key)
    for key, what in kOthers.items():
        fallbacks.fallback(_without_operator(_refusal(what)), key)
    _libraries.extend((makers, fallbacks))


def _without_operator(refuse: Callable[..., Any]) -> Callable[..., Any]:
    def fallback(operator: Any, *arguments: Any, **options: Any) -> Any:
        return refuse(*arguments, **options)

    return fallback


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(
            f"Device mgpu has strided tensors of plain numbers only, and got {what}, or leave the tensor on the CPU."
        )

    return refuse


def _refuse_sparse(*arguments: Any, **options: Any) -> Any:
    given = [each.layout for each in (*arguments, *options.values()) if isinstance(each, Tensor)]
    layouts = [each for each in (options.get("layout"), *given) if each not in (None, torch.strided)]
    name = str(layouts[0] if layouts else "sparse").removeprefix("torch.")
    # as the native module says it (cuda/backend/alias.cpp)
    raise RuntimeError(
        f"Device mgpu has strided tensors only, and got layout {name.title().replace('_', '')}. Use to_dense(), or move the "
        "tensor to the CPU."
    )
