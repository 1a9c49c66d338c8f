# SPDX-License-Identifier: Apache-2.0
"""`.ply` as INRIA's 3DGS writes it: every value as a float32, the only format here that loses nothing."""

from __future__ import annotations

import contextlib
from typing import BinaryIO

from ns_mgpu_splat.export.formats import ALL, FileFacts, Plane, Stream, plain
from ns_mgpu_splat.splats import ply


class PlyFormat:
    """See the module's text; the layout is in `splats/ply.py`."""

    suffix = ".ply"
    misfit = ""
    most_rows = 2**63 - 1
    highest_degree = 3

    def header(self, facts: FileFacts) -> bytes:
        """Text, with the notes as comments."""
        return ply.header(facts.count, facts.sh_degree, facts.notes)

    def planes(self, facts: FileFacts) -> list[Plane]:
        """One, of whole rows."""
        return [Plane(ALL, ply.pack)]

    def most_bytes(self, facts: FileFacts) -> int:
        """Exact."""
        return len(self.header(facts)) + facts.count * 4 * len(ply.property_names(facts.sh_degree))

    def stream(self, file: BinaryIO) -> contextlib.AbstractContextManager[Stream]:
        """The file."""
        return plain(file)
