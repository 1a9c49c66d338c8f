# SPDX-License-Identifier: Apache-2.0
"""Small chunks, so that small tables go through several, and a way to run the command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ns_mgpu_splat.export import rows
from ns_mgpu_splat.nerfstudio.export_command import main


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK_ROWS", 13)  # no multiple of the eight bits in a byte


@pytest.fixture
def run_export(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `mgpu-splat-export --load-config ... --output ...`; returns the line on stdout. `fails`: the one on stderr."""

    def run(config: Path, output: Path, *options: object, fails: bool = False) -> str:
        code = main(["--load-config", str(config), "--output", str(output), *map(str, options)])
        out, err = capsys.readouterr()
        assert code == (1 if fails else 0), err
        if fails:
            assert out == ""
            assert err.startswith("mgpu-splat-export: ")
            assert err.count("\n") == 1
            assert "Traceback" not in err
            return err
        assert out.count("\n") == 1
        run.warning = err
        return out

    return run
