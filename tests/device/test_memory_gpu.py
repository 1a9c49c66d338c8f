# SPDX-License-Identifier: Apache-2.0
"""Memory on GPUs: pages that move, growth, giving back, running out, tensors past 2^31. Oracles: the tensors' contents, and
what the driver was asked for (`held_memory`: bytes on the shards, bytes on the host), which other processes do not disturb.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from ns_mgpu_splat.device import native

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_byte_is_left")]

PAGE = 2 << 20
GIB = 1 << 30
MANAGED = os.environ.get("MGPU_MEMORY") == "managed"


def held() -> tuple[int, int]:
    """Bytes that the driver gave, on the shards and on the host, once caches are given back."""
    torch.mgpu.empty_cache()
    on_shards, on_host = native().held_memory()
    return on_shards, on_host


def needs(gib: float) -> None:
    """Skip the test on a card that has less memory free."""
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, and {free:.1f} are free")


# ---- moving


def pattern(rows: int, columns: int = 5) -> torch.Tensor:
    """Values that tell every page from every other."""
    return torch.arange(rows * columns, dtype=torch.int32, device="mgpu").view(rows, columns)


@pytest.mark.sanitize
def test_moving_one_page_of_a_large_handle_keeps_all_contents(shards: int) -> None:
    pages = 80  # more than two handles of 64 MiB
    x = pattern(pages * PAGE // 20 + 3)
    want = x.cpu()
    address = x.data_ptr()
    for page in (0, 31, 32, 40, 79):
        torch.mgpu.to_host(x, [page])
        assert torch.mgpu.placement(x)[page] == -1
        assert torch.equal(x.cpu(), want)
    torch.mgpu.to_device(x, [31, 32])
    torch.mgpu.place(x, [(7 * page) % shards for page in range(torch.mgpu.placement(x).numel())])
    assert torch.equal(x.cpu(), want)
    assert x.data_ptr() == address


@pytest.mark.sanitize
def test_host_pages_are_read_and_written_by_kernels() -> None:
    x = pattern(4 * PAGE // 20)
    want = x.cpu()
    torch.mgpu.to_host(x)
    x.add_(1)
    assert torch.equal(x.cpu(), want + 1)
    torch.mgpu.to_device(x)
    x.add_(1)
    assert torch.equal(x.cpu(), want + 2)


def test_a_gibibyte_moves_quickly_both_ways() -> None:
    x = pattern(GIB // 20)
    want = x.cpu()
    for turn in range(2):
        for move in (torch.mgpu.to_host, torch.mgpu.to_device):
            torch.mgpu.synchronize()
            start = time.perf_counter()
            move(x)
            taken = time.perf_counter() - start
            assert torch.equal(x.cpu(), want)
            # benchmarks/memory.py measures it (0.1 s); here other tests may be running
            assert MANAGED or turn == 0 or taken < 2.0, f"{taken:.3f} s"


def test_scattered_pages_come_together_again() -> None:
    x = pattern(128 * PAGE // 20)
    want = x.cpu()
    for step in (2, 3):
        torch.mgpu.to_host(x, range(0, 128, step))
        assert torch.equal(x.cpu(), want)
        assert torch.mgpu.memory_stats()["host"] == len(range(0, 128, step)) * PAGE
        torch.mgpu.to_device(x)
        assert torch.equal(x.cpu(), want)
    torch.mgpu.to_host(x, [5, 5, 4])  # in any order, and twice
    assert torch.mgpu.placement(x).eq(-1).nonzero().flatten().tolist() == [4, 5]
    assert torch.equal(x.cpu(), want)


@pytest.mark.skipif(MANAGED, reason="managed memory leaves a spare part of the card to others")
@pytest.mark.whole_gpu
def test_pages_go_to_the_host_when_the_card_is_full() -> None:
    """A whole move wants new memory for the pages that stay; where there is none, handles are replaced one by one."""
    x = pattern(256 * PAGE // 20)
    want = x.cpu()
    torch.mgpu.empty_cache()
    fill = []
    for size in (GIB, 64 << 20):
        while torch.cuda.mem_get_info()[0] > size + (160 << 20):
            fill.append(torch.empty(size, dtype=torch.uint8, device="mgpu"))
    torch.mgpu.to_host(x, range(0, 256, 2))
    assert torch.mgpu.memory_stats()["host"] == 128 * PAGE
    del fill
    assert torch.equal(x.cpu(), want)
    torch.mgpu.to_device(x)
    assert torch.equal(x.cpu(), want)


def test_pages_move_under_a_thread_that_computes(shards: int) -> None:
    x = torch.ones(16 * PAGE // 4, device="mgpu")
    stop = threading.Event()
    sums: list[float] = []

    def compute() -> None:
        while not stop.is_set():
            sums.append((x * 1).sum().item())

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for turn in range(20):
            torch.mgpu.place(x, [(page + turn) % (shards + 1) - 1 for page in range(16)])
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert len(sums) > 2
    assert set(sums) == {16 * PAGE / 4}


# ---- growing


@pytest.mark.whole_gpu  # asks what is free of the card, and how long it took
def test_growth_of_gigabytes_is_quick_and_copies_nothing() -> None:
    rows, row_bytes = 4 << 20, 256
    x = torch.mgpu.reserve((rows, row_bytes // 4), 4 * rows)
    x[:: rows // 64] = 7
    torch.mgpu.grow(x, rows + 1)  # loads what growth needs
    torch.mgpu.synchronize()
    before = torch.cuda.mem_get_info()[0]
    start = time.perf_counter()
    torch.mgpu.grow(x, rows + rows // 10)
    torch.mgpu.synchronize()
    taken = time.perf_counter() - start
    used = before - torch.cuda.mem_get_info()[0]
    assert used <= rows // 10 * row_bytes + 2 * PAGE + (64 << 20)
    assert x[rows:].count_nonzero().item() == 0
    assert (x[:rows].amax(1) == 7).sum().item() == len(range(0, rows, rows // 64))
    assert MANAGED or taken < 0.1, f"{taken * 1e3:.1f} ms for 100 MiB"


def test_a_whole_table_grows_and_leaves_nothing_behind() -> None:
    shapes = [(3,), (4,), (3,), (), (3,), (15, 3)]
    rows = 1_000_000
    before = held()
    columns = [torch.mgpu.reserve((rows, *shape), 3 * rows) for shape in shapes for _ in range(3)]
    columns.append(torch.mgpu.reserve((rows,), 3 * rows, torch.int32))
    for number, column in enumerate(columns):
        column.fill_(number + 1)
    for more in (rows + rows // 10, rows + rows // 10 + 1, 2 * rows):
        for column in columns:
            torch.mgpu.grow(column, more)
        exact = sum(column.nbytes for column in columns)
        assert held()[0] - before[0] <= exact + len(columns) * PAGE + (64 << 20)
        for number, column in enumerate(columns):
            assert column[:rows].eq(number + 1).all()
            assert not column[rows:].any()
    del column, columns
    assert held() == before


def test_random_cycles_leave_no_byte_on_the_gpu(shards: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def cycle() -> None:
        rows = pick(1, 400_000)
        x = torch.mgpu.reserve((rows, 5), 800_000, torch.int32)
        x.copy_(pattern(rows))
        known = rows

        def grow() -> None:
            torch.mgpu.grow(x, pick(x.shape[0], 800_001))

        def pages() -> int:
            return int(torch.mgpu.placement(x).numel())

        steps: list[Callable[[], object]] = [
            grow,
            lambda: torch.mgpu.place(x, [pick(-1, shards) for _ in range(pages())]),
            lambda: torch.mgpu.to_host(x, [page for page in range(pages()) if pick(0, 3) == 0]),
            lambda: torch.mgpu.to_device(x, [page for page in range(pages()) if pick(0, 3) == 0]),
            grow,
            lambda: torch.mgpu.to_host(x),
            lambda: torch.mgpu.place(x, pick(0, shards)),
            lambda: torch.mgpu.to_device(x),
        ]
        for step in torch.randperm(len(steps), generator=generator)[: pick(3, len(steps) + 1)].tolist():
            steps[step]()
            assert torch.equal(x[:known], pattern(known))
            assert x[known:].count_nonzero().item() == 0

    for _ in range(3):
        cycle()  # loads the kernels
    before = held()
    for _ in range(60 if MANAGED else 1000):
        cycle()
    assert held() == before


# ---- temporaries of stages


def temporary_view(block: object, count: int) -> torch.Tensor:
    """A stage's temporary as a CUDA tensor of `count` int32."""
    interface = {"shape": (count,), "typestr": "<i4", "data": (block.address, False), "version": 3}  # type: ignore[attr-defined]
    return torch.as_tensor(type("Array", (), {"__cuda_array_interface__": interface})(), device="cuda")


