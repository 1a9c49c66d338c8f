# SPDX-License-Identifier: Apache-2.0
"""Hide warnings that Nerfstudio 1.1.5 earns with a newer torch and that nobody who runs it can do anything about.

Most are raised while Nerfstudio is imported, before it looks for methods, so they are hidden when torch is imported:
torch calls the entry points of its group `torch.backends` then. Only the `ns-` commands are touched so; ours that run Nerfstudio
(exporter.py, evaluate.py) call `hide_future_warnings` themselves.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import PurePath

kFrom = (r"nerfstudio\.", r"torch\.jit\._script", r"torchmetrics\.")


def at_torch_import() -> None:
    """Called by torch; must not fail, and costs nothing elsewhere."""
    if PurePath(sys.argv[0] if sys.argv else "").name.startswith("ns-"):
        hide_future_warnings()


def hide_future_warnings() -> None:
    """Hide FutureWarnings of Nerfstudio and of what it calls; those of other code stay."""
    for module in kFrom:
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
