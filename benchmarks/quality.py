# SPDX-License-Identifier: Apache-2.0
"""Whether a setting costs quality: the same photographs trained with it and without it, with many seeds each.

    python benchmarks/quality.py [--settings float32 half shards] [--seeds 12] [--together 5] [--json FILE]

One run differs from the next by some tenths of a dB, whatever the setting: the corners of photographs that no other one shows
come out by chance. So each setting is trained with many seeds, several runs at a time (no time is measured here), by
`caliterra.py`'s bare loop. Printed are the mean PSNR over seeds and held-out photographs with its standard error; the same as
a difference from the first setting; and the difference over the `--steady` half of the photographs whose PSNR varies least
from seed to seed under the first setting, which chance blurs least.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    "float32": ([], {}),
    "half": (["--model", "half=True"], {}),
    "shards": ([], {"MGPU_DEVICES": "0,0,0,0"}),
}


def train(setting: str, seed: int, steps: int, more: list[str]) -> dict[str, Any]:
    """One run of caliterra.py in a process of its own."""
    arguments, environment = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, str(Path(__file__).with_name("caliterra.py")), "--runs", "bare"]
        command += ["--seeds", str(seed), "--steps", str(steps), "--json", str(out), *arguments, *more]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{setting}, seed {seed}: {done.stderr.strip()[-600:]}")
        row: dict[str, Any] = json.loads(out.read_text())["rows"][0]
        return {"setting": setting, **row}


def standard_error(values: list[float]) -> float:
    """Of the mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def table(rows: list[dict[str, Any]], settings: list[str]) -> list[str]:
    """A line for each setting: means, standard errors, differences from the first."""
    by_setting = {name: [row for row in rows if row["setting"] == name] for name in settings}
    settings = [name for name in settings if by_setting[name]]
    first = by_setting[settings[0]]
    spread = [
        statistics.pstdev(of_one) for of_one in zip(*(row["photographs"] for row in first), strict=True)
    ]
    steady = sorted(range(len(spread)), key=spread.__getitem__)[: max(1, len(spread) // 2)]
    lines = [f"{'setting':10}{'runs':>5}{'PSNR dB':>16}{'difference':>16}{'steady half':>18}{'SSIM':>9}"]

    def steady_means(group: list[dict[str, Any]]) -> list[float]:
        return [statistics.fmean(row["photographs"][i] for i in steady) for row in group]

    def difference(mine: list[float], other: list[float]) -> str:
        error = math.hypot(standard_error(mine), standard_error(other))
        return f"{statistics.fmean(mine) - statistics.fmean(other):+.3f} +- {error:.3f}"

    for name in settings:
        psnr, reference = ([row["psnr"] for row in group] for group in (by_setting[name], first))
        line = f"{name:10}{len(psnr):5}{statistics.fmean(psnr):8.3f} +- {standard_error(psnr):.3f}"
        if name != settings[0]:
            line += f"{difference(psnr, reference):>17}"
            line += f"{difference(steady_means(by_setting[name]), steady_means(first)):>18}"
        else:
            line += f"{'':17}{statistics.fmean(steady_means(first)):8.3f}{'':10}"
        lines.append(line + f"{statistics.fmean(row['ssim'] for row in by_setting[name]):9.4f}")
    lines.append(
        "spread of each photograph, dB: "
        + " ".join(f"{s:.2f}{'*' if i in steady else ''}" for i, s in enumerate(spread))
    )
    return lines


def main() -> int:
    """Train all, print the table; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=12, help="runs of each setting")
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--together", type=int, default=5, help="runs at a time")
    parser.add_argument("--json", type=Path, help="file for all runs' figures, written after each")
    arguments, more = parser.parse_known_args()  # more: for caliterra.py
    jobs = [(name, arguments.first_seed + i) for i in range(arguments.seeds) for name in arguments.settings]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []

    def one(job: tuple[str, int]) -> None:
        try:
            rows.append(train(*job, arguments.steps, more))
        except RuntimeError as problem:
            failures.append(str(problem))
        if arguments.json:
            arguments.json.write_text(json.dumps({"benchmark": "quality", "rows": rows}, indent=1) + "\n")

    with ThreadPoolExecutor(arguments.together) as pool:
        list(pool.map(one, jobs))
    if rows:
        print("\n".join(table(rows, arguments.settings)))
    for problem in failures:
        print(problem, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
