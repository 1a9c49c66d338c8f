# SPDX-License-Identifier: Apache-2.0
"""Stages run on the stream that is current: after what it was given before, and before what it is given next.

Oracle: the same work on the thread's first stream. On GPUs the other stream is kept busy, so that whoever does not follow
it reads photographs and rows that are not there yet; on the host streams have no meaning, and the numbers are the same.
"""

from __future__ import annotations

import contextlib

import pytest
import splat_scenes as scenes
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats.densify import McmcStrategy

LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
VIEW = scenes.random_twin_camera(0, 70, 50)


def work(stream: torch.Stream | None) -> dict[str, Tensor]:
    """Late photographs and rows, three steps, a refinement, a render with its gradient: all that is left, on the CPU."""
    on_gpus = torch.mgpu.mesh().shards[0].startswith("cuda")  # type: ignore[attr-defined]
    columns = scenes.random_columns(800, 31)
    late = columns["sh0"].to("mgpu")
    photograph = torch.randint(0, 256, (50, 70, 3), generator=torch.Generator().manual_seed(2))
    photograph = photograph.to(torch.uint8).to("mgpu")
    columns["sh0"] = torch.zeros_like(columns["sh0"])
    columns["opacities"][::5] = -9.0  # dead: they are moved
    table = SplatTable.from_columns(**columns, capacity=900).requires_grad_(True)
    adam = SplatAdam(table, LRS, opacity_reg=0.01)
    target = torch.zeros_like(photograph)
    camera = scenes.camera_of(VIEW)
    torch.mgpu.synchronize()  # type: ignore[attr-defined]
    with stream or contextlib.nullcontext():
        if stream is not None and on_gpus:
            torch.cuda._sleep(100_000_000)  # about 0.05 s
        with torch.no_grad():
            table.sh0.copy_(late)
        target.copy_(photograph)
        losses = [train_step(table, adam, camera, target).loss for _ in range(3)]
        if stream is not None and on_gpus:
            torch.cuda._sleep(100_000_000)
        strategy = McmcStrategy(900, seed=1, refine_start=0, refine_stop=10, refine_every=1)
        refined = strategy.post_step(table, adam, 1)
        (image,) = render(table, camera, optimizer=adam)
        (image.rgb.square().sum() + image.accumulation.sum()).backward()
        adam.step()
        adam.flush()
    if stream is not None:
        torch.accelerator.current_stream().wait_stream(stream)
    found = {name: column.detach().cpu() for name, column in table.named_columns().items()}
    found["rgb"] = image.rgb.detach().cpu()
    return found | {"losses": torch.tensor(losses), "relocated": torch.tensor(refined["relocated"])}


@pytest.mark.usefixtures("deterministic")
def test_training_on_a_side_stream_is_training() -> None:
    ns_mgpu_splat.init()
    want = work(None)
    assert len(want["means"]) == 840
    assert int(want["relocated"]) >= 160
    assert want["losses"].unique().numel() == 3
    got = work(torch.Stream(device="mgpu"))
    for name, value in want.items():
        assert torch.equal(got[name], value), name
