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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    "float32": ([], {}),
    "half": (["--model", "half=True"], {}),
    "shards": (
        [],
        {"MGPU_DEVICES": "cpu:4" if os.environ.get("MGPU_DEVICES", "").startswith("cpu") else "0,0,0,0"},
    ),
}


def train(setting: str, seeds: list[int], out: Path, arguments: argparse.Namespace, more: list[str]) -> str:
    """Train some seeds one after the other, in one process of caliterra.py, which writes figures to `out` after each; why it
    failed, or nothing. After the time limit what is written stays."""
    options, environment = SETTINGS[setting]
    command = [sys.executable, str(Path(__file__).with_name("caliterra.py")), "--runs", "bare", "--seeds"]
    command += [*map(str, seeds), "--steps", str(arguments.steps), "--json", str(out), *options, *more]
    left = max(arguments.end - time.monotonic(), 0)
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=left
        )
    except subprocess.TimeoutExpired:
        return f"{setting}: of seeds {seeds} those without a figure were left out: no time"
    return f"{setting}, seeds {seeds}: {done.stderr.strip()[-600:]}" if done.returncode else ""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All figures written so far; a file is named by its setting."""
    return [
        {"setting": file.name.split("-")[0], **row}
        for file in sorted(folder.glob("*.json"))
        for row in json.loads(file.read_text())["rows"]
    ]


def standard_error(values: list[float]) -> float:
    """Of the mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def difference(mine: dict[int, float], other: dict[int, float]) -> str:
    """Of two means, with its standard error; seed by seed if all of `mine` have their pair, as such runs begin alike."""
    pairs = [mine[seed] - other[seed] for seed in mine if seed in other]
    if 1 < len(pairs) == len(mine):
        return f"{statistics.fmean(pairs):+.3f} +- {standard_error(pairs):.3f}"
    error = math.hypot(standard_error([*mine.values()]), standard_error([*other.values()]))
    return f"{statistics.fmean(mine.values()) - statistics.fmean(other.values()):+.3f} +- {error:.3f}"


def table(rows: list[dict[str, Any]], settings: list[str]) -> list[str]:
    """A line for each setting: means, standard errors, differences from the first."""
    by_setting = {name: [row for row in rows if row["setting"] == name] for name in settings}
    settings = [name for name in settings if by_setting[name]]
    # a photograph's weight: how little chance moves it, whatever the setting
    within = [
        [
            statistics.pvariance(one)
            for one in zip(*(row["photographs"] for row in by_setting[name]), strict=True)
        ]
        for name in settings
    ]
    spread = [statistics.fmean(of_one) ** 0.5 for of_one in zip(*within, strict=True)]
    weights = [1 / max(s, 1e-3) ** 2 for s in spread]
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        "held out": lambda row: row["psnr"],
        "weighted": lambda row: weighted_mean(row["photographs"], weights),
        "corrected": lambda row: row["cc_psnr"],
        "trained on": lambda row: row["trained_psnr"],
    }
    lines = [f"{'setting':10}{'runs':>5}" + "".join(f"{name:>18}" for name in measures) + f"{'SSIM':>9}"]
    first = by_setting[settings[0]]
    for name in settings:
        group = by_setting[name]
        values = {m: {row["seed"]: read(row) for row in group} for m, read in measures.items()}
        means = [
            f"{statistics.fmean(v.values()):.3f} +- {standard_error([*v.values()]):.3f}"
            for v in values.values()
        ]
        ssim = statistics.fmean(row["ssim"] for row in group)
        lines.append(f"{name:10}{len(group):5}" + "".join(f"{mean:>18}" for mean in means) + f"{ssim:9.4f}")
        if name != settings[0]:
            apart = [
                difference(values[m], {row["seed"]: read(row) for row in first})
                for m, read in measures.items()
            ]
            lines.append(f"{'':15}" + "".join(f"{text:>18}" for text in apart))
    lines.append("spread of each photograph, dB: " + " ".join(f"{s:.2f}" for s in spread))
    return lines


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """Of values whose weights need not sum to one."""
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def main() -> int:
    """Train all, print the table; 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=12, help="runs of each setting")
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--together", type=int, default=3, help="runs at a time")
    parser.add_argument("--cuts", type=int, default=4, help="processes that share a setting's seeds")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after so long with what there is"
    )
    parser.add_argument("--json", type=Path, help="file for all runs' figures")
    arguments, more = parser.parse_known_args()  # more: for caliterra.py
    arguments.end = time.monotonic() + arguments.seconds
    seeds = [arguments.first_seed + i for i in range(arguments.seeds)]
    jobs = [(name, seeds[i :: arguments.cuts]) for i in range(arguments.cuts) for name in arguments.settings]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def one(number: int) -> str:
            setting, mine = jobs[number]
            return train(setting, mine, folder / f"{setting}-{number}.json", arguments, more) if mine else ""

        with ThreadPoolExecutor(arguments.together) as pool:
            problems = [problem for problem in pool.map(one, range(len(jobs))) if problem]
        rows = read_rows(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps({"benchmark": "quality", "rows": rows}, indent=1) + "\n")
    if rows:
        print("\n".join(table(rows, arguments.settings)))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
