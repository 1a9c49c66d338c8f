# SPDX-License-Identifier: Apache-2.0
"""Pages, placement, growth and accounting, to the byte. Oracle: arithmetic on sizes, and the tensors' contents."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ns_mgpu_splat.device import native

pytestmark = pytest.mark.usefixtures("no_byte_is_left")

PAGE = 2 << 20


def allocated() -> list[int]:
    """Bytes in use, by shard."""
    return [shard["allocated"] for shard in torch.mgpu.memory_stats()["shards"]]


def test_a_small_tensor_lies_on_the_lead_shard() -> None:
    before = allocated()
    x = torch.empty(100, device="mgpu")
    assert torch.mgpu.placement(x).tolist() == [0]
    assert torch.mgpu.placement(x).dtype == torch.int16
    assert [a - b for a, b in zip(allocated(), before, strict=True)] == [512] + [0] * (len(before) - 1)
    assert torch.mgpu.placement(x[:0]).tolist() == []


def test_a_large_tensor_is_dealt_in_equal_contiguous_chunks(shards: int) -> None:
    before = allocated()
    x = torch.empty(shards * 4 * PAGE, dtype=torch.uint8, device="mgpu")
    assert torch.mgpu.placement(x).tolist() == [page // 4 for page in range(4 * shards)]
    assert [a - b for a, b in zip(allocated(), before, strict=True)] == [4 * PAGE] * shards
    # a view has the places of the pages that it touches
    assert torch.mgpu.placement(x[PAGE - 1 : PAGE + 1]).tolist() == [0, 0]
    assert torch.mgpu.placement(x[-1:]).tolist() == [shards - 1]


def test_totals_follow_every_tensor() -> None:
    start = torch.mgpu.memory_allocated()
    torch.mgpu.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device="mgpu")
    assert torch.mgpu.memory_allocated() - start == 4 << 20
    y = x * 2  # a sharded operator's result
    z = torch.sort(x[:1000]).values  # a fallback's results: values and indices
    assert torch.mgpu.memory_allocated() - start == (8 << 20) + 4096
    assert torch.mgpu.max_memory_allocated() - start >= (8 << 20) + 4096
    assert torch.accelerator.memory_allocated() == torch.mgpu.memory_allocated()
    del x, y, z
    assert torch.mgpu.memory_allocated() == start
    torch.mgpu.empty_cache()
    assert torch.mgpu.memory_reserved() % PAGE == 0
    stats = torch.mgpu.memory_stats()
    assert all(shard["reserved"] == shard["pages"] * PAGE for shard in stats["shards"])
    assert stats["host"] == 0


def test_training_leaks_nothing() -> None:
    x = torch.randn(64, 8, device="mgpu")
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to("mgpu")
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    seen = []
    for _ in range(60):
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()
        seen.append(torch.mgpu.memory_allocated())
    assert seen[5] == seen[-1]


def test_growth_keeps_object_address_and_contents(shards: int) -> None:
    before = torch.mgpu.memory_allocated()
    x = torch.mgpu.reserve((1000, 3), 4_000_000, torch.float32)
    assert (x == 0).all()
    assert torch.mgpu.memory_allocated() - before == 12_000
    x.copy_(torch.arange(3000.0).reshape(1000, 3))
    address = x.data_ptr()
    for rows in (1000, 1001, 500_000, 3_000_000):
        same = torch.mgpu.grow(x, rows)
        assert same is x
        assert x.data_ptr() == address
        assert x.shape == (rows, 3)
        assert x.is_contiguous()
        assert x.untyped_storage().nbytes() == rows * 12
        assert torch.mgpu.memory_allocated() - before == rows * 12
        assert x[:1000].flatten().tolist() == list(range(3000))
        assert not x[1000:].any()
    pages = -(-36_000_000 // PAGE)
    assert torch.mgpu.placement(x).tolist() == [(2 * p + 1) * shards // (2 * pages) for p in range(pages)]


def test_shrinking_keeps_object_address_and_memory(shards: int) -> None:
    before = torch.mgpu.memory_allocated()
    x = torch.mgpu.reserve((2_000_000, 3), 4_000_000, torch.float32)
    x.fill_(7.0)
    address = x.data_ptr()
    for rows in (2_000_000, 1_234_567, 10, 0):
        assert torch.mgpu.shrink(x, rows) is x
        assert x.shape == (rows, 3)
        assert x.untyped_storage().nbytes() == rows * 12
        assert torch.mgpu.memory_allocated() - before == rows * 12
        assert bool((x == 7).all())
        pages = -(-rows * 12 // PAGE)
        expected = [(2 * p + 1) * shards // (2 * pages) for p in range(pages)]
        assert torch.mgpu.placement(x).tolist() == expected
    reserved = torch.mgpu.memory_reserved()
    torch.mgpu.grow(x, 1_500_000)
    assert x.data_ptr() == address
    assert torch.mgpu.memory_reserved() == reserved  # the pages were still there
    assert not x.any()
    with pytest.raises(RuntimeError, match="it can only shrink"):
        torch.mgpu.shrink(x, 1_500_001)
    view = x[2:]
    with pytest.raises(RuntimeError, match=r"1 other tensor.* share this memory"):
        torch.mgpu.shrink(x, 20)
    del view
    with pytest.raises(RuntimeError, match=r"was not made by torch.mgpu.reserve"):
        torch.mgpu.shrink(torch.zeros(10, 2, device="mgpu"), 5)


def test_a_parameter_grows_between_steps() -> None:
    parameter = nn.Parameter(torch.mgpu.reserve((10, 2), 100))
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match=r"still has a .grad of its old size"):
        torch.mgpu.grow(parameter, 20)
    parameter.grad = None
    torch.mgpu.grow(parameter, 20)
    (parameter * 2).sum().backward()
    assert parameter.grad.shape == (20, 2)
    assert parameter.requires_grad
    assert isinstance(parameter, nn.Parameter)


def test_a_stale_graph_is_noticed() -> None:
    parameter = nn.Parameter(torch.mgpu.reserve((10, 2), 100))
    loss = (parameter * parameter).sum()
    torch.mgpu.grow(parameter, 20)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_older_loss_that_still_lives_does_not_stand_in_the_way() -> None:
    """As in a training loop, whose `loss` lives until the next one: torch adds gradients up where that graph ends."""
    parameter = nn.Parameter(torch.mgpu.reserve((10, 2), 100))
    for rows in (20, 30, 5, 40):
        loss = (parameter * 2).sum()
        loss.backward()
        assert torch.equal(parameter.grad.cpu(), torch.full((parameter.shape[0], 2), 2.0))
        parameter.grad = None
        change = torch.mgpu.grow if rows > parameter.shape[0] else torch.mgpu.shrink
        change(parameter, rows)
    assert loss.grad_fn is not None, "it lives"


@pytest.mark.parametrize(("change", "rows"), [("grow", 20), ("shrink", 5)])
def test_a_stale_graph_that_saved_nothing_is_noticed(change: str, rows: int) -> None:
    parameter = nn.Parameter(torch.mgpu.reserve((10, 2), 100))
    loss = (parameter * 2).sum()
    getattr(torch.mgpu, change)(parameter, rows)
    with pytest.raises(RuntimeError, match=rf"gave one of its leaves {rows} rows instead of 10"):
        loss.backward()
    assert parameter.grad is None
    (parameter * 3).sum().backward()
    assert torch.equal(parameter.grad.cpu(), torch.full((rows, 2), 3.0))


@pytest.mark.parametrize(
    ("rows", "words"),
    [(101, "do not fit the reserved capacity of 100 rows"), (9, "it can only grow")],
)
def test_growth_beyond_its_limits_is_refused_and_changes_nothing(rows: int, words: str) -> None:
    x = torch.mgpu.reserve((10, 2), 100)
    with pytest.raises(RuntimeError, match=words):
        torch.mgpu.grow(x, rows)
    assert x.shape == (10, 2)


def test_growth_with_a_view_alive_is_refused() -> None:
    x = torch.mgpu.reserve((10, 2), 100)
    view = x[2:]
    with pytest.raises(RuntimeError, match=r"1 other tensor.* share this memory"):
        torch.mgpu.grow(x, 20)
    with pytest.raises(RuntimeError, match="a view of a part of it"):
        torch.mgpu.grow(view, 20)
    del view
    torch.mgpu.grow(x, 20)


def test_garbage_does_not_stand_in_the_way_of_growth() -> None:
    x = torch.mgpu.reserve((10, 2), 100)
    cycle: list[object] = [x[2:]]
    cycle.append(cycle)
    del cycle
    torch.mgpu.grow(x, 20)
    assert x.shape == (20, 2)


def test_growth_of_other_tensors_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"was not made by torch.mgpu.reserve"):
        torch.mgpu.grow(torch.zeros(10, 2, device="mgpu"), 20)
    with pytest.raises(ValueError, match="needs a tensor on device mgpu"):
        torch.mgpu.grow(torch.zeros(10, 2), 20)


def test_reserving_nothing_and_growing_from_it() -> None:
    x = torch.mgpu.reserve((0, 3), 50)
    assert x.sum().item() == 0
    torch.mgpu.grow(x, 50)
    assert x.shape == (50, 3)
    empty = torch.mgpu.reserve((0, 0, 3), 50)  # a column without elements, as SH of degree 0
    torch.mgpu.grow(empty, 50)
    assert empty.shape == (50, 0, 3)


@pytest.mark.parametrize(
    ("shape", "capacity", "words"),
    [((), 1, "at least one dimension"), ((5,), 4, "capacity_rows >= shape"), ((-1,), 4, "negative size")],
)
def test_bad_reservations_are_refused(shape: tuple[int, ...], capacity: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        torch.mgpu.reserve(shape, capacity)


@pytest.mark.parametrize("bad", [1.5, "12", None, math.nan])
def test_sizes_are_whole_numbers(bad: object) -> None:
    """12.7 rows were 12."""
    x = torch.mgpu.reserve((10, 3), 100)
    for change in (torch.mgpu.grow, torch.mgpu.shrink):
        with pytest.raises(
            TypeError, match=f"torch.mgpu.{change.__name__} got .* expected a whole number of rows"
        ):
            change(x, bad)
    with pytest.raises(TypeError, match="expected a whole size"):
        torch.mgpu.reserve((bad,), 100)
    with pytest.raises(TypeError, match="expected a whole capacity"):
        torch.mgpu.reserve((3,), bad)
    with pytest.raises(TypeError, match=r"torch.mgpu.place_rows got .* expected a list of \(begin, end\)"):
        torch.mgpu.place_rows(x, [(0, bad)])
    with pytest.raises(ValueError, match="no number of rows is that large"):
        torch.mgpu.grow(x, 2**70)
    assert x.shape == (10, 3)


def test_a_single_number_has_no_misplaced_rows() -> None:
    assert torch.mgpu.misplaced_bytes(torch.tensor(3.0, device="mgpu")) == 0


def test_pages_move_and_the_tensor_does_not(shards: int) -> None:
    before = allocated()
    x = torch.arange(4 * PAGE // 4, dtype=torch.int32, device="mgpu")
    address = x.data_ptr()
    wanted = [(shards - 1 - page) % shards for page in range(4)]
    assert torch.mgpu.place(x, wanted) is x
    assert torch.mgpu.placement(x).tolist() == wanted
    assert x.data_ptr() == address
    assert torch.equal(x.cpu(), torch.arange(4 * PAGE // 4, dtype=torch.int32))
    moved = [a - b for a, b in zip(allocated(), before, strict=True)]
    assert moved == [wanted.count(shard) * PAGE for shard in range(shards)]
    torch.mgpu.place(x, 0)
    assert torch.mgpu.placement(x).tolist() == [0, 0, 0, 0]


def test_pages_go_to_the_host_and_come_back_where_they_were(shards: int) -> None:
    x = torch.ones(3 * PAGE // 4, device="mgpu")
    home = torch.mgpu.placement(x).tolist()
    torch.mgpu.to_host(x, [1])
    assert torch.mgpu.placement(x).tolist() == [home[0], -1, home[2]]
    assert torch.mgpu.memory_stats()["host"] == PAGE
    assert x.sum().item() == 3 * PAGE // 4
    torch.mgpu.to_host(x)
    assert torch.mgpu.placement(x).tolist() == [-1, -1, -1]
    torch.mgpu.to_device(x, torch.tensor([1]))
    assert torch.mgpu.placement(x).tolist() == [-1, home[1], -1]
    torch.mgpu.to_device(x)
    assert torch.mgpu.placement(x).tolist() == home
    assert torch.mgpu.memory_stats()["host"] == 0


def test_placed_pages_stay_when_a_tensor_grows(shards: int) -> None:
    x = torch.mgpu.reserve((PAGE,), 8 * PAGE, torch.uint8)
    torch.mgpu.place(x, [shards - 1])
    torch.mgpu.grow(x, 8 * PAGE)
    places = torch.mgpu.placement(x).tolist()
    assert places[0] == shards - 1
    counts = [places.count(shard) for shard in range(shards)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("shards_wanted", "error", "words"),
    [([0], ValueError, "one for each page"), ([0, 99], ValueError, "this mesh has shards 0 to")],
)
def test_bad_placements_are_refused(shards_wanted: list[int], error: type[Exception], words: str) -> None:
    x = torch.empty(2 * PAGE, dtype=torch.uint8, device="mgpu")
    with pytest.raises(error, match=words):
        torch.mgpu.place(x, shards_wanted)
    with pytest.raises(RuntimeError, match="page 7 does not exist; the tensor has 2 pages"):
        torch.mgpu.to_host(x, [7])
    with pytest.raises(RuntimeError, match="shared with other small tensors"):
        torch.mgpu.place(torch.empty(3, device="mgpu"), [0])


@pytest.mark.parametrize("bad", [0.5, [0.5, 0], [0, None], torch.tensor([0.0, 1.0]), "0", [[0, 0]]])
def test_what_is_no_whole_number_places_nothing(bad: object) -> None:
    x = torch.empty(2 * PAGE, dtype=torch.uint8, device="mgpu")
    before = torch.mgpu.placement(x).tolist()
    for move in (torch.mgpu.place, torch.mgpu.to_host, torch.mgpu.to_device):
        with pytest.raises(TypeError, match=f"torch.mgpu.{move.__name__} got .* whole numbers"):
            move(x, bad)
    assert torch.mgpu.placement(x).tolist() == before
    torch.mgpu.place(x, torch.tensor(0))
    torch.mgpu.place(x, torch.tensor([0, 0], dtype=torch.int16))
    torch.mgpu.to_host(x, range(2))
    torch.mgpu.to_device(x, (1,))
    assert torch.mgpu.placement(x).tolist() == [-1, 0]


def test_the_peak_is_that_of_the_sum_and_not_the_sum_of_peaks() -> None:
    """Tensors and the temporaries of stages count together."""
    torch.mgpu.reset_peak_memory_stats()
    start = torch.mgpu.memory_allocated()
    x = torch.empty(8 * PAGE, dtype=torch.uint8, device="mgpu")
    del x
    lead = torch.mgpu.memory_stats()["shards"][0]
    block = native().Temporary(3 * PAGE + 1, 0)
    assert torch.mgpu.memory_allocated() - start == 3 * PAGE + 512
    assert torch.mgpu.memory_stats()["shards"][0]["allocated"] - lead["allocated"] == 3 * PAGE + 512
    del block
    assert torch.mgpu.max_memory_allocated() - start == 8 * PAGE
    assert torch.mgpu.memory_allocated() == start


def test_random_cycles_leave_no_byte_behind(shards: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    torch.mgpu.empty_cache()
    start = torch.mgpu.memory_stats()
    for _ in range(200):
        rows, capacity = pick(0, 200_000), 400_000
        x = torch.mgpu.reserve((rows, 5), capacity)
        x.fill_(1)
        more = pick(rows, capacity + 1)
        torch.mgpu.grow(x, more)
        pages = torch.mgpu.placement(x).numel()
        torch.mgpu.place(x, [pick(-1, shards) for _ in range(pages)])
        torch.mgpu.to_host(x, [page for page in range(pages) if pick(0, 2)])
        assert x.sum().item() == rows * 5
        assert x.numel() == more * 5
        del x
    torch.mgpu.empty_cache()
    assert torch.mgpu.memory_stats()["shards"] == [
        {**after, "peak": shard["peak"]}
        for after, shard in zip(start["shards"], torch.mgpu.memory_stats()["shards"], strict=True)
    ]


def test_impossible_sizes_raise_out_of_memory_and_the_process_goes_on() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"could not (reserve|map|get) .* MiB (of (host|managed) memory|on cuda)"
    ):
        torch.empty(1 << 46, dtype=torch.uint8, device="mgpu")
    assert torch.ones(3, device="mgpu").sum().item() == 3


def test_freed_memory_is_used_again() -> None:
    def use() -> int:
        return torch.empty(8 * PAGE, dtype=torch.uint8, device="mgpu").numel()

    use()
    reserved = torch.mgpu.memory_reserved()
    for _ in range(10):
        use()
    assert torch.mgpu.memory_reserved() == reserved
