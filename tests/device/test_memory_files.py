# SPDX-License-Identifier: Apache-2.0
"""Large tensors to a file and back, piece by piece. Oracles: torch's own reader and writer, and zipfile's checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ns_mgpu_splat.device import files, native

ROWS = torch.randn(70_000, 3, generator=torch.Generator().manual_seed(0))
PICKLE_AND_ID = ("data.pkl", ".data/serialization_id")  # torch.load is asked whether the pickle is right


def records(path: Path) -> dict[str, bytes]:
    """All records of a file by name, but its random id and the pickle; checksums are compared on the way."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = {info.filename.split("/", 1)[1]: info.filename for info in archive.infolist()}
        return {key: archive.read(name) for key, name in names.items() if key not in PICKLE_AND_ID}


def some_state() -> dict[str, Any]:
    """Tensors of all kinds that a state may hold."""
    x = ROWS.to("mgpu")
    return {
        "x": x,
        "view": x[5:9],
        "on the host": ROWS[:10].clone(),
        "parameter": nn.Parameter(torch.ones(4, device="mgpu")),
        "empty": torch.empty(0, 3, device="mgpu"),
        "half": ROWS.half().to("mgpu"),
        "nested": [(torch.arange(5, device="mgpu"), 1.5, "text")],
    }


@pytest.mark.parametrize("piece", [1000, files.PIECE])
def test_files_are_torchs_own(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", piece)
    state = some_state()
    (tmp_path / "a").mkdir()
    torch.mgpu.save(state, tmp_path / "a" / "x.pt")
    (tmp_path / "b").mkdir()
    torch.save(state, tmp_path / "b" / "x.pt")
    assert records(tmp_path / "a" / "x.pt") == records(tmp_path / "b" / "x.pt")
    for path, read in ((tmp_path / "a" / "x.pt", torch.load), (tmp_path / "b" / "x.pt", torch.mgpu.load)):
        loaded = read(path)
        assert loaded["x"].device.type == "mgpu"
        assert loaded["on the host"].device.type == "cpu"
        assert torch.equal(loaded["x"].cpu(), ROWS)
        assert torch.equal(loaded["half"].cpu(), ROWS.half())
        assert loaded["nested"][0][0].tolist() == [0, 1, 2, 3, 4]
        assert isinstance(loaded["parameter"], nn.Parameter)
        loaded["x"].zero_()
        assert not loaded["view"].any(), "a view shares its storage"


@pytest.mark.parametrize("direct", [True, False])
def test_large_storages_are_written_past_the_page_cache_where_that_can_be(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes about whole blocks and pieces; memory that is not aligned; a file system that refuses."""
    monkeypatch.setattr(files, "PIECE", 1 << 20)
    probe = files._open_direct(Path(__file__))
    if direct and probe is None:
        pytest.skip("the file system of this checkout does not know O_DIRECT")
    straight: list[int] = []
    pwrite = files.os.pwrite

    def watched(file: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & files.os.O_DIRECT:
            if not direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            straight.append(len(data))
        return pwrite(file, data, offset)

    monkeypatch.setattr(files.os, "pwrite", watched)
    sizes = [1, 4095, 4096, 4097, (1 << 20) - 1, (1 << 20) + 5000, 3 << 20]
    state = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    state.append(torch.frombuffer(bytearray(1 << 20), dtype=torch.uint8, offset=1))  # at an odd address
    path = tmp_path / "x.pt"
    torch.mgpu.save([tensor.to("mgpu") for tensor in state[:-1]] + state[-1:], path, location="cpu")
    records(path)  # compares checksums
    for wrote, read in zip(state, torch.load(path, mmap=True), strict=True):
        assert torch.equal(wrote, read)
    assert (sum(straight) > 4 << 20) is direct


def test_checksums_of_pieces_make_the_checksum_of_the_whole() -> None:
    text = torch.randint(0, 256, (300_000,), dtype=torch.uint8).numpy().tobytes()
    for cuts in ([], [0], [1, 70_000], [299_999], [4096, 8192, 8193]):
        edges = [0, *cuts, len(text)]
        pieces: list[tuple[Future[int | OSError], int]] = []
        for begin, end in itertools.pairwise(edges):
            done: Future[int | OSError] = Future()
            done.set_result(zlib.crc32(text[begin:end]))
            pieces.append((done, end - begin))
        assert files._checksum(pieces) == zlib.crc32(text)


def test_a_file_for_the_cpu_is_read_without_the_device(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.mgpu.save({"x": ROWS.to("mgpu")}, path, location="cpu")
    code = f"import torch; x = torch.load({str(path)!r})['x']; print(x.device.type, float(x.double().sum()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kind, total = done.stdout.split()
    assert kind == "cpu"
    assert float(total) == float(ROWS.double().sum())
    assert torch.equal(torch.mgpu.load(path, map_location="mgpu")["x"].cpu(), ROWS)
    assert torch.equal(torch.mgpu.load(path, map_location="cpu")["x"], ROWS)


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What is not freed by its last reference stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_a_saved_tensor_can_still_grow(tmp_path: Path) -> None:
    """Nothing of the writer holds its memory once the file is there, as training needs that saves and then grows."""
    parameter = nn.Parameter(torch.mgpu.reserve((100_000, 3), 1_000_000))
    moment = torch.mgpu.reserve((100_000,), 1_000_000)
    for turn in range(1, 4):
        state = {"state": {"means": parameter.data, "moment": moment}, "view": parameter.detach()}
        torch.mgpu.save(state, tmp_path / "x.pt", location="cpu")
        del state
        native().grow(parameter, 100_000 + turn)  # torch.mgpu.grow collects garbage before it gives up
        native().grow(moment, 100_000 + turn)
        moment.copy_(torch.mgpu.load(tmp_path / "x.pt")["state"]["moment"].new_ones(100_000 + turn))
    assert parameter.shape == (100_003, 3)


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "pwrite", no_space)
    with pytest.raises(OSError, match="No space left"):
        torch.mgpu.save({"x": ROWS.to("mgpu")}, tmp_path / "x.pt")


@pytest.mark.usefixtures("no_garbage_collector")
def test_a_failed_save_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.mgpu.reserve((100_000, 3), 1_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", no_space)
        with contextlib.suppress(OSError):  # pytest.raises would keep the traceback, and with it the tensor
            torch.mgpu.save({"x": x}, tmp_path / "x.pt")
    native().grow(x, 100_001)


def risen(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and by how many MiB this process's own memory rose at most."""

    def anonymous() -> float:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    stop, before = threading.Event(), anonymous()
    most = [before]

    def watch() -> None:
        while not stop.wait(0.001):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return run(), most[0] - before
    finally:
        stop.set()
        thread.join()


def test_the_host_holds_no_copy(tmp_path: Path) -> None:
    mebibytes = 600
    on_host = torch.mgpu.mesh().shards[0].startswith("cpu")
    torch.mgpu.save(torch.ones(files.PIECE // 2, device="mgpu"), tmp_path / "warm.pt")
    torch.mgpu.load(tmp_path / "warm.pt")
    x = torch.arange(mebibytes << 18, dtype=torch.int32, device="mgpu")
    _, more = risen(lambda: torch.mgpu.save(x, tmp_path / "x.pt"))
    assert more < 250
    loaded, more = risen(lambda: torch.mgpu.load(tmp_path / "x.pt"))
    assert more < 250 + (mebibytes if on_host else 0)
    assert torch.equal(loaded, x)