@pytest.mark.sanitize
def test_temporaries_are_given_back_on_demand() -> None:
    before = held()
    blocks = [native().Temporary(size, -1) for size in (100, 3 * PAGE, 200 * PAGE, 7)]
    assert native().held_memory()[0] >= before[0] + 203 * PAGE
    del blocks[2]
    assert held()[0] <= before[0] + (160 << 20), "what is between others goes, too, handle by handle"
    for number, block in enumerate(blocks):
        temporary_view(block, 1).fill_(number)
    assert [int(temporary_view(block, 1)) for block in blocks] == [0, 1, 2]
    del block
    blocks.clear()
    assert held() == before


def test_a_temporary_takes_the_place_of_the_one_before_it() -> None:
    first = native().Temporary(PAGE, 0)
    address = first.address
    del first
    reserved = torch.mgpu.memory_reserved()
    for size in (PAGE, PAGE // 2, 1000):
        block = native().Temporary(size, 0)
        assert block.address == address
        del block
    assert torch.mgpu.memory_reserved() == reserved


def test_a_temporary_costs_less_than_a_microsecond() -> None:
    sizes = [1 << (8 + bits) for bits in range(20)]
    native().time_temporaries(sizes, 10, 0)
    taken = min(native().time_temporaries(sizes, 100, 0) for _ in range(5)) / (100 * len(sizes))
    assert taken < 1e-6, f"{taken * 1e9:.0f} ns"


def test_a_temporary_freed_under_another_stream_waits_for_it() -> None:
    side = torch.Stream(device="mgpu")
    count = 4 * PAGE // 4
    with side:
        block = native().Temporary(4 * count, 0)  # of the side stream's heap
        view = temporary_view(block, count)
        view.fill_(3)
    torch.mgpu.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s, on this thread's stream
    total = view.sum(dtype=torch.int64)
    address = block.address
    del block
    with side:
        other = native().Temporary(4 * count, 0)
        assert other.address == address
        temporary_view(other, count).fill_(9)
    assert int(total) == 3 * count
    del other


def test_temporaries_that_do_not_fit_are_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"could not get .* Shards: 0 \(cuda:"):
        native().Temporary(1 << 42, 0)
    block = native().Temporary(PAGE, 0)
    del block


