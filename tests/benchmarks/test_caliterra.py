# SPDX-License-Identifier: Apache-2.0
"""caliterra.py reads what a run says of its held-out photographs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import caliterra

from ns_mgpu_splat.nerfstudio.pipeline import MgpuSplatPipeline

pytestmark = pytest.mark.any_mesh  # no mesh is started


def test_every_figure_of_the_last_words_says_what_it_is_and_is_read() -> None:
    """ "SSIM 0.4626, 23.82 dB with corrected colours" left open of what the decibels were."""
    held_out, trained = [SimpleNamespace(image_filenames=[Path(name)]) for name in "ab"]
    data = SimpleNamespace(
        eval_dataset=type("Held", (list,), {"image_filenames": held_out.image_filenames})([0, 1]),
        train_dataset=trained,
    )
    run: Any = SimpleNamespace(datamanager=data)
    line = MgpuSplatPipeline.metrics_line(run, {"psnr": 20.5, "ssim": 0.4626, "cc_psnr": 23.82})
    assert line == (
        "Mean over 2 held-out images: PSNR 20.50 dB, SSIM 0.4626, PSNR 23.82 dB with corrected colours."
    )
    found = re.search(caliterra.kScores, line)
    assert found is not None
    assert found.groups() == ("20.50", "0.4626", "23.82")
