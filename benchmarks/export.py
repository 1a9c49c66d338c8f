# SPDX-License-Identifier: Apache-2.0
"""Time exports of a made-up run, each in a process of its own, with the memory they take beyond what importing torch takes.

    python benchmarks/export.py [--rows 5000000] [--folder DIR] [--json FILE]

Rows are random, in the order of x: compressed sizes are those of noise. Wall-clock times hang on what else the machine does;
CPU times hang on it less. The raw write is a plain write and fsync of as many bytes as the `.ply` has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CASES = {
    "ply": ["splats.ply"],
    "ply, world frame": ["splats.ply", "--frame", "world"],
    "ply, best fifth, degree 1": ["splats.ply", "--max-splats", "{fifth}", "--sh-degree", "1"],
    "ply, tiles": ["splats.ply", "--tile-size", "0.5"],
    "splat": ["splats.splat"],
    "spz": ["splats.spz"],
}
PROBE = """
import json, os, re, sys, time
from pathlib import Path
from ns_mgpu_splat.nerfstudio import export_command, saved_run
def kilobytes(name): return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")
before, cpu, wall = kilobytes("VmRSS"), time.process_time(), time.perf_counter()
code = export_command.main(sys.argv[1:])
print(json.dumps({"code": code, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu,
                  "extra_mb": (kilobytes("VmHWM") - before) / 1e3, "peak_mb": kilobytes("VmHWM") / 1e3}))
"""


def make_run(folder: Path, rows: int) -> Path:
    """A run of random rows of degree 3; returns its config.yml."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    means = torch.rand((rows, 3), generator=generator) * 2 - 1
    columns = {
        "means": means[means[:, 0].argsort()],
        "scales": normal(rows, 3) - 6,
        "quats": normal(rows, 4),
        "features_dc": normal(rows, 3) * 0.5,
        "features_rest": normal(rows, 15, 3) * 0.2,
        "opacities": normal(rows, 1) * 2,
    }
    models = folder / "nerfstudio_models"
    models.mkdir(parents=True)
    state = {f"_model.gauss_params.{name}": column for name, column in columns.items()}
    torch.save({"format": 1, "step": 0, "pipeline": state}, models / "step-000000000.ckpt")
    (folder / "config.yml").write_text("pipeline: {}\n")
    transform = [[0, 1, 0, -3.0], [0, 0, 1, 5.0], [1, 0, 0, 2.0]]
    (folder / "dataparser_transforms.json").write_text(json.dumps({"transform": transform, "scale": 0.01}))
    return folder / "config.yml"


def raw_write(folder: Path, size: int) -> float:
    """Seconds to write and fsync this many bytes."""
    block = os.urandom(1 << 23)
    begin = time.perf_counter()
    with (folder / "raw").open("wb") as file:
        for at in range(0, size, len(block)):
            file.write(block[: size - at])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    (folder / "raw").unlink()
    return seconds


def measure(config: Path, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """One export in a process of its own."""
    output = folder / arguments[0]
    command = [sys.executable, "-c", PROBE, "--load-config", str(config), "--output", str(output)]
    done = subprocess.run([*command, *arguments[1:]], stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    if result["code"] != 0:
        raise SystemExit(f"{' '.join(arguments)} failed; its message is above.")
    tiles = output.with_suffix("")
    files = list(tiles.iterdir()) if tiles.is_dir() else [output]
    result["size_mb"] = sum(path.stat().st_size for path in files) / 1e6
    result["files"] = len(files)
    shutil.rmtree(tiles) if tiles.is_dir() else output.unlink()
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the folder for temporary files"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"rows": arguments.rows}
    with tempfile.TemporaryDirectory(prefix="mgpu-export-", dir=arguments.folder) as name:
        folder = Path(name)
        config = make_run(folder / "run", arguments.rows)
        raw = raw_write(folder, arguments.rows * 248)
        results["raw write"] = {"wall_s": raw, "size_mb": arguments.rows * 248 / 1e6}
        print(f"{arguments.rows:,} Gaussians of degree 3; a raw write of the .ply's bytes takes {raw:.1f} s")
        print(
            f"{'export':28s} {'wall s':>7s} {'CPU s':>7s} {'extra MB':>9s} {'peak MB':>8s} {'files MB':>9s} {'files':>6s}"
        )
        for title, case in CASES.items():
            case = [word.format(fifth=arguments.rows // 5) for word in case]
            r = results[title] = measure(config, folder, case)
            print(f"{title:28s} {r['wall_s']:7.1f} {r['cpu_s']:7.1f} {r['extra_mb']:9.0f} {r['peak_mb']:8.0f} "
                  f"{r['size_mb']:9.0f} {r['files']:6d}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
