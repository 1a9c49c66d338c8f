# SPDX-License-Identifier: Apache-2.0
"""`make demo`: make a small city, train on it with `ns-train`, score it, export it: the user's own commands."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """What the demo makes; the defaults end in well under ten minutes on 2 cores."""

    output: Path
    images: int = 120
    size: str = "320x240"
    blocks: int = 2
    steps: int = 4000
    max_gaussians: int = 60_000


def _tool(name: str) -> str:
    """A console script of this environment, whether or not its folder is on PATH."""
    return str(Path(sys.executable).parent / name)


def _run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join([Path(words[0]).name, *words[1:]])}", flush=True)
    interrupted = False
    with subprocess.Popen(words) as process:
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                # the terminal told the command, too, which saves what it has before it ends
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)


def _scores(config: Path, target: Path, *flags: str) -> list[dict]:
    command = [
        sys.executable,
        "-m",
        "ns_mgpu_splat.nerfstudio.evaluate",
        "--load-config",
        str(config),
        "--json",
        str(target),
    ]
    subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
    return json.loads(target.read_text())


def _mean(scores: list[dict], prefix: str = "") -> float:
    values = [score["psnr"] for score in scores if score["name"].startswith(prefix)]
    return sum(values) / len(values)


def run(settings: DemoSettings) -> None:
    """Run the demo; raises subprocess.CalledProcessError when one of the commands fails (it has said why)."""
    start = time.monotonic()
    out = settings.output
    city = out / "city"
    _run(_tool("mgpu-splat-city"), city, "--blocks", str(settings.blocks), "--images", str(settings.images),
         "--size", settings.size, "--overwrite")  # fmt: skip
    made = time.monotonic()
    _run(_tool("ns-train"), "mgpu-splat", "--data", city, "--output-dir", out / "runs", "--experiment-name", "city",
         "--timestamp", "demo", "--vis", "tensorboard", "--max-num-iterations", str(settings.steps),
         "--schedule-steps", str(settings.steps),
         "--pipeline.model.max-gaussians", str(settings.max_gaussians))  # fmt: skip
    trained = time.monotonic()
    config = out / "runs" / "city" / "mgpu-splat" / "demo" / "config.yml"
    print("\nScoring the held-out pictures, for the seed points and for the trained model", flush=True)
    before = _scores(config, out / "scores_untrained.json", "--untrained")
    after = _scores(config, out / "scores.json")
    splats = out / "splat.ply"
    splats.unlink(missing_ok=True)  # of an earlier demo
    # ns-export, which would want open3d and its system library
    exporter = [sys.executable, "-m", "ns_mgpu_splat.nerfstudio.exporter"]
    _run(*exporter, "gaussian-splat", "--load-config", config, "--output-dir", out)
    if not splats.is_file():
        raise SystemExit(f"demo: ns-export ended without writing {splats}; its output above says why.")
    end = time.monotonic()
    print(
        f"\ncity {made - start:.0f} s, training {trained - made:.0f} s, scores and export {end - trained:.0f} s"
    )
    print(f"PSNR, held-out: aerial {_mean(after, 'aerial'):.2f} dB, street {_mean(after, 'street'):.2f} dB; "
          f"seed points alone {_mean(before):.2f} dB")  # fmt: skip
    if sys.prefix != sys.base_prefix:
        print(f"the commands live in a virtual environment: source {Path(sys.prefix, 'bin', 'activate')}")
    print(f"held-out PSNR: {_mean(after):.2f} dB")
    print(f"Gaussians: {splats}")
    print(f"viewer: ns-viewer --load-config {shlex.quote(str(config))}")


def main() -> None:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help="folder for everything the demo writes"
    )
    parser.add_argument("--steps", type=int, default=DemoSettings.steps, help="training steps")
    parser.add_argument("--images", type=int, default=DemoSettings.images, help="pictures of the city")
    arguments = parser.parse_args()
    try:
        run(DemoSettings(output=arguments.output, steps=arguments.steps, images=arguments.images))
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"demo: {Path(error.cmd[0]).name} ended with exit code {error.returncode}; its output above says why."
        )
    except KeyboardInterrupt:
        print("demo: stopped. What was trained is saved, and the lines above say how to go on; the demo itself starts anew.",
              file=sys.stderr)  # fmt: skip
        sys.exit(130)


if __name__ == "__main__":
    main()
