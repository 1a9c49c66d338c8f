# SPDX-License-Identifier: Apache-2.0
"""The exchange asks its transport for what a transport over several processes can do: seen by one that writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import splat_scenes as scenes
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.device import native

LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
VIEWS = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (64, 48)])]


@pytest.fixture
def recorded() -> Iterator[None]:
    """A transport that writes down its calls, in place of the local one."""
    ns_mgpu_splat.init()
    native().transport_log()
    native().record_transport(True)
    yield
    native().record_transport(False)


def shards() -> int:
    return len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def rendered(columns: dict[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Frame, images, and gradients of the records after a walk back."""
    table = scenes.table_of(columns)
    cameras = [scenes.camera_of(view).arguments() for view in VIEWS]
    frame, images = native().splat_forward(table.columns(), None, None, cameras, None, False, 3, True)
    native().splat_backward(frame, [(torch.ones_like(rgb), None, None) for rgb, _, _ in images])
    return frame, [rgb.cpu() for rgb, _, _ in images], [frame.record_grads()]


@pytest.mark.usefixtures("recorded")
def test_one_contiguous_copy_for_each_pair_that_has_something_to_send() -> None:
    frame, _, _ = rendered(scenes.random_columns(4000, 1))
    log, links, count = native().transport_log(), frame.links(), shards()
    for stage, name in (("exchange", "records"), ("return", "gradients")):
        sent = [(start, end, size) for kind, start, end, size in log if kind == stage]
        assert len({(start, end) for start, end, _ in sent}) == len(sent) <= count * (count - 1)
        assert all(size > 0 and start != end for start, end, size in sent)
        matrix = [[0] * count for _ in range(count)]
        for start, end, size in sent:
            matrix[start][end] = size
        assert matrix == links[name]
    kinds = [kind for kind, *_ in log]
    assert ("exchange" in kinds) == ("return" in kinds) == (count > 1)


@pytest.mark.usefixtures("recorded")
def test_tables_are_gathered_before_anything_is_sent() -> None:
    """Each process must know all counts before it can say what it sends and what it waits for."""
    rendered(scenes.random_columns(4000, 2))
    kinds = [kind for kind, *_ in native().transport_log()]
    if shards() == 1:
        assert kinds == []
        return
    first_sent = kinds.index("exchange")
    assert kinds[:first_sent].count("gather") >= 2
    assert "gather" not in kinds[first_sent:]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("ssim_weight", [0.0, 0.2])
def test_only_the_halo_crosses_for_the_loss(ssim_weight: float) -> None:
    """One contiguous copy for each pair of shards with a border, as many bytes as are counted; for L1 alone none."""
    table = SplatTable.from_columns(**scenes.random_columns(2000, 3)).requires_grad_(True)
    cameras = [scenes.camera_of(view) for view in VIEWS]
    targets = [torch.zeros(c.height, c.width, 3, device="mgpu") for c in cameras]
    report = train_step(table, SplatAdam(table, LRS), cameras, targets, ssim_weight=ssim_weight)
    sent = [call[1:] for call in native().transport_log() if call[0] == "halo"]
    matrix = [[0] * shards() for _ in range(shards())]
    for start, end, size in sent:
        assert size > 0
        matrix[start][end] += size
    assert len({(start, end) for start, end, _ in sent}) == len(sent)
    assert matrix == report.links["pixels"]
    assert (len(sent) > 0) == (ssim_weight > 0 and shards() > 1)


def test_images_and_gradients_do_not_depend_on_what_reaches_what() -> None:
    """Shipped, or written and read where it lies: the same bits (the order of sums is the owners')."""
    ns_mgpu_splat.init()
    torch.use_deterministic_algorithms(True)
    columns, found = scenes.random_columns(3000, 4), []
    try:
        for shipped in (False, True):
            native().record_transport(shipped)
            _, images, grads = rendered(columns)
            found.append(images + grads)
    finally:
        native().record_transport(False)
        torch.use_deterministic_algorithms(False)
    assert found[0][-1].abs().max() > 0
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("recorded")
def test_a_view_that_sees_nothing_sends_nothing() -> None:
    table = scenes.table_of(scenes.random_columns(500, 5), requires_grad=False)
    away = VIEWS[0].viewmat.float().clone()
    away[2, 3] = -1e4
    render(table, scenes.camera_of(VIEWS[0], away))
    assert not [call for call in native().transport_log() if call[0] in ("exchange", "return")]