@pytest.mark.skipif(MANAGED, reason="managed memory leaves a spare part of the card to others")
@pytest.mark.whole_gpu
def test_caches_are_given_back_to_a_temporary() -> None:
    torch.mgpu.empty_cache()
    part = torch.cuda.mem_get_info()[0] // 10 // PAGE * PAGE
    kept = [torch.empty(part, dtype=torch.uint8, device="mgpu") for _ in range(5)]
    torch_kept = [torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(3)]
    del kept, torch_kept
    block = native().Temporary(8 * part, 0)
    assert block.address
    del block
    torch.mgpu.empty_cache()


def test_a_result_of_a_torch_kernel_is_the_lead_shards() -> None:
    x = torch.randn(1500, 1500, device="mgpu")
    before = torch.mgpu.memory_allocated()
    y = x.flip(0)  # has no out= form into which torch could be made to write
    assert torch.mgpu.memory_allocated() - before == -(-y.nbytes // 512) * 512
    places = torch.mgpu.placement(y)
    assert places.numel() >= y.nbytes // PAGE
    assert places.eq(0).all()


# ---- running out

HOPELESS: dict[str, Callable[[torch.Tensor], object]] = {
    "empty": lambda x: torch.empty(1 << 41, dtype=torch.uint8, device="mgpu"),
    "zeros": lambda x: torch.zeros(1 << 39, device="mgpu"),
    "rand": lambda x: torch.rand(1 << 39, device="mgpu"),
    "to": lambda x: x.expand(1 << 30, -1).contiguous(),
    "outer sum": lambda x: x.new_ones(1 << 20, 1) + x.new_ones(1, 1 << 20),
    "matmul": lambda x: x.new_ones(1 << 20, 1) @ x.new_ones(1, 1 << 20),
    "cat": lambda x: torch.cat([x.expand(1 << 29, -1), x.expand(1 << 29, -1)]),
    "index_select": lambda x: x.index_select(
        0, torch.zeros(1, dtype=torch.int64, device="mgpu").expand(1 << 31)
    ),
    "repeat": lambda x: x.repeat(1 << 30, 1),
    "reserve": lambda x: torch.mgpu.reserve((1 << 35, 64), 1 << 35),
    "resize_": lambda x: torch.empty(0, device="mgpu").resize_(1 << 39),
    "foreach": lambda x: torch._foreach_add([x.new_ones(1, 1).expand(1 << 20, 1 << 20)], 1.0),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_out_of_memory_is_one_clear_error_and_the_process_goes_on(name: str) -> None:
    x = torch.ones(4, 512, device="mgpu")[:1]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        HOPELESS[name](x)
    text = str(caught.value)
    assert "Shards: 0 (cuda:" in text, text
    assert text.count("GiB free") == len(set(torch.mgpu.mesh().shards)), text  # said once for each GPU
    assert "MGPU_DEVICES" in text
    del caught
    assert (torch.ones(1000, device="mgpu") * 2).sum().item() == 2000


@pytest.mark.skipif(MANAGED, reason="managed memory leaves a spare part of the card to others")
@pytest.mark.whole_gpu
def test_caches_are_given_back_before_memory_is_said_to_be_short() -> None:
    gc.collect()
    torch.mgpu.empty_cache()
    part = torch.cuda.mem_get_info()[0] // 10 // PAGE * PAGE
    kept = [torch.empty(part, dtype=torch.uint8, device="mgpu") for _ in range(4)]  # the pool's cache
    torch_kept = [torch.empty(part, dtype=torch.uint8, device="cuda") for _ in range(3)]  # torch's
    del kept, torch_kept
    whole = torch.empty(8 * part, dtype=torch.uint8, device="mgpu")
    assert whole.numel() == 8 * part
    del whole
    torch.mgpu.empty_cache()


# ---- past 2^31


def test_elements_past_two_to_the_31_and_32() -> None:
    count = (1 << 32) + 12_345
    needs(13)
    x = torch.zeros(count, dtype=torch.uint8, device="mgpu")
    for at in (0, (1 << 31) - 1, 1 << 31, (1 << 32) + 5, count - 1):
        x[at] = 3
    x.add_(1)
    assert x.sum(dtype=torch.int64).item() == count + 15
    assert x[(1 << 32) + 5].item() == 4
    assert x[1 << 32].item() == 1
    assert x[(1 << 31) - 2 : (1 << 31) + 2].tolist() == [1, 4, 4, 1]
    assert torch.mgpu.placement(x).unique().numel() == len(torch.mgpu.mesh().shards)


@pytest.mark.whole_gpu
def test_a_tensor_of_a_hundred_gibibytes_works_in_place() -> None:
    needs(104 if not MANAGED else 110)
    count = 100 * GIB // 4  # past 2^34 elements
    x = torch.empty(count, device="mgpu")
    x.fill_(2)
    x.add_(3)
    assert x.sum().item() == pytest.approx(5.0 * count, rel=1e-6)
    places = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 34) + 7, count - 1]
    for number, place in enumerate(places):
        x[place] = number + 10
    assert [x[place].item() for place in places] == list(range(10, 17))
    index = torch.tensor(places, device="mgpu")
    assert x[index].tolist() == list(range(10, 17))
    assert x.index_select(0, index).tolist() == list(range(10, 17))
    x[index] = torch.arange(7.0, device="mgpu")
    assert x[index].tolist() == list(range(7))
    x[(1 << 32) - 5 : (1 << 32) + 5].mul_(2)
    assert x[(1 << 32) - 6 : (1 << 32) + 6].tolist() == [5, 10, 10, 10, 10, 6, 8, 10, 10, 10, 10, 5]
    x.sub_(5).abs_()
    assert x.sum().item() == 5 + 4 + 3 + 1 + 3 + 0 + 1 + 8 * 5, "nothing else was touched"
    assert torch.mgpu.placement(x).unique().numel() == len(torch.mgpu.mesh().shards)


# ---- managed


@pytest.mark.skipif(not MANAGED, reason="run with MGPU_MEMORY=managed")
def test_managed_tensors_are_plain_for_the_host_and_for_prefetch() -> None:
    import ctypes

    x = torch.tensor([1.5, 2.0], device="mgpu")
    y = x @ torch.eye(2, device="mgpu")  # made by a torch kernel
    torch.mgpu.synchronize()
    for tensor in (x, y):
        assert (ctypes.c_float * 2).from_address(tensor.data_ptr())[1] == 2.0
