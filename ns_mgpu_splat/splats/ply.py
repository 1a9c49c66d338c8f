# SPDX-License-Identifier: Apache-2.0
"""3DGS `.ply` files: INRIA's properties, binary, read and written in pieces of constant memory."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_CHUNK_ROWS = 1 << 18  # 65 MB at degree 3
_REST_BY_DEGREE = (0, 9, 24, 45)
_HEADER_LIMIT = 1 << 20  # a header longer than this is not one
_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip

_log = logging.getLogger("ns_mgpu_splat")


def property_names(sh_degree: int) -> list[str]:
    """Properties of a vertex in INRIA's order. f_rest goes channel by channel: all red coefficients first."""
    return [
        *("x", "y", "z", "nx", "ny", "nz"),
        *(f"f_dc_{i}" for i in range(3)),
        *(f"f_rest_{i}" for i in range(_REST_BY_DEGREE[sh_degree])),
        "opacity",
        *(f"scale_{i}" for i in range(3)),
        *(f"rot_{i}" for i in range(4)),
    ]


def _column_properties(sh_degree: int) -> dict[str, list[str]]:
    return {
        "means": ["x", "y", "z"],
        "quats": [f"rot_{i}" for i in range(4)],
        "scales": [f"scale_{i}" for i in range(3)],
        "opacities": ["opacity"],
        "sh0": [f"f_dc_{i}" for i in range(3)],
        "shN": [f"f_rest_{i}" for i in range(_REST_BY_DEGREE[sh_degree])],
    }


class _NotANumber(Exception):
    """A word of a header that must be a number and is none."""


class PlyReader:
    """The vertices of a 3DGS `.ply`, as columns of a splat table.

    Raises: ValueError naming the file if it is no binary `.ply`, lacks a property or is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_rows, self._dtype, self._offset = self._read_header()
        names = set(self._dtype.names or ())
        rest = sum(name.startswith("f_rest_") for name in names)
        if rest not in _REST_BY_DEGREE:
            raise ValueError(
                f"{self.path} has {rest} properties f_rest_*; a 3DGS file has 0, 9, 24 or 45 (SH degree 0 to 3)."
            )
        self.sh_degree = _REST_BY_DEGREE.index(rest)
        missing = [
            name
            for names_ in _column_properties(self.sh_degree).values()
            for name in names_
            if name not in names
        ]
        if missing:
            raise ValueError(
                f"{self.path} has no property {missing[0]!r} ({len(missing)} missing), so it is no 3DGS splat file. A plain "
                "point cloud is read as seed points, not as splats."
            )
        need = self._offset + self.num_rows * self._dtype.itemsize
        size = self.path.stat().st_size
        if size < need:
            raise ValueError(
                f"{self.path} is cut short: it has {size:,} bytes, its header announces {self.num_rows:,} splats, which need "
                f"{need:,}. Copy or export it again."
            )

    def _read_header(self) -> tuple[int, np.dtype, int]:
        with self.path.open("rb") as file:
            head = file.read(_HEADER_LIMIT)
        end = re.search(rb"\nend_header[ \t\r]*\n", head)
        if not head.startswith(b"ply") or end is None:
            raise ValueError(f"{self.path} is not a .ply file: it has no header from 'ply' to 'end_header'.")
        lines = head[: end.start()].decode("ascii", "replace").splitlines()[1:]
        try:
            rows, dtype = self._parse_header([line.split() for line in lines])
        except (IndexError, _NotANumber):
            raise ValueError(
                f"{self.path} has a damaged header: a line in it lacks a word or a number. Copy or export it again."
            ) from None
        return rows, dtype, end.end()

    def _parse_header(self, lines: list[list[str]]) -> tuple[int, np.dtype]:
        """Rows and layout of element vertex. Raises ValueError; IndexError or _NotANumber for a damaged line."""
        fields: list[tuple[str, str]] = []
        rows, element, order = -1, "", ""
        for words in lines:
            if not words or words[0] in ("comment", "obj_info"):
                continue
            if words[0] == "format":
                order = {"binary_little_endian": "<", "binary_big_endian": ">"}.get(words[1], "")
                if not order:
                    raise ValueError(
                        f"{self.path} is in format {words[1]}; convert it to binary_little_endian."
                    )
            elif words[0] == "element":
                if element == "" and words[1] != "vertex":
                    raise ValueError(
                        f"{self.path} begins with element {words[1]!r}; a 3DGS file begins with vertex."
                    )
                element = words[1]
                if element == "vertex":
                    if not words[2].isdecimal():
                        raise _NotANumber
                    rows = int(words[2])
            elif words[0] == "property" and element == "vertex":
                if words[1] not in _TYPES:
                    raise ValueError(
                        f"{self.path}: property {words[-1]!r} has type {words[1]!r}, expected a number."
                    )
                if any(words[2] == name for name, _ in fields):
                    raise ValueError(f"{self.path} has the property {words[2]!r} twice. Export it again.")
                fields.append((words[2], order + _TYPES[words[1]]))
        if rows < 0:
            raise ValueError(f"{self.path} has no element vertex.")
        return rows, np.dtype(fields)

    def _raw_chunks(self) -> Iterator[dict[str, np.ndarray]]:
        properties = _column_properties(self.sh_degree)
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for begin in range(0, self.num_rows, _CHUNK_ROWS):
                rows = min(_CHUNK_ROWS, self.num_rows - begin)
                raw = np.fromfile(file, dtype=self._dtype, count=rows)
                chunk = {}
                for column, names in properties.items():
                    values = np.empty((rows, len(names)), dtype=np.float32)
                    for i, name in enumerate(names):
                        values[:, i] = raw[name]
                    chunk[column] = values
                yield chunk

    def count_finite(self) -> int:
        """Rows without NaN or infinity; one line says how many others there are."""
        count = sum(int(_finite_rows(chunk).sum()) for chunk in self._raw_chunks())
        if count < self.num_rows:
            _log.warning("%s: %s of %s splats have values that are not finite and were left out", self.path,
                         f"{self.num_rows - count:,}", f"{self.num_rows:,}")  # fmt: skip
        return count

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """Finite rows in order, in pieces, by column of the splat table."""
        for chunk in self._raw_chunks():
            keep = _finite_rows(chunk)
            rows = int(keep.sum())
            out = {name: values if rows == len(keep) else values[keep] for name, values in chunk.items()}
            out["opacities"] = out["opacities"].reshape(rows)
            out["shN"] = np.ascontiguousarray(out["shN"].reshape(rows, 3, -1).transpose(0, 2, 1)) if rows else np.zeros(
                (0, _REST_BY_DEGREE[self.sh_degree] // 3, 3), dtype=np.float32
            )  # fmt: skip
            yield out


def _finite_rows(chunk: dict[str, np.ndarray]) -> np.ndarray:
    keep = np.ones(len(chunk["means"]), dtype=bool)
    for values in chunk.values():
        keep &= np.isfinite(values.reshape(len(keep), -1)).all(axis=1)
    return keep


def writable_target(path: str | Path) -> Path:
    """Where to write, so that renaming a finished file over it does what a user means: links stay, devices live.

    Returns: `path` with links followed.
    Raises: OSError if the folder does not exist, or if `path` is there and no regular file (a folder, /dev/null, a pipe).
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {target.parent}. Make it, or give another path."
        )
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of a file in it.")
    if target.exists() and not target.is_file():
        raise OSError(
            f"{path} is a device or a pipe, which a finished file cannot replace. Give the path of a file."
        )
    return target


