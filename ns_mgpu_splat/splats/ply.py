# SPDX-License-Identifier: Apache-2.0
"""3DGS `.ply` files: INRIA's properties, binary, read and written in pieces of constant memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ns_mgpu_splat.splats.targets import check_room, whole_file, writable_target

_CHUNK_ROWS = 1 << 15  # 8 MB at degree 3: stays in a cache
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
                f"{self.path} has no property {missing[0]!r} ({len(missing)} missing), so it is no file of Gaussians. A plain "
                "point cloud is read as seed points, not as Gaussians."
            )
        need = self._offset + self.num_rows * self._dtype.itemsize
        size = self.path.stat().st_size
        if size < need:
            raise ValueError(
                f"{self.path} is cut short: it has {size:,} bytes, its header announces {self.num_rows:,} Gaussians, which need "
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
        count = 0
        for chunk in self._raw_chunks():
            keep = finite_rows(chunk)
            count += len(chunk["means"]) if keep is None else int(keep.sum())
        if count < self.num_rows:
            _log.warning("%s: %s of %s Gaussians have values that are not finite and were left out", self.path,
                         f"{self.num_rows - count:,}", f"{self.num_rows:,}")  # fmt: skip
        return count

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """Finite rows in order, in pieces, by column of the splat table."""
        for chunk in self._raw_chunks():
            keep = finite_rows(chunk)
            out = {name: values if keep is None else values[keep] for name, values in chunk.items()}
            rows = len(out["means"])
            out["opacities"] = out["opacities"].reshape(rows)
            out["shN"] = np.ascontiguousarray(out["shN"].reshape(rows, 3, -1).transpose(0, 2, 1)) if rows else np.zeros(
                (0, _REST_BY_DEGREE[self.sh_degree] // 3, 3), dtype=np.float32
            )  # fmt: skip
            yield out


def finite_rows(chunk: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Which rows of a chunk of columns have finite values only, (rows,) bool; None for all of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        # a value that is not finite spoils its sum; a sum that overflows only costs the closer look
        if all(np.isfinite(values.sum()) for values in chunk.values()):
            return None
    keep = np.ones(len(next(iter(chunk.values()))), dtype=bool)
    for values in chunk.values():
        keep &= np.isfinite(values.reshape(len(keep), -1)).all(axis=1)
    return None if keep.all() else keep


def header(count: int, sh_degree: int, comments: Sequence[str] = ()) -> bytes:
    """The header of a file with `count` Gaussians, from "ply" to the line end of "end_header"."""
    lines = ["ply", "format binary_little_endian 1.0", *(f"comment {line}" for line in comments)]
    lines += [f"element vertex {count}", *(f"property float {name}" for name in property_names(sh_degree))]
    return ("\n".join([*lines, "end_header"]) + "\n").encode()


def pack(chunk: Mapping[str, np.ndarray]) -> np.ndarray:
    """Rows of a chunk as they are in a file: (rows, properties), INRIA's order, little-endian float32."""
    rows, rest = len(chunk["means"]), chunk["shN"].shape[1] * 3
    out = np.empty((rows, 17 + rest), dtype="<f4")
    out[:, 0:3] = chunk["means"]
    out[:, 3:6] = 0.0  # normals
    out[:, 6:9] = chunk["sh0"]
    out[:, 9 : 9 + rest].reshape(rows, 3, rest // 3)[...] = chunk["shN"].transpose(0, 2, 1)
    out[:, 9 + rest] = chunk["opacities"]
    out[:, 10 + rest : 13 + rest] = chunk["scales"]
    out[:, 13 + rest : 17 + rest] = chunk["quats"]
    return out


def write(
    path: Path, num_rows: int, sh_degree: int, read_rows: Callable[[int, int], dict[str, np.ndarray]]
) -> int:
    """Write the finite ones of `num_rows` Gaussians to `path` and return how many they are.

    Args:
        read_rows: gives the columns of rows [begin, end) on the host.
    Raises: OSError before anything is written if the disk is too full, or if `path` is no place for a file.
    """
    path = writable_target(path)
    pieces = [(begin, min(num_rows, begin + _CHUNK_ROWS)) for begin in range(0, num_rows, _CHUNK_ROWS)]
    count = 0
    for begin, end in pieces:
        keep = finite_rows(read_rows(begin, end))
        count += end - begin if keep is None else int(keep.sum())
    head = header(count, sh_degree)
    check_room(path, len(head) + count * len(property_names(sh_degree)) * 4)
    with whole_file(path) as file:
        file.write(head)
        for piece in pieces:
            chunk = read_rows(*piece)
            keep = finite_rows(chunk)
            kept = chunk if keep is None else {name: column[keep] for name, column in chunk.items()}
            file.write(pack(kept).data)
    if count < num_rows:
        _log.warning("%s: %s of %s Gaussians have values that are not finite and were left out", path,
                     f"{num_rows - count:,}", f"{num_rows:,}")  # fmt: skip
    return count
