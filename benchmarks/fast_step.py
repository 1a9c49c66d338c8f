# SPDX-License-Identifier: Apache-2.0
"""Time training steps on the table that peers were measured on: gsplat's garden scene, replicated on a grid.

The scene is that of gsplat's `_helper.load_test_data(scene_grid=g)` with random numbers that are the same on any device, and
random higher SH bands (0.02 sigma), seen by its first camera; images of other sizes scale its calibration. For each row of
the table:

    fwd         render() in grad mode            fwd eval    render() without a way back
    fwd+bwd     train_step() with L1 against a random image, but for Adam's step
    iter        train_step()                     iter full   with L1 + 0.2 D-SSIM, regularisers and noise

Medians of the times between events, one an iteration, no waiting in between. Then, in a process with
MGPU_STAGE_TIMES=1, each stage beside the floor that its counted work allows (research/performance.md, section 5).

    python benchmarks/fast_step.py [--rows 112k@1080p ...] [--peer gsplat] [--kernels] [--quick] [--json FILE]

With `--peer gsplat`, gsplat runs beside it, in a process of its own and in turn (ours, gsplat, ours, gsplat): of two runs
the faster median counts, and the images are compared. `--peer-site FOLDER` is where
`pip install --no-deps --target FOLDER gsplat==1.5.3` put it, if it is not the one that Python finds; it compiles its CUDA
code at its first use, about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from kernel_profile import profiled
from torch import Tensor

SH_C0 = 0.28209479177387814
COLUMNS = ("means", "quats", "scales", "opacities", "sh0", "shN")
BYTES_PER_S, LANES_PER_S = 4.3e12, 2.97e13  # of an H200: large copies; fp32 lane instructions
LR = 1e-6  # so small that the scene is the same in the last iteration
NOISE_LR, REGULARISER = 0.1, 0.01
TILE = 16
DRAWS = 1 << 25  # random numbers at a time


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    grid: int
    scale: float
    width: int
    height: int
    goal_ms: float
    """Of `iter`, from the issue "The fast step"."""
    forward_goal_ms: float
    """Faster-GS's forward pass."""


ROWS = {
    "112k@420p": Row(1, 1.0, 648, 420, 0.7, 0.429),
    "112k@1080p": Row(1, 1.0, 1920, 1244, 1.2, 0.606),
    "2.8M@1080p": Row(5, 1.0, 1920, 1244, 2.4, 1.081),
    "9M@1080p": Row(9, 0.5, 1920, 1244, 4.0, 1.727),
    "9M@4K": Row(9, 0.5, 3840, 2489, 5.5, 1.781),
    "49M@4K": Row(21, 0.5, 3840, 2489, 13.0, 4.403),
}


# ---- the scene


def hashed(places: Tensor, stream: int) -> Tensor:
    """Uniform numbers in (0, 1) from their places (int64) alone (splitmix64), so that they are the same on any device."""

    def mixed(z: Tensor, shift: int, factor: int) -> Tensor:
        return z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)

    z = (places + (stream << 40)).mul_(-0x61C8864680B583EB)
    z = mixed(mixed(z, 30, -0x40A7B892E31B1A47), 27, -0x6B2FB644ECCEEE15)
    return ((z >> 40).bitwise_and_(0xFFFFFF).float() + 0.5).mul_(2.0**-24)


def draws(first: int, count: int, stream: int, device: torch.device) -> Tensor:
    """`hashed` of consecutive places."""
    return hashed(torch.arange(first, first + count, device=device), stream)


def fill_uniform(out: Tensor, stream: int) -> None:
    """Fill with uniform numbers in (0, 1), some millions at a time."""
    for first in range(0, out.numel(), DRAWS):
        part = out.view(-1)[first : first + DRAWS]
        part.copy_(draws(first, len(part), stream, out.device))