def write(
    path: Path, num_rows: int, sh_degree: int, read_rows: Callable[[int, int], dict[str, np.ndarray]]
) -> int:
    """Write the finite ones of `num_rows` splats to `path` and return how many they are.

    Args:
        read_rows: gives the columns of rows [begin, end) on the host.
    Raises: OSError before anything is written if the disk is too full, or if `path` is no place for a file.
    """
    path = writable_target(path)
    names = property_names(sh_degree)
    pieces = [(begin, min(num_rows, begin + _CHUNK_ROWS)) for begin in range(0, num_rows, _CHUNK_ROWS)]
    count = sum(int(_finite_rows(read_rows(*piece)).sum()) for piece in pieces)
    need, free = count * len(names) * 4, shutil.disk_usage(path.parent).free
    if need > free:
        raise OSError(f"{path} needs {need / 1e9:.2f} GB, but {path.parent} has {free / 1e9:.2f} GB free.")
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    header += [f"property float {name}" for name in names]
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(("\n".join([*header, "end_header"]) + "\n").encode())
            for piece in pieces:
                _pack(read_rows(*piece), len(names)).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, survives a power cut
    finally:
        os.close(folder)
    if count < num_rows:
        _log.warning("%s: %s of %s splats have values that are not finite and were left out", path,
                     f"{num_rows - count:,}", f"{num_rows:,}")  # fmt: skip
    return count


def _pack(chunk: dict[str, np.ndarray], width: int) -> np.ndarray:
    """The finite rows of a chunk in INRIA's order, (rows, width) little-endian float32."""
    rows = len(chunk["means"])
    out = np.zeros((rows, width), dtype="<f4")
    rest = chunk["shN"].shape[1] * 3
    out[:, 0:3] = chunk["means"]  # 3 to 6: normals, zero
    out[:, 6:9] = chunk["sh0"]
    out[:, 9 : 9 + rest] = chunk["shN"].transpose(0, 2, 1).reshape(rows, rest)
    out[:, 9 + rest] = chunk["opacities"]
    out[:, 10 + rest : 13 + rest] = chunk["scales"]
    out[:, 13 + rest : 17 + rest] = chunk["quats"]
    keep = np.isfinite(out).all(axis=1)
    return out if keep.all() else out[keep]
