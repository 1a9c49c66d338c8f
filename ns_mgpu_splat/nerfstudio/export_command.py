# SPDX-License-Identifier: Apache-2.0
"""Command line `mgpu-splat-export`: a run's Gaussians to a file that other programs read. Needs no GPU and little memory."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ns_mgpu_splat.words import counted, shown_bytes

kName = "mgpu-splat-export"
kOldSpzRows = 10_000_000  # readers of .spz took no more until 2026


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=kName,
        description="Write the Gaussians of a run, from its newest checkpoint, to a file: .ply keeps everything, .spz is about a "
        "tenth of it, .splat is for simple web viewers and has plain colours. No GPU is needed, nor memory for the scene.",
        epilog="Which format for which viewer, and more on frames: docs/export.md.",
    )
    p._negative_number_matcher = re.compile(r"-(\d|\.\d|inf)")  # or -1e3 in --crop would be an option
    p.add_argument("--load-config", metavar="CONFIG.yml", type=Path, required=True,
                   help="config.yml of the run, as ns-train wrote it; its folder may have been moved")  # fmt: skip
    p.add_argument("--output", metavar="FILE.ext", type=Path, required=True,
                   help="file to write; .ply, .splat or .spz chooses the format. It appears when it is complete")  # fmt: skip
    p.add_argument("--frame", choices=("nerfstudio", "world"), default="nerfstudio",
                   help="coordinates to write: nerfstudio is what the model was trained in, with the cameras within -1 and 1; "
                   "world is the capture's own, in its unit of length (default: %(default)s)")  # fmt: skip
    p.add_argument("--y-up", action="store_true",
                   help="turn the frame so that z, which is up in Nerfstudio, becomes y: (x, y, z) is written as (x, z, -y). "
                   "Viewers of .spz and game engines expect that")  # fmt: skip
    p.add_argument("--sh-degree", metavar="D", type=int, choices=range(4), default=None,
                   help="keep view-dependent colour up to this degree, 0 to 3: a .ply has 248 bytes a Gaussian with 3, 164 with "
                   "2, 104 with 1, 68 with 0 (default: all that the run has)")  # fmt: skip
    p.add_argument("--crop", metavar=("x0", "y0", "z0", "x1", "y1", "z1"), nargs=6, type=float, default=None,
                   help="keep the Gaussians whose centres lie in this box, which is in the frame that is written; inf and -inf "
                   "leave a side open")  # fmt: skip
    p.add_argument("--max-splats", metavar="N", type=int, default=None,
                   help="keep the N Gaussians that matter most: by opacity times the area they cover")  # fmt: skip
    p.add_argument("--tile-size", metavar="S", type=float, default=None,
                   help="cut space into cubes with this side, in units of the frame, a file for each, into the folder FILE; "
                   "its index.json lists them")  # fmt: skip
    p.add_argument(
        "--overwrite", action="store_true", help="replace the file, or the folder of tiles, that is there"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 for an error told in one sentence on stderr, 130 when interrupted."""
    args = parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        print(_export(args))
    except _errors() as error:
        print(f"{kName}: {_sentence(error, args.output)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{kName}: interrupted; nothing was written.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _errors() -> tuple[type[Exception], ...]:
    from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError
    from ns_mgpu_splat.nerfstudio.saved_run import RunError

    return (CheckpointError, RunError, ValueError, OSError)


def _sentence(error: Exception, output: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or output} cannot be written: {error.strerror}."
    return str(error)


def _export(args: argparse.Namespace) -> str:
    """Export, and return the line that says so."""
    from ns_mgpu_splat.export import ExportSettings, Frame, export, target_of
    from ns_mgpu_splat.nerfstudio.saved_run import open_run

    crop: Any = None if args.crop is None else tuple(args.crop)
    options: dict[str, Any] = {
        "sh_degree": args.sh_degree,
        "crop": crop,
        "max_splats": args.max_splats,
        "tile_size": args.tile_size,
        "overwrite": args.overwrite,
    }
    form, _ = target_of(args.output, ExportSettings(**options))  # before a large checkpoint is opened
    run = open_run(args.load_config)
    frame = run.world() if args.frame == "world" else Frame()
    if args.y_up:
        frame = frame.y_up()
    settings = ExportSettings(frame=frame, antialiased=run.antialiased, **options)
    with _progress() as progress:
        done = export(run.rows, args.output, settings, progress)
    if form.suffix == ".spz" and done.files == 1 and done.count > kOldSpzRows:
        print(
            f"{kName}: readers of .spz from before 2026 take at most {kOldSpzRows:,} Gaussians of a file: for them, give "
            "--tile-size or --max-splats.",
            file=sys.stderr,
        )
    if done.misfits:
        who = f"{counted(done.misfits, 'Gaussian')} {'has' if done.misfits == 1 else 'have'}"
        print(f"{kName}: {who} {done.misfit}. The nearest one was written.", file=sys.stderr)
    return _summary(done, frame.name, frame.offset.tolist())


def _summary(done: Any, frame: str, offset: list[float]) -> str:
    left = done.selection
    dropped = [
        f"{count:,} {why}"
        for count, why in (
            (left.not_finite, "with values that are not finite"),
            (left.outside, "outside the crop box"),
            (left.unimportant, "less important"),
        )
        if count
    ]
    parts = [
        counted(done.count, "Gaussian"),
        shown_bytes(done.size),
        f"SH degree {done.sh_degree}",
        f"frame {frame}",
    ]
    if done.files > 1 or done.path.suffix == ".json":
        parts.insert(1, f"{done.files:,} tile" + ("s" if done.files > 1 else ""))
    if any(offset):
        parts.append(f"offset to add {' '.join(f'{value:.17g}' for value in offset)}")
    return f"Wrote {done.path}: {', '.join(parts)}; dropped {', '.join(dropped) or 'none'}."


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar where a person looks, nothing in a log file."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield tell


if __name__ == "__main__":
    sys.exit(main())
