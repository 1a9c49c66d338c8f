# SPDX-License-Identifier: Apache-2.0
"""The Hilbert curve by what makes it one: each cell once, neighbours in a row, coarse cells as wholes."""

from __future__ import annotations

import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.curves import CURVE_BITS, hilbert_codes, morton_codes

MOST = 2**CURVE_BITS - 1


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def random_cells(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MOST + 1, (count, 3), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("first", [0, 8**7 - 3, 8**20 // 3, 4 * 8**20 - 50_000, 8**21 - 100_000])
def test_consecutive_cells_share_a_face(first: int) -> None:
    codes = first + torch.arange(100_000)
    cells = native().hilbert_cells(codes)
    assert bool(((cells[1:] - cells[:-1]).abs().sum(1) == 1).all())
    assert torch.equal(native().hilbert_codes(cells), codes)


def test_the_first_codes_fill_a_cube() -> None:
    cells = native().hilbert_cells(torch.arange(8**5))
    assert int(cells.min()) == 0
    assert int(cells.max()) == 31
    assert len(cells.unique(dim=0)) == 8**5


def test_codes_and_cells_go_both_ways() -> None:
    cells = random_cells(50_000)
    cells[:2] = torch.tensor([[0, 0, 0], [MOST, MOST, MOST]])
    codes = native().hilbert_codes(cells)
    assert int(codes.min()) >= 0
    assert torch.equal(native().hilbert_cells(codes), cells)


@pytest.mark.parametrize("bits", [1, 5, 13, 20])
def test_a_coarse_cell_is_visited_as_a_whole(bits: int) -> None:
    """Two cells of one coarse cell have codes that differ in the last bits alone."""
    cells = random_cells(20_000)
    others = (cells >> bits << bits) + torch.randint(0, 2**bits, cells.shape)
    assert torch.equal(native().hilbert_codes(cells) >> 3 * bits, native().hilbert_codes(others) >> 3 * bits)


def test_small_codes_by_hand() -> None:
    """The first eight cells of the curve that fvdb.Grid.hilbert documents: Gray code of (x, y, z), turned at each level."""
    first = [tuple(cell) for cell in native().hilbert_cells(torch.arange(8)).tolist()]
    assert first[0] == (0, 0, 0)
    assert sorted(first) == [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    unit = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [3, 0, 0]])
    assert native().morton_codes(unit).tolist() == [1, 2, 4, 9]


@pytest.mark.parametrize("place", ["cpu", "mgpu"])
def test_torch_operators_give_the_same_codes(place: str) -> None:
    cells = random_cells(30_000, seed=3)
    assert torch.equal(hilbert_codes(cells.to(place)).cpu(), native().hilbert_codes(cells))
    assert torch.equal(morton_codes(cells.to(place)).cpu(), native().morton_codes(cells))


def test_cells_outside_are_refused() -> None:
    for wrong in (-1, MOST + 1):
        with pytest.raises(ValueError, match=rf"cells has {wrong} in row 1, expected 0 to 2\^21 - 1"):
            native().hilbert_codes(torch.tensor([[0, 0, 0], [0, wrong, 0]]))
    with pytest.raises(ValueError, match=r"expected contiguous int64 \[N, 3\] on cpu"):
        native().hilbert_codes(torch.zeros(3, 3))