def fill_normal(out: Tensor, stream: int) -> None:
    """Fill with normal numbers, of the streams `stream` and `stream` + 1 (Box and Muller)."""
    for first in range(0, out.numel(), DRAWS):
        part = out.view(-1)[first : first + DRAWS]
        u, v = (draws(first, len(part), stream + i, out.device) for i in range(2))
        part.copy_(u.log_().mul_(-2.0).sqrt_().mul_(v.mul_(2.0 * math.pi).cos_()))


class Garden:
    """The points of the file inside [-2, 2]^3, and its first camera."""

    def __init__(self) -> None:
        folder = os.environ.get("MGPU_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
        path = Path(folder) / "garden" / "test_garden.npz"
        if not path.is_file():
            raise SystemExit(
                f"{path} is absent. Set MGPU_TEST_DATA to a folder with garden/test_garden.npz (gsplat's)."
            )
        data = np.load(path)
        means = torch.from_numpy(data["means3d"]).float()
        inside = ((means >= -2) & (means <= 2)).all(-1)
        self.means = means[inside]
        self.sh0 = ((torch.from_numpy(data["colors"] / 255.0).float() - 0.5) / SH_C0)[inside]
        self.viewmat = torch.from_numpy(data["viewmats"][0]).float()
        self.calibration = torch.from_numpy(data["Ks"][0]).float()
        self.size = int(data["width"]), int(data["height"])

    def rows(self, grid: int) -> int:
        """Rows of the scene replicated grid x grid times."""
        return len(self.means) * grid * grid

    def scaled(self, width: int, height: int) -> Tensor:
        """The calibration of an image of this size."""
        stretch = torch.tensor([width / self.size[0], height / self.size[1], 1.0])
        return self.calibration * stretch[:, None]

    def fill(self, columns: dict[str, Tensor], grid: int, scale: float) -> None:
        """Write the replicated scene into `columns`, on their device, without copies of all rows."""
        device, points = columns["means"].device, len(self.means)
        means, sh0 = self.means.to(device), self.sh0.to(device)
        fill_uniform(columns["scales"], 1)
        columns["scales"].mul_(0.02 * scale).clamp_min_(1e-9).log_()
        fill_normal(columns["quats"], 2)
        columns["quats"].div_(columns["quats"].norm(dim=-1, keepdim=True))
        fill_uniform(columns["opacities"], 4)
        columns["opacities"].clamp_(1e-6, 1 - 1e-6).logit_()
        fill_normal(columns["shN"], 5)
        columns["shN"].mul_(0.02)
        offsets = 4.0 * (torch.arange(grid) - grid // 2).float()
        for x in range(grid):
            for y in range(grid):
                at = slice((x * grid + y) * points, (x * grid + y + 1) * points)
                offset = torch.stack([offsets[x], offsets[y], torch.zeros(())]).to(device)
                torch.add(means, offset, out=columns["means"][at])
                columns["sh0"][at].copy_(sh0)


def random_target(row: Row) -> Tensor:
    """The image that L1 compares with, float32 on the CPU."""
    return torch.rand(row.height, row.width, 3, generator=torch.Generator().manual_seed(1))


# ---- timing


class Clock:
    """Times on the GPU between events; on the host where there is none."""

    def __init__(self, device: str, on_gpu: bool, quick: bool) -> None:
        self.device, self.on_gpu, self.quick = device, on_gpu, quick
        self.wait: Callable[[], None] = getattr(torch, device).synchronize

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def median_ms(self, run: Callable[[], object]) -> float:
        """Median time of `run` in milliseconds, warm; at least 30 runs, or 10 if they were to be quick."""
        least, seconds = (10, 0.05) if self.quick else (30, 0.25)
        start = time.perf_counter()
        for _ in range(2 if self.quick else 5):
            run()
        self.wait()
        one = (time.perf_counter() - start) / (2 if self.quick else 5)
        count = min(1000, max(least, int(seconds / one)))
        marks = [self._mark()]
        for _ in range(count):
            run()
            marks.append(self._mark())
        self.wait()
        pairs = itertools.pairwise(marks)
        if self.on_gpu:
            return statistics.median(a.elapsed_time(b) for a, b in pairs)
        return statistics.median((b - a) * 1e3 for a, b in pairs)


def checksum(columns: dict[str, Tensor]) -> float:
    """Of what is random in the scene, so that two processes can see that they made the same."""
    names = ("scales", "quats", "opacities", "shN")
    parts = [columns[name][-1000:].double().abs().sum().item() for name in names]
    return float(sum(parts))


# ---- ours


class Mgpu:
    """This project's side: scene, optimizer and the calls that are timed."""

    def __init__(self, quick: bool) -> None:
        import ns_mgpu_splat

        ns_mgpu_splat.init()
        self.mgpu = vars(torch)["mgpu"]
        self.shards = list(self.mgpu.mesh().shards)
        self.clock = Clock("mgpu", self.shards[0].startswith("cuda"), quick)
        self.garden = Garden()
        self.made: tuple[int, float] | None = None
        self.table: Any = None
        self.adam: Any = None

    def prepare(self, row: Row) -> None:
        """Have the row's scene; the one of the row before is kept if it is the same."""
        from ns_mgpu_splat import Camera, SplatTable
        from ns_mgpu_splat.splats.optimizer import SplatAdam

        if self.made != (row.grid, row.scale):
            self.table = self.adam = None
            self.mgpu.empty_cache()
            rows = self.garden.rows(row.grid)
            self.table = SplatTable(rows, sh_degree=3).requires_grad_(True)
            columns = {name: column.detach() for name, column in self.table.named_columns().items()}
            self.garden.fill(columns, row.grid, row.scale)
            self.checksum = checksum(columns)
            self.adam = SplatAdam(self.table, dict.fromkeys(COLUMNS, LR), report_means=False)
            self.made = (row.grid, row.scale)
        calibration = self.garden.scaled(row.width, row.height)
        self.camera = Camera.from_K(self.garden.viewmat, calibration, row.width, row.height)
        target = random_target(row)
        self.targets = {
            "L1": target.to("mgpu"),
            "full": (target * 255).round().to(torch.uint8).to("mgpu"),
        }

    def forward(self) -> Any:
        """One render."""
        from ns_mgpu_splat import render

        return render(self.table, self.camera, optimizer=self.adam, depth=False)[0]

    def _choose(self, objective: str) -> float:
        """Regularisers and noise are part of the full objective; returns D-SSIM's weight."""
        full = objective == "full"
        self.adam.opacity_reg = self.adam.scale_reg = REGULARISER if full else 0.0
        self.adam.noise_lr = NOISE_LR if full else 0.0
        return 0.2 if full else 0.0

    def iteration(self, objective: str, *, step: bool = True) -> None:
        """One training step; without `step`, its gradients are forgotten."""
        from ns_mgpu_splat import train_step

        target, weight = self.targets[objective], self._choose(objective)
        train_step(self.table, self.adam, self.camera, target, ssim_weight=weight, accumulate=not step)
        if not step:
            self.adam.zero_pending()

    def peak_mb(self, run: Callable[[], object]) -> float:
        """Largest memory during `run` above what was there before, over all shards."""
        self.clock.wait()
        before = self.mgpu.memory_stats()["shards"]
        self.mgpu.reset_peak_memory_stats()
        run()
        self.clock.wait()
        after = self.mgpu.memory_stats()["shards"]
        return sum(a["peak"] - b["allocated"] for a, b in zip(after, before, strict=True)) / 1e6

    def times(self, row: Row) -> dict[str, Any]:
        """The row's figures."""
        self.prepare(row)
        with torch.no_grad():
            evaluation = self.clock.median_ms(self.forward)
        result: dict[str, Any] = {
            "fwd": self.clock.median_ms(self.forward),
            "fwd eval": evaluation,
            "fwd+bwd": self.clock.median_ms(partial(self.iteration, "L1", step=False)),
            "iter": self.clock.median_ms(partial(self.iteration, "L1")),
            "iter full": self.clock.median_ms(partial(self.iteration, "full")),
        }
        result["peak_mb"] = self.peak_mb(partial(self.iteration, "L1", step=False))
        result["peak_iter_mb"] = self.peak_mb(partial(self.iteration, "full"))
        return result | self.counts(row)

    def counts(self, row: Row) -> dict[str, Any]:
        """What the row's view is made of."""
        frame = self.forward().rgb.grad_fn.frame
        counts, (lit, patches) = frame.counts(), frame.pair_counts()
        return {
            "rows": self.table.num_rows,
            "visible": sum(counts["visible"]),
            "pairs": sum(counts["intersections"]),
            "pixels": row.width * row.height,
            "lit": lit,
            "tested": 32 * patches,
            "checksum": self.checksum,
            "shards": self.shards,
        }

    def image(self, row: Row) -> np.ndarray:
        """The row's picture, of the scene before any training."""
        self.made = None
        self.prepare(row)
        return self.forward().rgb.detach().cpu().numpy()

    def stages(self, row: Row) -> dict[str, Any]:
        """Median milliseconds by stage, for both objectives, step by step; wants MGPU_STAGE_TIMES=1."""
        from ns_mgpu_splat.splats.loss import l1_ssim_loss

        self.prepare(row)
        result: dict[str, Any] = {}
        for objective in ("L1", "full"):
            lists: dict[str, list[float]] = {}

            def timed(stage: str, run: Callable[[], Any], lists: dict[str, list[float]] = lists) -> Any:
                self.clock.wait()
                start = time.perf_counter()
                value = run()
                self.clock.wait()
                lists.setdefault(stage, []).append((time.perf_counter() - start) * 1e3)
                return value

            weight = self._choose(objective)
            for _ in range(5 if self.clock.quick else 15):
                rgb = self.forward().rgb
                loss = timed("loss", partial(l1_ssim_loss, rgb, self.targets[objective], ssim_weight=weight))
                loss.backward()
                for stage, seconds in self.adam.pending[-1].times():
                    lists.setdefault(stage, []).append(seconds * 1e3)
                del rgb, loss
                timed("step", self.adam.step)
            result[objective] = {stage: statistics.median(times[3:]) for stage, times in lists.items()}
        return {"stages": result} | self.counts(row)

    def kernels(self, row: Row) -> dict[str, Any]:
        """Of one iteration of the full objective: milliseconds and launches of each kernel, and calls that wait for the GPU.

        The wait after the last of five iterations is in it, too: a fifth of a call.
        """
        rounds = 5

        def work() -> None:
            for _ in range(rounds):
                self.iteration("full")
            self.clock.wait()

        self.prepare(row)
        for _ in range(3):
            self.iteration("full")
        self.clock.wait()
        found = profiled(work, rounds)
        kernels = [{"kernel": k.name, "ms": k.ms, "launches": k.launches} for k in found.kernels]
        return {"kernels": kernels, "waits": found.waits}


# ---- gsplat


class Gsplat:
    """gsplat on plain CUDA: activations outside the graph and one tensor of SH coefficients, which is its best case."""

    def __init__(self, quick: bool) -> None:
        import gsplat
        from gsplat.cuda._backend import _C

        if _C is None:
            raise SystemExit("gsplat's CUDA code did not build; set TORCH_CUDA_ARCH_LIST and CUDA_HOME")
        self.version = gsplat.__version__
        self.clock = Clock("cuda", True, quick)
        self.garden = Garden()
        self.made: tuple[int, float] | None = None
        self.parameters: Any = None
        self.adam: Any = None

    def prepare(self, row: Row) -> None:
        """Have the row's scene."""
        if self.made != (row.grid, row.scale):
            self.parameters = self.adam = None
            torch.cuda.empty_cache()
            rows = self.garden.rows(row.grid)
            shapes = [(rows, 3), (rows, 4), (rows, 3), (rows,), (rows, 3), (rows, 15, 3)]
            columns = {
                name: torch.empty(shape, device="cuda") for name, shape in zip(COLUMNS, shapes, strict=True)
            }
            self.garden.fill(columns, row.grid, row.scale)
            self.checksum = checksum(columns)
            sh = torch.cat([columns.pop("sh0")[:, None], columns.pop("shN")], dim=1)
            columns["scales"].exp_()
            columns["opacities"].sigmoid_()
            self.parameters = [
                torch.nn.Parameter(columns[name]) for name in ("means", "quats", "scales", "opacities")
            ]
            self.parameters.append(torch.nn.Parameter(sh))
            self.adam = torch.optim.Adam(self.parameters, lr=LR, eps=1e-15, fused=True)
            self.made = (row.grid, row.scale)
        self.row = row
        self.viewmats = self.garden.viewmat[None].cuda()
        self.calibrations = self.garden.scaled(row.width, row.height)[None].cuda()
        self.target = random_target(row).cuda()

    def forward(self) -> Tensor:
        """One render, [H, W, 3]; packed where the dense layout does not fit."""
        from gsplat import rasterization

        means, quats, scales, opacities, sh = self.parameters
        images, _, _ = rasterization(
            means,
            quats,
            scales,
            opacities,
            sh,
            self.viewmats,
            self.calibrations,
            self.row.width,
            self.row.height,
            sh_degree=3,
            packed=self.row.grid > 9,
        )
        return images[0]

    def forward_backward(self) -> None:
        """L1 walked back into `.grad`."""
        (self.forward() - self.target).abs().mean().backward()
        self.adam.zero_grad(set_to_none=True)

    def iteration(self) -> None:
        """One training step with dense Adam."""
        (self.forward() - self.target).abs().mean().backward()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def times(self, row: Row) -> dict[str, Any]:
        """The row's figures."""
        self.prepare(row)
        result: dict[str, Any] = {
            "fwd": self.clock.median_ms(self.forward),
            "fwd+bwd": self.clock.median_ms(self.forward_backward),
            "iter": self.clock.median_ms(self.iteration),
        }
        self.clock.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward_backward()
        self.clock.wait()
        result["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        return result | {"checksum": self.checksum, "version": self.version}

    def image(self, row: Row) -> np.ndarray:
        """The row's picture, of the scene before any training."""
        self.made = None
        self.prepare(row)
        return self.forward().detach().cpu().numpy()


# ---- processes

MARK = "@@ "  # begins a line of an answer; libraries print other lines


def serve(side: str, quick: bool) -> None:
    """A worker: one question a line on stdin, one answer a line on stdout."""
    server: Any = Gsplat(quick) if side == "gsplat" else Mgpu(quick)
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        row = ROWS[question["row"]]
        if question["what"] == "image":
            np.save(question["file"], server.image(row))
            answer: dict[str, Any] = {}
        else:
            answer = getattr(server, question["what"])(row)
        print(MARK + json.dumps(answer), flush=True)


class Worker:
    """A process that answers for one side."""

    def __init__(self, side: str, quick: bool, **environment: str) -> None:
        command = [sys.executable, __file__, "--worker", side, *(["--quick"] if quick else [])]
        self.side = side
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Of the latest question; the first is that it is ready."""
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        for line in out:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
            print(f"[{self.side}] {line}", end="", file=sys.stderr)
        raise RuntimeError(f"the process of {self.side} ended with exit code {self.process.wait()}")

    def ask(self, what: str, row: str, **more: str) -> dict[str, Any]:
        """Ask and wait."""
        start = time.monotonic()
        try:
            return self._ask(what, row, **more)
        finally:
            print(f"[{self.side}] {what} of {row}: {time.monotonic() - start:.1f} s", file=sys.stderr)

    def _ask(self, what: str, row: str, **more: str) -> dict[str, Any]:
        question: IO[str] = self.process.stdin  # type: ignore[assignment]
        question.write(json.dumps({"what": what, "row": row, **more}) + "\n")
        question.flush()
        return self.answer()

    def end(self) -> None:
        """Let it go."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on a file meanwhile."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def floors(counts: dict[str, Any], objective: str) -> dict[str, tuple[float, float]]:
    """Bytes and lane instructions that each stage cannot avoid: research/performance.md, section 5."""
    rows, visible, pairs, pixels = (counts[name] for name in ("rows", "visible", "pairs", "pixels"))
    full = objective == "full"
    lit, tested = (
        counts["lit"],
        counts["tested"],
    )  # pairs of pixel and record that contribute, or in whose patch one does
    return {
        "project": (48 * rows + (192 + 48) * visible, 450 * visible),
        "bin": (68 * visible + 26 * pairs, 0),
        "blend": (4 * pairs + 40 * visible + 20 * pixels, 13 * tested + 8 * lit),
        "loss": ((27 if full else 36) * pixels, 560 * pixels if full else 20 * pixels),
        "blend_backward": (4 * pairs + 136 * visible + 32 * pixels, 13 * tested + 45 * lit),
        "step": (1464 * visible, 1400 * visible),
    }


def show_times(results: dict[str, Any]) -> None:
    """The table's rows, one a line."""
    print(
        f"{'':11s} {'rows':>11s} {'visible':>10s} {'pairs':>11s} {'fwd':>7s} {'eval':>7s} {'f+b':>7s} {'iter':>7s}"
        f" {'goal':>5s} {'full':>7s} {'peak MB':>8s}"
    )
    for name, result in results.items():
        if "times" not in result:
            continue
        runs = [result["times"], *([result["again"]] if "again" in result else [])]
        t = runs[0] | {
            part: min(run[part] for run in runs)
            for part in ("fwd", "fwd eval", "fwd+bwd", "iter", "iter full")
        }
        print(
            f"{name:11s} {t['rows']:11,d} {t['visible']:10,d} {t['pairs']:11,d} {t['fwd']:7.3f} {t['fwd eval']:7.3f}"
            f" {t['fwd+bwd']:7.3f} {t['iter']:7.3f} {ROWS[name].goal_ms:5.1f} {t['iter full']:7.3f} {t['peak_mb']:8.0f}"
        )
        if "peers" in result:
            peer = result["peers"][0] | {
                part: min(run[part] for run in result["peers"]) for part in ("fwd", "fwd+bwd", "iter")
            }
            ratio = ", ".join(f"{part} {peer[part] / t[part]:.2f}x" for part in ("fwd", "fwd+bwd", "iter"))
            print(
                f"{'':11s} gsplat {peer['version']}: fwd {peer['fwd']:.3f}, f+b {peer['fwd+bwd']:.3f}, iter"
                f" {peer['iter']:.3f} ms, peak {peer['peak_mb']:.0f} MB; its time / ours: {ratio}"
            )
        if "image" in result:
            print(f"{'':11s} pixels within 2e-3 of gsplat's: {100 * result['image']:.3f} %")


def show_stages(results: dict[str, Any]) -> None:
    """Stages of each row: milliseconds, what they cannot avoid, the quotient, and the bytes that a floor counts."""
    for name, result in results.items():
        if "stages" not in result:
            continue
        for objective, stages in result["stages"]["stages"].items():
            limits = floors(result["stages"], objective)
            parts = []
            for stage, milliseconds in sorted(stages.items(), key=lambda part: -part[1]):
                if stage in limits:
                    moved, lanes = limits[stage]
                    floor = 1e3 * max(moved / BYTES_PER_S, lanes / LANES_PER_S)
                    parts.append(
                        f"{stage} {milliseconds:.3f}/{floor:.3f}={milliseconds / floor:.1f} ({moved / 1e6:.1f} MB)"
                    )
                elif milliseconds > 0.02:
                    parts.append(f"{stage} {milliseconds:.3f}")
            print(f"{name} {objective}: {'  '.join(parts)}")


def measure(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Start the sides and ask them row by row; `results` fills up meanwhile."""
    sides: dict[str, tuple[str, dict[str, str]]] = {}
    if "times" in arguments.only:
        sides["times"] = ("mgpu", {})
        if arguments.peer:
            sides["peer"] = (arguments.peer, peer_environment(arguments.peer_site))
    if "stages" in arguments.only:
        sides["stages"] = ("mgpu", {"MGPU_STAGE_TIMES": "1"})
    if arguments.kernels:
        sides["kernels"] = ("mgpu", {})
    workers = {part: Worker(side, arguments.quick, **more) for part, (side, more) in sides.items()}
    for worker in workers.values():
        worker.answer()
    results |= {name: {} for name in arguments.rows}
    with locked(arguments.lock), tempfile.TemporaryDirectory() as folder:
        peer = workers.pop("peer", None)
        for part, worker in workers.items():
            for name, result in results.items():
                result[part] = worker.ask(part, name)
                if part == "times" and peer:
                    beside_peer(name, result, worker, peer, Path(folder))
            worker.end()  # its memory is free for the next
        if peer:
            peer.end()


def peer_environment(site: Path | None) -> dict[str, str]:
    """Where Python finds the peer, and the one architecture that it needs to compile for."""
    more = {}
    if site:
        more["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    if torch.cuda.is_available() and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        more["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability(0))
    return more


def beside_peer(name: str, result: dict[str, Any], worker: Worker, peer: Worker, folder: Path) -> None:
    """How many pixels of the untrained scene agree, and the peer's times and ours in turn."""
    files = [folder / "ours.npy", folder / "theirs.npy"]
    for side, file in zip((worker, peer), files, strict=True):
        side.ask("image", name, file=str(file))
    ours, theirs = (np.load(file) for file in files)
    result["image"] = float((np.abs(ours - theirs).max(-1) <= 2e-3).mean())
    result["peers"] = [peer.ask("times", name)]
    result["again"] = worker.ask("times", name)
    result["peers"].append(peer.ask("times", name))
    if abs(result["peers"][0]["checksum"] / result["times"]["checksum"] - 1) > 1e-5:
        raise RuntimeError(f"{name}: the two sides did not make the same scene")


def show(result: dict[str, Any]) -> None:
    """Print all of it."""
    print(f"{result['gpu']}, torch {result['torch']}, {result['date']}; milliseconds, medians")
    show_times(result["rows"])
    print("stages: milliseconds / floor = quotient (bytes that the stage has to move)")
    show_stages(result["rows"])
    for name, row in result["rows"].items():
        if "kernels" in row:
            kernels = row["kernels"]["kernels"]
            waits = ", ".join(f"{call} {count:.1f}" for call, count in row["kernels"]["waits"].items())
            print(
                f"{name}: {sum(k['launches'] for k in kernels):.0f} kernels and copies an iteration; waits: {waits}"
            )
            for kernel in kernels[:40]:
                print(f"  {kernel['ms']:8.4f} ms  {kernel['launches']:5.1f}  {kernel['kernel'][:150]}")


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows of the table")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["times", "stages"],
        default=["times", "stages"],
        help="parts of the measurement, or none",
    )
    parser.add_argument("--peer", choices=["gsplat"], help="measure it too, in turn A B A B")
    parser.add_argument("--peer-site", type=Path, help="folder that holds the peer's package")
    parser.add_argument("--kernels", action="store_true", help="each kernel's time, by torch.profiler")
    parser.add_argument(
        "--quick", action="store_true", help="10 iterations of each kind instead of 30 and more"
    )
    parser.add_argument("--lock", type=Path, help="hold this file's lock while the GPU is used")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--worker", choices=["mgpu", "gsplat"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.quick)
        return
    rows: dict[str, Any] = {}
    result = {
        "benchmark": "fast_step",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "rows": rows,
    }
    try:
        measure(arguments, rows)
    finally:  # what there is
        show(result)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
