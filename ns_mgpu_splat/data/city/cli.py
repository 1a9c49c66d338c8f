# SPDX-License-Identifier: Apache-2.0
"""Command line `mgpu-splat-city`."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ns_mgpu_splat.data.city.dataset import CityError, CityOptions, Progress, write_city


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[xX](\d+)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is not WIDTHxHEIGHT, such as 800x600")
    return int(match[1]), int(match[2])


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    d = CityOptions()
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="mgpu-splat-city",
        description="Build a procedural town and write it as a Nerfstudio dataset (pictures from the air and from the street, "
        "depth maps, a seed cloud), as Gaussians sampled from its surfaces, or both.",
        epilog="One world unit is ten metres. Depth maps are 16 bit, 1/1000 of a world unit a step, 0 for the sky.",
    )
    p.add_argument("out", metavar="OUT", type=Path, help="folder to write; must be empty or missing")
    p.add_argument(
        "--blocks",
        metavar="B",
        type=int,
        default=d.blocks,
        help="built-up blocks of 48 x 36 m (default: %(default)s)",
    )
    p.add_argument(
        "--images", metavar="N", type=int, default=None,
        help=f"pictures, half of them from the air (default: {d.images}; with --splats: none)",
    )  # fmt: skip
    p.add_argument(
        "--size",
        metavar="WxH",
        type=_size,
        default=(d.width, d.height),
        help=f"pixels of a picture (default: {d.width}x{d.height})",
    )
    p.add_argument(
        "--seed",
        metavar="S",
        type=int,
        default=d.seed,
        help="another seed, another town (default: %(default)s)",
    )
    p.add_argument(
        "--splats",
        metavar="N",
        type=int,
        default=None,
        help="write N Gaussians to OUT/splats.ply; needs no open3d unless --images is given",
    )
    p.add_argument(
        "--overwrite", action="store_true", help="replace the files of an earlier town in OUT; others stay"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 for an error told in one sentence on stderr, 130 when interrupted."""
    from ns_mgpu_splat.data.city.raycast import RaycastUnavailable

    args = parser().parse_args(argv)
    images = args.images if args.images is not None else (0 if args.splats else CityOptions.images)
    try:
        width, height = args.size
        options = CityOptions(args.blocks, images, width, height, args.seed, args.splats or 0)
        with _progress() as progress:
            files = write_city(args.out, options, overwrite=args.overwrite, progress=progress)
    except (CityError, RaycastUnavailable) as error:
        print(f"mgpu-splat-city: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"mgpu-splat-city: {error.filename or args.out} cannot be written: {error.strerror or error}.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("mgpu-splat-city: interrupted; nothing was written.", file=sys.stderr)
        return 130
    if options.images:
        print(
            f"Wrote {options.images} pictures of {options.blocks} blocks to {args.out}; train on them with:"
        )
        print(f"  ns-train mgpu-splat --data {shlex.quote(str(args.out))}")
    if "splats.ply" in files:
        print(f"Wrote {options.splats:,} Gaussians to {args.out / 'splats.ply'}.")
    return 0


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar where rich is installed (Nerfstudio has it), none elsewhere."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield None
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, object] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield tell


if __name__ == "__main__":
    sys.exit(main())
