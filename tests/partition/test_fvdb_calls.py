# SPDX-License-Identifier: Apache-2.0
"""What we ask of fvdb: by a stub with the signatures of 0.6.0, and by fvdb's own where it imports."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import fvdb_stub
import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat.partition import SparseGrid, grid, grid_in_use


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_import_fvdb", lambda: (fvdb_stub, ""))
    fvdb_stub.calls.clear()


def parameters(signature: str) -> list[tuple[str, object]]:
    """Names and defaults of a signature in words."""
    scope: dict[str, object] = {"torch": torch, "NumericMaxRank1": object, "DeviceIdentifier": object}
    exec(f"def function{signature}: ...", scope)
    found = inspect.signature(scope["function"]).parameters.values()  # type: ignore[arg-type]
    return [(parameter.name, parameter.default) for parameter in found]


@pytest.mark.parametrize("name", fvdb_stub.SIGNATURES)
def test_the_stub_has_the_signatures_that_were_read(name: str) -> None:
    actual = inspect.signature(getattr(fvdb_stub.Grid, name)).parameters.values()
    assert [(p.name, p.default) for p in actual] == parameters(fvdb_stub.SIGNATURES[name])


def test_the_installed_fvdb_has_them_too() -> None:
    module = grid.fvdb_module()
    if module is None:
        pytest.skip(f"fvdb {grid.why_no_fvdb()}: its signatures are checked where it is")
    for name in fvdb_stub.PROPERTIES:
        assert isinstance(inspect.getattr_static(module.Grid, name), property), name
    for name, signature in fvdb_stub.SIGNATURES.items():
        actual = inspect.signature(getattr(module.Grid, name)).parameters.values()
        wanted = parameters(signature)
        assert [(p.name, p.default) for p in actual][: len(wanted)] == wanted, name


def test_points_go_to_fvdb_without_a_copy(stub: None) -> None:
    points = torch.rand(1_000, 3, device="mgpu").requires_grad_()
    made = SparseGrid.from_points(points, 0.25, (1.0, 2.0, 3.0))
    assert made.provider == "fvdb"
    assert isinstance(made.grid, fvdb_stub.Grid)  # type: ignore[attr-defined]
    ((name, arguments),) = fvdb_stub.calls
    assert name == "from_points"
    assert arguments["points"].data_ptr() == points.data_ptr()
    assert arguments["voxel_size"] == [0.25] * 3
    assert arguments["origin"] == [1.0, 2.0, 3.0]
    for tensor in (
        made.ijk,
        made.hilbert,
        made.bbox,
        made.ijk_to_index(made.ijk),
        made.world_to_voxel(points),
    ):
        assert tensor.device.type == "mgpu"


def test_the_order_by_fvdbs_curve_is_the_built_in_one(stub: None) -> None:
    points = torch.randn(2_000, 3, generator=torch.Generator().manual_seed(0)).to("mgpu")
    ours, theirs = (SparseGrid.from_points(points, 0.5, provider=p) for p in ("built-in", "fvdb"))
    assert not torch.equal(ours.ijk.cpu(), theirs.ijk.cpu())
    assert torch.equal(
        ours.ijk.cpu()[ours.hilbert.cpu().argsort()], theirs.ijk.cpu()[theirs.hilbert.cpu().argsort()]
    )


def test_a_fvdb_that_does_not_import_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built for another torch, say: the built-in grid is used, and the reason can be read."""
    for text, reason in (
        (
            "raise ImportError('undefined symbol: _ZN2at4_ops')",
            "does not import (undefined symbol: _ZN2at4_ops)",
        ),
        ("import module_that_is_not_there", "does not import (No module named 'module_that_is_not_there')"),
        ("GridBatch = 1", "is older than 0.5"),
    ):
        folder = tmp_path / str(len(text)) / "fvdb"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder.parent))
            patch.delitem(sys.modules, "fvdb", raising=False)
            importlib.invalidate_caches()
            grid._import_fvdb.cache_clear()
            assert grid_in_use() == f"built-in (fvdb {reason})"
            assert SparseGrid.from_points(torch.zeros(1, 3)).provider == "built-in"
        sys.modules.pop("fvdb", None)
        grid._import_fvdb.cache_clear()


def test_the_stubs_name_is_in_the_sentence(stub: None) -> None:
    assert grid_in_use() == "fvdb 0.6.0"
