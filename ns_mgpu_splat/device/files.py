# SPDX-License-Identifier: Apache-2.0
"""Tensors of any size to a file and back, piece by piece: `torch.mgpu.save` and `torch.mgpu.load`.

`torch.save` copies a storage to the host before it writes it, and `torch.load` reads one whole before it moves it to its
device. Here the host never holds more than a few pieces. The files are torch's own: either side reads what the other wrote.

Large storages begin at a block of the disk and are written by several threads, past the page cache (O_DIRECT): one file of
any size is written at the disk's speed, where buffered writes to one file go one after the other, and what else is cached,
images above all, stays cached. Where the file system does not know O_DIRECT, writes are buffered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import pickle
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, reduce
from pathlib import Path
from typing import IO, Any

import torch

PIECE = 16 << 20  # bytes; a multiple of BLOCK
CHECKED = 4 << 20  # bytes, that a thread reads at a time to compare checksums
WRITERS = 4  # threads: enough for the disks that benchmarks/checkpoint.py has met
BUFFERS = 8  # pieces under way
BLOCK = 4096  # bytes; what O_DIRECT wants files and memory aligned to
ALIGNED_FROM = 1 << 20  # bytes of the largest storage from which storages begin at a block
MADV_PAGEOUT = 21  # Linux 5.4; on pages of a file: drop them from this process

# .tag: the device that storages on mgpu are said to lie on; .mapped: what is loaded is a mapped file
_local = threading.local()


# ---- saving


def save(obj: Any, path: str | os.PathLike[str], *, location: str = "mgpu:0") -> None:
    """Write `obj` as `torch.save` does, without a copy of its tensors in host memory.

    Args:
        obj: what `torch.save` takes; tensors may lie on `mgpu` or the CPU.
        path: of the file. It is overwritten in place; whoever needs all or nothing writes aside and renames.
        location: the device that the file names for tensors on `mgpu`: there `torch.load` puts them by itself. "cpu" makes
            a file that a process without `mgpu` reads, too.
    Raises: OSError if the disk is full or the file cannot be written.
    """
    path = Path(path)
    storages = _storages_in_order(obj)
    large = max((storage.nbytes() for storage in storages), default=0) >= ALIGNED_FROM
    _local.tag = location
    try:  # everything but the storages' bytes, for which room is left
        with torch.serialization.skip_data(), _aligned_to(BLOCK if large else None):
            torch.save(obj, path)
    finally:
        _local.tag = None
    with path.open("r+b") as file, zipfile.ZipFile(file) as archive, _Writer(file.fileno(), path) as writer:
        records = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
        sums = {}
        for key, storage in enumerate(storages):
            info = records[f"data/{key}"]
            if info.file_size != storage.nbytes():
                raise RuntimeError(
                    f"{path}: record data/{key} has {info.file_size} bytes and its storage {storage.nbytes()}; this "
                    f"version of torch ({torch.__version__}) lays files out in another way. Use torch.save."
                )
            sums[info.filename] = writer.write(storage, _data_offset(file, info))
        if torch.serialization.get_crc32_options():
            _patch_checksums(file, archive, {name: _checksum(pieces) for name, pieces in sums.items()})


@contextlib.contextmanager
def _aligned_to(block: int | None) -> Iterator[None]:
    """Have torch.save begin storages at multiples of so many bytes; None: as it likes."""
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    if block is not None:
        config.save.storage_alignment = block
    try:
        yield
    finally:
        config.save.storage_alignment = before


class _Collector(pickle.Pickler):
    """Goes the way of torch.save's pickler and remembers the storages in the order in which that one numbers them.

    A class of its own, not one made for each call: such a class is a cycle, and would keep the storages until the garbage
    collector comes by; a tensor whose storage somebody holds cannot grow.
    """

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, value: Any) -> Any:
        storage = value._untyped_storage if isinstance(value, torch.storage.TypedStorage) else value
        if not isinstance(storage, torch.UntypedStorage):
            return None
        self.found.setdefault(storage._cdata, storage)
        return storage._cdata


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def _storages_in_order(obj: Any) -> list[torch.UntypedStorage]:
    collector = _Collector()
    collector.dump(obj)
    collector.clear_memo()
    return list(collector.found.values())


class _Writer:
    """Writes storages to a file, several pieces at once, while the next ones are read from the device."""

    def __init__(self, file: int, path: Path) -> None:
        self.file = file
        self.direct = _open_direct(path)
        self.threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint")
        self.buffers: list[torch.Tensor] = []
        self.busy: list[Future[int | OSError]] = []
        self.turn = -1

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.threads.shutdown(cancel_futures=kind is not None)
        if self.direct is not None:
            os.close(self.direct)
        if kind is None:
            for future in self.busy:
                _result(future)

    def write(self, storage: torch.UntypedStorage, offset: int) -> list[tuple[Future[int | OSError], int]]:
        """Start writing; the result is each piece's checksum and number of bytes."""
        total = storage.nbytes()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (total,), (1,))
        pieces = []
        for begin in range(0, total, PIECE):
            piece = flat[begin : begin + PIECE]
            slot = self._free_slot()
            data, host = self._on_host(slot, piece)
            self.busy[slot] = self.threads.submit(self._write_piece, data, offset + begin, host)
            pieces.append((self.busy[slot], len(data)))
        return pieces

    def _write_piece(self, data: memoryview, offset: int, keep: torch.Tensor) -> int | OSError:
        """In a thread: the piece's checksum once it is written, or what went wrong."""
        try:
            self._write_where_it_can(data, offset, keep)
        except OSError as error:
            return OSError(error.errno, error.strerror)
        return zlib.crc32(data)

    def _write_where_it_can(self, data: memoryview, offset: int, keep: torch.Tensor) -> None:
        whole = len(data) // BLOCK * BLOCK
        if self.direct is None or whole == 0 or offset % BLOCK or keep.data_ptr() % BLOCK:
            _write_all(self.file, data, offset)
            return
        try:
            _write_all(self.direct, data[:whole], offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
                raise
            whole = 0  # this memory or this file system cannot do it after all
        _write_all(self.file, data[whole:], offset + whole)

    def _free_slot(self) -> int:
        if len(self.busy) < BUFFERS:
            self.busy.append(Future())  # overwritten by the caller
            return len(self.busy) - 1
        self.turn = (self.turn + 1) % BUFFERS
        _result(self.busy[self.turn])
        return self.turn

    def _on_host(self, slot: int, piece: torch.Tensor) -> tuple[memoryview, torch.Tensor]:
        """A piece's bytes, and the tensor whose memory they are: its own, where the host can read it."""
        if piece.device.type != "cpu" and torch.mgpu.mesh().shards[0].startswith("cpu"):  # type: ignore[attr-defined]
            piece = torch.mgpu.as_host(piece)  # type: ignore[attr-defined]
        if piece.device.type == "cpu":
            return _bytes_of(piece), piece
        while len(self.buffers) <= slot:
            self.buffers.append(torch.empty(PIECE, dtype=torch.uint8, pin_memory=True))
        host = self.buffers[slot][: piece.numel()]
        host.copy_(piece)
        return _bytes_of(host), host


def _open_direct(path: Path) -> int | None:
    """The file once more, to write past the page cache; None where that cannot be done."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _result(future: Future[int | OSError]) -> int:
    """A piece's checksum; or its error, as one that nothing else refers to: whoever drops it drops the tensors, too."""
    value = future.result()
    if isinstance(value, OSError):
        raise OSError(value.errno, value.strerror)
    return value


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, which must outlive it."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _checksum(pieces: list[tuple[Future[int | OSError], int]]) -> int:
    """CRC-32 of all pieces one after the other, from that of each and its number of bytes."""
    done = [(_result(future), size) for future, size in pieces]
    return reduce(lambda before, piece: _times(_shift(piece[1]), before) ^ piece[0], done, 0)


# CRC-32 as arithmetic of polynomials over {0, 1} modulo POLY; the highest bit is the coefficient of x^0, as in zlib's
# crc32_combine (https://github.com/madler/zlib/blob/v1.3.1/crc32.c#L149-L190)
POLY = 0xEDB88320
ONE = 1 << 31


def _times(a: int, b: int) -> int:
    """a * b modulo POLY."""
    product, bit = 0, ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (POLY if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=64)
def _shift(count: int) -> int:
    """x^(8 count) modulo POLY: what a checksum is multiplied by when so many bytes follow."""
    power, square = ONE, ONE >> 8
    while count:
        if count & 1:
            power = _times(square, power)
        square = _times(square, square)
        count >>= 1
    return power


def _data_offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind its local header, whose length is in the header."""
    header = os.pread(file.fileno(), 30, info.header_offset)
    name, extra = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + int(name) + int(extra)


def _patch_checksums(file: IO[bytes], archive: zipfile.ZipFile, checksums: dict[str, int]) -> None:
    """Write CRC-32s into the central directory, and behind the records where they are repeated."""
    at = archive.start_dir
    for info in archive.infolist():
        name, extra, comment = struct.unpack("<HHH", os.pread(file.fileno(), 6, at + 28))
        if info.filename in checksums:
            packed = struct.pack("<I", checksums[info.filename])
            os.pwrite(file.fileno(), packed, at + 16)
            behind = _data_offset(file, info) + info.file_size
            if info.flag_bits & 8 and os.pread(file.fileno(), 4, behind) == b"PK\x07\x08":
                os.pwrite(file.fileno(), packed, behind + 4)
        at += 46 + name + extra + comment


# ---- loading


def damaged_record(path: str | os.PathLike[str]) -> str | None:
    """Read a file of `save` or `torch.save` and compare its checksums: the first record whose bytes are others, or None.

    Several threads read, through the page cache: what follows finds there what fits.
    Raises: OSError, zipfile.BadZipFile if it is no whole zip file.
    """
    buffers = threading.local()
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive, ThreadPoolExecutor(WRITERS) as threads:

        def checksum(begin: int, size: int) -> int:
            if not hasattr(buffers, "piece"):
                buffers.piece = memoryview(bytearray(CHECKED))
            done = 0
            while done < size:
                got = os.preadv(file.fileno(), [buffers.piece[done:size]], begin + done)
                if got == 0:
                    break
                done += got
            return zlib.crc32(buffers.piece[:done])

        sums: dict[str, list[tuple[Future[int | OSError], int]]] = {}
        for info in archive.infolist():
            start = _data_offset(file, info)
            pieces = [
                (begin, min(CHECKED, info.file_size - begin)) for begin in range(0, info.file_size, CHECKED)
            ]
            sums[info.filename] = [(threads.submit(checksum, start + b, size), size) for b, size in pieces]
        for info in archive.infolist():
            if _checksum(sums[info.filename]) != info.CRC:
                return info.filename
    return None


def load(
    path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True, **options: Any
) -> Any:
    """Read a file of `save` or `torch.save`; tensors go to `mgpu` piece by piece, without a copy in host memory.

    Args:
        path: of the file.
        map_location, weights_only, options: as for `torch.load`. With `map_location="cpu"`, tensors are the file itself,
            mapped: read where they are used, and gone wrong if the file is overwritten meanwhile.
    """
    with _mapped_file():
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=True, **options)


@contextlib.contextmanager
def _mapped_file() -> Iterator[None]:
    _local.mapped = True
    try:
        yield
    finally:
        _local.mapped = False


def _tag(storage: Any) -> str | None:
    """What a file says of storages on mgpu, while `save` has said so."""
    tag = getattr(_local, "tag", None)
    return tag if tag and storage.device.type == "mgpu" else None


def _to_mgpu(storage: Any, location: str) -> Any:
    """Storages of a mapped file that shall lie on mgpu: moved in pieces, each of which is let go at once."""
    if not getattr(_local, "mapped", False) or location not in ("mgpu", "mgpu:0"):
        return None
    total = storage.nbytes()
    out = torch.UntypedStorage(total, device="mgpu")
    to = torch.empty(0, dtype=torch.uint8, device="mgpu").set_(out, 0, (total,), (1,))
    source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,), (1,))
    for begin in range(0, total, PIECE):
        piece = source[begin : begin + PIECE]
        to[begin : begin + PIECE].copy_(piece)
        _let_go(piece)
    return out


def _let_go(piece: torch.Tensor) -> None:
    """Tell the kernel that these pages of a mapped file are not needed soon. A wish: where it fails, nothing is lost."""
    page = mmap.PAGESIZE
    begin = -(-piece.data_ptr() // page) * page
    end = (piece.data_ptr() + piece.numel()) // page * page
    if end > begin:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(MADV_PAGEOUT)
        )


def register() -> None:
    """Let torch's serialiser ask `save` and `load`; called once, by init()."""
    torch.serialization.register_package(15, _tag, _to_mgpu)
