# SPDX-License-Identifier: Apache-2.0
"""How fast photographs become pixels for training: decoded, rescaled, undistorted, by threads, and through the cache.

    python benchmarks/images.py [--size 3840x2160] [--images 24] [--json FILE]

Core milliseconds are the processor time of this process, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from ns_mgpu_splat.data.cache import BoundedCache
from ns_mgpu_splat.data.images import ImageSource
from ns_mgpu_splat.data.lens import Lens, Pinhole
from ns_mgpu_splat.nerfstudio.datamanager import Picture, epoch_order, read_picture


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """A picture with detail at every scale, which compresses as photographs do (about 2 bits a pixel at quality 90)."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(8):
        side = (max(2, width >> octave), max(2, height >> octave))
        noise = rng.normal(0, 1, (side[1], side[0], 3)).astype(np.float32)
        pixels += (
            np.stack(
                [
                    np.asarray(
                        Image.fromarray(noise[..., c]).resize((width, height), Image.Resampling.BILINEAR)
                    )
                    for c in range(3)
                ],
                axis=-1,
            )
            * 1.5**octave
        )
    return Image.fromarray((128 + 45 * pixels / pixels.std()).clip(0, 255).astype(np.uint8))


def measure(run: Callable[[], object], images: int) -> tuple[float, float]:
    """Core milliseconds an image, and images a second."""
    cores, wall = time.process_time(), time.perf_counter()
    run()
    return (time.process_time() - cores) / images * 1e3, images / (time.perf_counter() - wall)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="3840x2160")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    full = Pinhole(width, height, 0.8 * width, 0.8 * width, width / 2, height / 2)
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for number in range(4):
            picture = photograph(width, height, number)
            for suffix, options in ((".jpg", {"quality": 90}), (".png", {"compress_level": 4})):
                files[number, suffix] = Path(folder) / f"{number}{suffix}"
                picture.save(files[number, suffix], **options)  # type: ignore[arg-type]
        size = files[0, ".jpg"].stat().st_size * 8 / (width * height)
        print(f"{arguments.size}, JPEG of {size:.1f} bits a pixel, {os.cpu_count()} cores")

        def sources(suffix: str, camera: Pinhole, lens: Lens) -> list[ImageSource]:
            return [ImageSource(files[i % 4, suffix], None, camera, lens) for i in range(arguments.images)]

        kinds = {
            "JPEG": (".jpg", full, Lens()),
            "PNG": (".png", full, Lens()),
            "JPEG, half size": (".jpg", full.scaled(width // 2, height // 2), Lens()),
            "JPEG, undistorted (OPENCV)": (".jpg", full, Lens("opencv", (-0.1, 0.02))),
            "JPEG, undistorted (FOV)": (".jpg", full, Lens("fov", (0.6,))),
        }
        for name, kind in kinds.items():
            wanted = sources(*kind)
            read_picture(wanted[0])
            for threads in sorted({1, os.cpu_count() or 1}):
                with ThreadPoolExecutor(threads) as pool:
                    found = measure(lambda p=pool, w=wanted: list(p.map(read_picture, w)), len(wanted))  # type: ignore[misc]
                rows.append((f"{name}, {threads} threads", *found))

        # three epochs with room for half of the images
        wanted, count = sources(*kinds["JPEG"]), arguments.images
        order = np.concatenate([epoch_order(42, epoch, count) for epoch in range(5)])
        now = [0]

        def next_use(indices: np.ndarray) -> np.ndarray:
            return np.array([int(np.flatnonzero(order[now[0] + 1 :] == i)[0]) for i in indices])

        threads = os.cpu_count() or 1
        cache: BoundedCache[Picture] = BoundedCache(
            lambda i: read_picture(wanted[i]),
            lambda p: p.nbytes,
            count // 2 * width * height * 3,
            threads,
            next_use,
        )

        def train() -> None:
            for step in range(3 * count):
                now[0] = step
                cache.prefetch(order[step + 1 : step + 1 + 2 * threads].tolist())
                cache.get(int(order[step]))

        rows.append(("JPEG, cache for half of them", *measure(train, 3 * count)))
        cache.close()
    print(f"\n{'':34}{'core ms an image':>18}{'images/s':>12}")
    for name, milliseconds, rate in rows:
        print(f"{name:34}{milliseconds:18.1f}{rate:12.1f}")
    if arguments.json:
        written = [{"what": n, "core_ms": m, "images_per_s": r} for n, m, r in rows]
        arguments.json.write_text(json.dumps({"size": arguments.size, "rows": written}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
