# SPDX-License-Identifier: Apache-2.0
"""Saving and loading across devices, by torch.save, pickle and storages."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

ROWS = torch.randn(700, 3, generator=torch.Generator().manual_seed(0))


def saved(value: object) -> io.BytesIO:
    """`value` through torch.save, ready to be read."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("source", "target"), [("mgpu", None), ("mgpu", "cpu"), ("cpu", "mgpu"), ("cpu", "mgpu:0")]
)
def test_tensors_travel_between_devices(source: str, target: str | None, weights_only: bool) -> None:
    loaded = torch.load(saved({"x": ROWS.to(source)}), map_location=target, weights_only=weights_only)["x"]
    assert loaded.device.type == (target or source).split(":")[0]
    assert torch.equal(loaded.cpu(), ROWS)


def test_a_file_is_read_without_its_tensors_twice_in_memory(tmp_path: Path) -> None:
    torch.save({"x": ROWS.to("mgpu")}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True, mmap=True)["x"]
    assert torch.equal(loaded, ROWS)


def test_views_keep_sharing_their_storage() -> None:
    base = ROWS.to("mgpu")
    loaded = torch.load(saved([base, base[5:]]), weights_only=True)
    loaded[0].zero_()
    assert loaded[1].abs().sum().item() == 0


def test_module_and_optimizer_states() -> None:
    module = nn.Linear(3, 2).to("mgpu")
    optimizer = torch.optim.Adam(module.parameters())
    module(ROWS.to("mgpu")).sum().backward()
    optimizer.step()
    state = torch.load(
        saved({"module": module.state_dict(), "optimizer": optimizer.state_dict()}), weights_only=True
    )
    other = nn.Linear(3, 2)
    other.load_state_dict(state["module"])
    assert torch.equal(other.weight, module.weight.cpu())
    again = torch.optim.Adam(module.parameters())
    again.load_state_dict(state["optimizer"])
    assert again.state_dict()["state"][0]["exp_avg"].device.type == "mgpu"
    assert torch.equal(
        again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_pickle() -> None:
    loaded = pickle.loads(pickle.dumps(ROWS.to("mgpu")))
    assert loaded.device.type == "mgpu"
    assert torch.equal(loaded.cpu(), ROWS)


def test_storages() -> None:
    storage = ROWS.to("mgpu").untyped_storage()
    assert storage.device.type == "mgpu"
    assert storage.is_mgpu
    assert storage.nbytes() == ROWS.nbytes
    assert torch.equal(torch.empty(0, device="mgpu").set_(storage, 0, (2100,)).cpu(), ROWS.flatten())
    assert bytes(storage.cpu()) == bytes(ROWS.untyped_storage())
    copy = storage.clone()
    assert copy.data_ptr() != storage.data_ptr()
    copy.resize_(storage.nbytes() + 400)
    assert copy.nbytes() == ROWS.nbytes + 400


def test_a_reserved_tensor_saves_its_rows_and_not_its_reservation() -> None:
    x = torch.mgpu.reserve((1000, 4), 100_000_000)
    file = saved(x)
    assert len(file.getvalue()) < 16_000 + 2_000
