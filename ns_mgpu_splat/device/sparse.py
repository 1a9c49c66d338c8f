# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors are refused: the device has strided ones only.

The native module refuses them in its own operators. But torch copies and makes the compressed layouts (CSR, CSC, BSR, BSC) as
three strided tensors without asking the device, and the result could not even be printed. So both are refused here, and so is
every operator on a sparse tensor that has come into being in another way (`empty_like` of one on the CPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

kKeys = ("SparsePrivateUse1", "SparseCsrPrivateUse1")
kMakers = ("_to_copy", "sparse_compressed_tensor.comp_plain_value_size")
"""Operators for which torch has one kernel for all devices, so that the fallback is not asked."""

_libraries: list[torch.library.Library] = []  # what is registered lives as long as these


def refuse_sparse() -> None:
    """Register the refusals with torch."""
    makers, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for key in kKeys:
        for name in kMakers:
            makers.impl(name, _refuse, key)
        others.fallback(_refuse_operator, key)
    _libraries.extend((makers, others))


def _refuse_operator(operator: Any, *arguments: Any, **options: Any) -> Any:
    _refuse(*arguments, **options)


def _refuse(*arguments: Any, **options: Any) -> Any:
    given = [each.layout for each in (*arguments, *options.values()) if isinstance(each, Tensor)]
    layouts = [each for each in (options.get("layout"), *given) if each not in (None, torch.strided)]
    name = str(layouts[0] if layouts else "sparse").removeprefix("torch.")
    # as the native module says it (cuda/backend/alias.cpp)
    raise RuntimeError(
        f"Device mgpu has strided tensors only, and got layout {name.title().replace('_', '')}. Use to_dense(), or move the "
        "tensor to the CPU."
    )
