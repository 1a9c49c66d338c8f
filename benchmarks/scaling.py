# SPDX-License-Identifier: Apache-2.0
"""What several GPUs are worth: one table, from data that it makes itself, on as many GPUs as there are.

    python benchmarks/scaling.py [--only PART ...] [--gpus 1 2 4] [--quick] [--seconds S] [--virtual] [--json FILE]

Parts, each a process of its own for each number of GPUs, with a limit of time, so that one that fails leaves the others'
rows:

    links         who reaches whose memory, bandwidth of copies and of kernels' reads, forking and joining, moving pages
    strong        milliseconds a step at 1 camera and at as many cameras as GPUs: towns of --millions, from the air and from
                  the street, and with --gardens gsplat's garden replicated (49.3 M: 21)
    stages        the same by stage (the host waits around each: compare stages, not sums), bytes over the links, and the
                  kernels' time in sum over the GPUs, which --virtual shows as well: what several can gain at most
    equality      images, gradients and one step against one GPU
    caliterra     500 steps on real photographs (in $MGPU_TEST_DATA), for some seeds
    weak          100 M Gaussians a GPU
    largest       the most Gaussians that train for 20 steps; largest-half: with 16 bits

Layouts of rows, in strong and stages: placed, ns-train's "space", in Hilbert order in one piece a GPU; striped, its
"stripes", where stretches of that order go to the GPUs in turn; unsorted, in equal chunks.

Numbers of GPUs that need few run beside others on GPUs of their own. --virtual: shards on one GPU; without a GPU the meshes
are cpu:G and sizes small. Towns are those of `mgpu-splat-city --splats`, made on the device. One GPU times the batches of
all others, so that a speed-up compares equal work.
"""

from __future__ import annotations

import argparse
import json
import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from scaling_parts import PARTS, STEP_LR, environment_of

Row = dict[str, Any]
MARK = "@@ "  # begins a line of an answer; libraries print other lines
ESTIMATES = {
    **{"links": 2, "strong": 8, "stages": 8, "equality": 4, "caliterra": 10},
    **{"weak": 8, "largest": 10, "largest-half": 10},
}  # seconds on GPUs, with what is left of the whole: a part that does not fit is left out
PREPARE_LIMIT = 240.0  # seconds for imports and towns
SPEED_UPS = {2: 1.8, 4: 3.4, 8: 7.0}  # targets at one camera, 49.3 M
FEWER_BYTES = 5.0  # target: unsorted / placed
IMAGE_TOLERANCE, GRADIENT_TOLERANCE = 0.0, 1e-4  # design.md: another mesh, same flavour
PSNR_TOLERANCE = 0.05
NOT_OPTIONS = ("json", "logs", "worker", "shards")
SMALL = {
    "millions": [0.02],
    "gardens": [],
    "size": [160, 104],
    "views": 2,
    "weak_millions": 0.02,
    "equality_millions": 0.02,
    "largest_millions": 0.1,
    "caliterra_steps": 20,
    "downscale": 8,
    "seeds": [42],
}  # without a GPU


# ---- the worker


def serve(part: str, shards: int) -> None:
    """Options, then the mesh, each a line on stdin; rows, a line each on stdout."""
    options = json.loads(sys.stdin.readline())
    work = PARTS[part](options, shards)
    import ns_mgpu_splat

    work.prepare()
    print(MARK + '{"ready": true}', flush=True)
    line = sys.stdin.readline()
    if not line:  # not wanted any more
        return
    mesh = json.loads(line)
    take_gpus(mesh)
    heard = logging.handlers.BufferingHandler(100)
    logging.getLogger("ns_mgpu_splat").addHandler(heard)
    logging.getLogger("ns_mgpu_splat").setLevel(logging.INFO)
    ns_mgpu_splat.init()
    if mesh["gpus"]:
        memory = [record.getMessage() for record in heard.buffer if record.name == "ns_mgpu_splat"]
        answer = {"machine": torch.cuda.get_device_name(), "memory": "; ".join(memory)}
        print(MARK + json.dumps(answer), flush=True)
    for row in work.run():
        print(MARK + json.dumps(row), flush=True)
    sys.stderr.flush()
    os._exit(0)  # the system takes the memory back faster than Python does


def take_gpus(mesh: Row) -> None:
    """Set the mesh, and let CUDA see its GPUs alone; if some import has woken CUDA already, go by their numbers."""
    os.environ["MGPU_DEVICES"] = mesh["devices"]
    if not mesh["gpus"]:
        return
    former = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mesh["visible"])
    if torch._C._cuda_getDeviceCount() == len(mesh["gpus"]):  # the runtime's count, not NVML's
        return
    if former is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = former
    os.environ["MGPU_DEVICES"] = ",".join(str(mesh["gpus"][int(i)]) for i in mesh["devices"].split(","))
    torch.cuda.set_device(mesh["gpus"][0])


# ---- the schedule


@dataclass
class Task:
    """One part on one number of GPUs."""

    part: str
    shards: int
    process: subprocess.Popen[str] | None = None
    gpus: list[int] = field(default_factory=list)
    ready: bool = False
    since: float = 0.0
    """When the process was started or, later, given its GPUs."""
    limit: float = PREPARE_LIMIT
    timed_out: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.part} G={self.shards}"


class Schedule:
    """Runs tasks in order, several at a time where GPUs are free; `rows` and `problems` fill up meanwhile."""

    def __init__(self, options: argparse.Namespace, gpus: list[int], logs: Path, folder: Path) -> None:
        self.options, self.logs, self.folder = options, logs, folder
        self.kind = "virtual" if options.virtual and gpus else ("cuda" if gpus else "cpu")
        self.free = set(gpus) if self.kind == "cuda" else {gpus[0] if gpus else 0}
        self.visible = visible_gpus()
        self.start = time.monotonic()
        self.machine, self.memory = "no GPU", ""
        self.rows: list[Row] = []
        self.problems: list[Row] = []
        self.events: queue.Queue[tuple[Task, Row | None]] = queue.Queue()
        self.comparing = ThreadPoolExecutor(1)
        self.compared: list[Future[None]] = []

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)

    def left(self) -> float:
        """Seconds left."""
        return self.options.seconds - (time.monotonic() - self.start)

    def run(self, tasks: list[Task]) -> None:
        """All of them."""
        waiting, active = list(tasks), list[Task]()
        ahead = self.options.ahead
        while waiting or active:
            for task in waiting[: 1 + ahead]:
                if task.process is None:
                    self.begin(task)
            while waiting and waiting[0].ready and self.needed(waiting[0]) <= len(self.free):
                task = waiting.pop(0)
                if self.go(task):
                    active.append(task)
            try:
                task, row = self.events.get(timeout=0.2)
                if row is None:
                    self.ended(task)
                    (active if task in active else waiting).remove(task)
                elif row.get("ready"):
                    task.ready = True
                elif "machine" in row:
                    self.machine, self.memory = str(row["machine"]), str(row["memory"])
                else:
                    self.note(task, row)
            except queue.Empty:
                pass
            for task in [*active, *waiting]:
                if task.process is None or task.timed_out or (task.ready and task in waiting):
                    continue
                if time.monotonic() - task.since > task.limit:
                    task.timed_out = True
                    task.process.kill()
        for future in self.compared:
            future.result()

    def needed(self, task: Task) -> int:
        """GPUs that it takes from the others."""
        return task.shards if self.kind == "cuda" else 1

    def begin(self, task: Task) -> None:
        """Start the process, which imports and prepares."""
        log = (self.logs / f"{task.part}-{task.shards}.txt").open("w")
        command = [sys.executable, __file__, "--worker", task.part, "--shards", str(task.shards)]
        task.process = subprocess.Popen(
            command,
            env={**os.environ, **environment_of(task.part)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        task.since = time.monotonic()
        options = {**vars(self.options), "json": None, "logs": None, "folder": str(self.folder)}
        self.send(task, options)
        threading.Thread(target=self.listen, args=(task, log), daemon=True).start()

    def send(self, task: Task, message: Any) -> None:
        """A line to its stdin; that it may have died, `listen` will tell."""
        pipe: IO[str] = task.process.stdin  # type: ignore[union-attr, assignment]
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except BrokenPipeError:
            pass

    def listen(self, task: Task, log: IO[str]) -> None:
        """Rows to the queue, other lines to the log; None at the end."""
        for line in task.process.stdout or ():  # type: ignore[union-attr]
            if line.startswith(MARK):
                self.events.put((task, json.loads(line[len(MARK) :])))
            else:
                log.write(line)
                log.flush()
        task.process.wait()  # type: ignore[union-attr]
        log.close()
        self.events.put((task, None))

    def go(self, task: Task) -> bool:
        """Give it its GPUs, or send it home if time is short."""
        task.since, estimate = time.monotonic(), ESTIMATES[task.part]
        if self.left() < (estimate if self.kind == "cuda" else 1):
            self.leave_out(task, f"{self.left():.0f} s left, about {estimate} needed")
            task.process.stdin.close()  # type: ignore[union-attr]
            task.limit = 10.0
            return True  # it ends by itself
        task.limit = min(self.options.limit, self.left())
        order = sorted(self.free, reverse=task.shards == 1)
        task.gpus = order[: self.needed(task)]
        self.free -= set(task.gpus)
        gpus = [] if self.kind == "cpu" else task.gpus
        devices = ",".join(str(i % len(gpus)) for i in range(task.shards)) if gpus else f"cpu:{task.shards}"
        mesh = {"devices": devices, "gpus": gpus, "visible": [self.visible[gpu] for gpu in gpus]}
        self.say(f"{task.name}: {f'GPU {gpus}, ' if gpus else ''}mesh {devices}")
        self.send(task, mesh)
        return True

    def leave_out(self, task: Task, reason: str, case: str = "") -> None:
        """Say so, and keep it."""
        self.problems.append({"part": task.part, "shards": task.shards, "case": case, "left_out": reason})
        self.say(f"{f'{task.name} {case}'.strip()} left out: {reason}")

    def note(self, task: Task, row: Row) -> None:
        """A row has come."""
        row = {"part": task.part, "shards": task.shards} | row
        if "left_out" in row:
            self.leave_out(task, str(row["left_out"]), str(row["case"]))
            return
        self.rows.append(row)
        self.say(f"{task.name} {line_of(row)}")

    def ended(self, task: Task) -> None:
        """The process is over: its GPUs are free, and if it failed its last words are kept."""
        self.free |= set(task.gpus)
        code = task.process.returncode  # type: ignore[union-attr]
        spent = time.monotonic() - task.since
        if code == 0 and not task.timed_out:
            if task.gpus:
                self.say(f"{task.name} done in {spent:.1f} s")
        else:
            log = self.logs / f"{task.part}-{task.shards}.txt"
            words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            what = f"stopped after {spent:.0f} s" if task.timed_out else f"exit code {code}"
            failed = f"{what}: {words[-1][:400] if words else 'no words'} (log: {log})"
            self.problems.append({"part": task.part, "shards": task.shards, "failed": failed})
            self.say(f"{task.name} FAILED: {failed}")
            for line in words[-12:]:
                print(f"    {line[:240]}", flush=True)
        if task.part == "equality":
            self.compared.append(self.comparing.submit(self.compare))

    def compare(self) -> None:
        """Files of equality against those of one shard, as soon as both are there; each once."""
        rows = [row for row in self.rows if row["part"] == "equality" and "file" in row]
        ones = {row["layout"]: row for row in rows if row["shards"] == 1}
        for row in rows:
            one = ones.get(row["layout"])
            if row["shards"] != 1 and one and "equal" not in row:
                a, b = (torch.load(r["file"], mmap=True) for r in (one, row))
                row |= differences(a, b)
                if row["layout"].startswith("step"):
                    row["equal"] = row["moment"] <= GRADIENT_TOLERANCE
                else:
                    row["equal"] = row["image"] <= IMAGE_TOLERANCE and row["gradient"] <= GRADIENT_TOLERANCE
                self.say(f"equality G={row['shards']} {line_of(row)}")
                Path(row["file"]).unlink()


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        return [name for name in text.split(",") if name]
    return [str(gpu) for gpu in range(torch.cuda.device_count())]


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Row:
    """Largest difference by kind of tensor: of images, and as a share of the tensor's largest value of gradients and moments;
    of parameters the share of elements that differ by more than a hundredth of a step."""
    out: Row = {}
    for name, a in one.items():
        b, kind = other[name], name.split()[0]
        if a.numel() == 0:
            continue
        off = (a - b).abs()
        if kind == "image":
            value = float(off.max())
            out["pixels_off"] = out.get("pixels_off", 0) + int((off.amax(-1) > 0).sum())
            out["covered"] = min(out.get("covered", 1.0), float(a[..., 4].mean()))
        elif kind == "parameter":
            value = float((off > 0.01 * STEP_LR).double().mean())
        elif kind == "loss":
            value = float(off)
        else:
            value = float(off.max()) / max(float(a.abs().max()), 1e-30)
        out[kind] = max(out.get(kind, 0.0), value)
        if value != value:
            out[kind] = float("inf")
    return out


# ---- the table


def line_of(row: Row) -> str:
    """A row in one line of progress."""
    parts = [str(row[name]) for name in ("case", "kind", "layout") if name in row]
    if "batch" in row:
        parts.append(f"batch {row['batch']}")
    shown = {
        "ms": "ms",
        "links_mb": "MB over links",
        "imbalance": "imbalance",
        "visible": "visible",
        "make_s": "s to make",
        "reorder_s": "s to sort",
        "psnr": "dB",
        "image": "image off",
        "gradient": "gradient off",
        "moment": "moment off",
        "parameter": "of parameters off",
    }
    parts += [f"{row[name]:,.6g} {unit}" for name, unit in shown.items() if name in row]
    if "case" in row and row["part"] == "links":
        parts += [f"{name} {value}" for name, value in row.items() if name not in ("part", "shards", "case")]
    if "stages" in row:
        parts.append(" ".join(f"{stage} {ms:.3f}" for stage, ms in row["stages"].items()))
    return ", ".join(parts)


def of_part(rows: list[Row], part: str) -> list[Row]:
    """Rows of a part."""
    return [row for row in rows if row["part"] == part]


def groups(rows: list[Row], *names: str) -> dict[tuple[Any, ...], dict[int, Row]]:
    """By the values of these names, then by number of shards; in the order in which they came."""
    out: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        out.setdefault(tuple(row[name] for name in names), {})[row["shards"]] = row
    return out


def show_strong(rows: list[Row]) -> list[str]:
    """Milliseconds, speed-up, bytes, balance, memory; and the targets."""
    found = of_part(rows, "strong")
    if not found:
        return []
    out = [
        "",
        "strong scaling; homes: rows that a GPU projects, largest over mean",
    ]
    out.append(
        f"{'scene':16}{'image':>10} {'view':8}{'batch':>6}{'G':>3} {'layout':8}{'ms':>10}{'speed-up':>10}{'MB links':>10}"
        f"{'remote':>8}{'balance':>9}{'homes':>7}{'misplaced MiB':>14}{'visible M':>10}{'peak GiB a GPU':>16}"
    )
    verdicts = []
    ones = groups([row for row in found if row["shards"] == 1], "case", "size", "kind", "batch")
    for key, by_shards in groups(found, "case", "size", "kind", "batch", "layout").items():
        case, size, kind, batch, layout = key
        for shards, row in sorted(by_shards.items()):
            one = ones.get(key[:4], {}).get(1)
            speed = one["ms"] / row["ms"] if one else float("nan")
            out.append(
                f"{case:16}{size:>10} {kind:8}{batch:6d}{shards:3d} {layout:8}{row['ms']:10.3f}{speed:9.2f}x"
                f"{row['links_mb']:10.2f}{100 * row['remote_share']:6.1f} %{row['imbalance']:9.3f}"
                f"{row['home_imbalance']:7.2f}{row.get('misplaced_mib', 0.0):14.1f}{row['visible'] / 1e6:10.2f}"
                f"{max(row['peak']):16.2f}"
            )
            target = SPEED_UPS.get(shards)
            if target and one and batch == 1 and "49.3M" in case:
                verdict = "met" if speed >= target else "MISSED"
                verdicts.append(
                    f"speed-up of {case}, {kind}, {layout}, on {shards}: {speed:.2f}x, target {target}x: {verdict}"
                )
    return out + verdicts


def show_stages(rows: list[Row]) -> list[str]:
    """Milliseconds by stage, and bytes of unsorted rows against placed ones."""
    found = of_part(rows, "stages")
    if not found:
        return []
    out = ["", "stages, ms (the host waits around each); home: rows projected by a GPU, largest over mean"]
    names = list(dict.fromkeys(stage for row in found for stage in row["stages"]))
    heads = "".join(f"{name:>15}" for name in names)
    out.append(f"{'scene':16}{'view':8}{'batch':>6} {'layout':9}{'G':>3}{heads}{'home':>8}")
    for (case, kind, batch, layout), by_shards in groups(found, "case", "kind", "batch", "layout").items():
        for shards, row in sorted(by_shards.items()):
            times = "".join(f"{row['stages'].get(name, 0.0):15.3f}" for name in names)
            out.append(
                f"{case:16}{kind:8}{batch:6d} {layout:9}{shards:3d}{times}{row['home_imbalance']:8.2f}"
            )
    out += ["", "MB over the links in a step: unsorted rows in equal chunks, against other orders"]
    out.append(
        f"{'scene':16}{'view':8}{'batch':>6}{'G':>3}{'unsorted':>10} {'layout':9}{'MB':>9}{'fewer':>8}{'records':>9}"
        f"{'remote':>16}{'balance':>9}"
    )
    unsorted = groups([row for row in found if row["layout"] == "unsorted"], "case", "kind", "batch")
    others = groups([row for row in found if row["layout"] != "unsorted"], "case", "kind", "batch", "layout")
    for key, by_shards in others.items():
        for shards, row in sorted(by_shards.items()):
            before = unsorted.get(key[:3], {}).get(shards)
            if shards == 1 or before is None:
                continue
            fewer = before["links_mb"] / max(1e-9, row["links_mb"])
            travelled = [r["records_mb"] + r["gradients_mb"] for r in (before, row)]
            verdict = "met" if fewer >= FEWER_BYTES else f"MISSED: {FEWER_BYTES:g}x"
            out.append(
                f"{key[0]:16}{key[1]:8}{key[2]:6d}{shards:3d}{before['links_mb']:10.2f} {key[3]:9}{row['links_mb']:9.2f}"
                f"{fewer:7.2f}x{travelled[0] / max(1e-9, travelled[1]):8.2f}x{100 * before['remote_share']:6.1f}, "
                f"{100 * row['remote_share']:4.1f} %{row['imbalance']:9.3f}  {verdict if key[3] == 'placed' else ''}"
            )
    return out


def show_work(rows: list[Row]) -> list[str]:
    """Kernels' time and the host's, which are the same whether shards are apart or on one GPU."""
    found = [row for row in of_part(rows, "stages") if "kernels_ms" in row]
    if not found:
        return []
    out = [
        "",
        "work of a step in sum over its GPUs; at most: the speed-up if all have as much of it and nothing waits",
        f"{'scene':16}{'view':8}{'batch':>6} {'layout':9}{'G':>3}{'kernels ms':>12}{'at most':>9}{'launches':>10}{'host ms':>9}",
    ]
    ones = groups(
        [row for row in found if row["shards"] == 1 and row["layout"] == "placed"], "case", "kind", "batch"
    )
    for (case, kind, batch, layout), by_shards in groups(found, "case", "kind", "batch", "layout").items():
        for shards, row in sorted(by_shards.items()):
            one = ones.get((case, kind, batch), {}).get(1)
            most = f"{shards * one['kernels_ms'] / row['kernels_ms']:8.2f}x" if one else f"{'':9}"
            out.append(
                f"{case:16}{kind:8}{batch:6d} {layout:9}{shards:3d}{row['kernels_ms']:12.3f}{most}{row['launches']:10.0f}"
                f"{row['host_ms']:9.3f}"
            )
    return out


def show_weak(rows: list[Row]) -> list[str]:
    """Milliseconds and efficiency: time of one GPU with one camera over that of G with G."""
    found = of_part(rows, "weak")
    if not found:
        return []
    out = ["", f"weak scaling: {found[0]['case']}; efficiency: 1 GPU, 1 camera against G GPUs, G cameras"]
    out.append(
        f"{'view':8}{'batch':>6}{'G':>3}{'Gaussians':>14}{'ms':>10}{'efficiency':>12}{'MB links':>10}{'peak GiB a GPU':>16}"
    )
    by_kind = groups(found, "kind", "batch")
    for (kind, batch), by_shards in by_kind.items():
        for shards, row in sorted(by_shards.items()):
            one = by_kind.get((kind, 1), {}).get(1)
            efficiency = f"{100 * one['ms'] / row['ms']:10.0f} %" if one and batch == shards else f"{'':12}"
            out.append(
                f"{kind:8}{batch:6d}{shards:3d}{row['rows']:14,d}{row['ms']:10.3f}{efficiency}{row['links_mb']:10.2f}"
                f"{max(row['peak']):16.2f}"
            )
    return out


def show_rest(rows: list[Row]) -> list[str]:
    """Links, the largest tables, equality and caliterra."""
    out: list[str] = []
    for row in of_part(rows, "links"):
        if row["case"] == "peers":
            out += ["", f"links, G = {row['shards']}"]
        out.append("  " + line_of(row))
    found = of_part(rows, "largest") + of_part(rows, "largest-half")
    if found:
        out += ["", "the most Gaussians that trained for 20 steps"]
    for row in found:
        out.append(
            f"  {row['case']:6}G = {row['shards']}: {row['rows']:,}, {row['bytes_a_row']} bytes each in the table, "
            f"{row['used_bytes_a_row']:.0f} of the cards'; {row['ms']:.1f} ms a step"
        )
    compared = [row for row in of_part(rows, "equality") if "equal" in row]
    if compared:
        out += [
            "",
            "against one GPU: largest difference (of gradients and moments as a share of the largest value)",
        ]
    for row in compared:
        out.append(f"  G = {row['shards']}: {line_of(row)}: {'equal' if row['equal'] else 'NOT EQUAL'}")
    return out + show_caliterra(of_part(rows, "caliterra"))


def show_caliterra(rows: list[Row]) -> list[str]:
    """PSNR by seed, and what the means differ by."""
    if not rows:
        return []
    out = ["", f"caliterra, {rows[0]['steps']} steps"]
    means: dict[int, float] = {}
    for shards in sorted({row["shards"] for row in rows}):
        scores = [row["psnr"] for row in rows if row["shards"] == shards]
        means[shards] = sum(scores) / len(scores)
        line = f"  G = {shards}: {', '.join(f'{score:.2f}' for score in scores)} dB, mean {means[shards]:.2f}"
        line += f", seeds' spread {max(scores) - min(scores):.2f}"
        if shards > 1 and 1 in means:
            off = means[shards] - means[1]
            line += f"; against one {off:+.3f}: {'within' if abs(off) <= PSNR_TOLERANCE else 'NOT within'} {PSNR_TOLERANCE}"
        out.append(line)
    return out


def show(result: Row) -> str:
    """The whole table."""
    rows = result["rows"]
    out = [
        f"{result['machine']}, torch {result['torch']}, {result['date']}, meshes {result['meshes']}",
        *([result["memory"]] if result["memory"] else []),
    ]
    out += show_strong(rows) + show_stages(rows) + show_work(rows) + show_weak(rows) + show_rest(rows)
    for problem in result["problems"]:
        name = f"{problem['part']} G={problem['shards']} {problem.get('case', '')}".strip()
        out.append(f"{name}: {problem.get('failed') or 'left out: ' + problem['left_out']}")
    return "\n".join(out)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts, in this order")
    p.add_argument(
        "--gpus", type=int, nargs="+", help="numbers of GPUs; default: those of 1, 2, 4, 8 that there are"
    )
    p.add_argument("--quick", action="store_true", help="fewer steps for each figure")
    p.add_argument("--seconds", type=float, default=1e9, help="leave out what does not fit into so many")
    p.add_argument("--limit", type=float, default=90.0, help="seconds after which a part is ended")
    p.add_argument("--virtual", action="store_true", help="all shards on the first GPU")
    p.add_argument("--millions", type=float, nargs="*", help="Gaussians of strong scaling (2.79 49.3 200)")
    p.add_argument(
        "--gardens",
        type=int,
        nargs="*",
        help="sides of grids of gardens, in $MGPU_TEST_DATA (none; 21: 49.3 M)",
    )
    p.add_argument(
        "--half-above",
        type=float,
        default=100.0,
        help="millions above which strong scaling takes half tables",
    )
    p.add_argument("--views", type=int, help="timed for each figure (16; quick 8)")
    p.add_argument(
        "--size", type=lambda text: [int(side) for side in text.split("x")], help="of all images, WxH"
    )
    p.add_argument("--weak-millions", type=float, help="a GPU (100)")
    p.add_argument("--equality-millions", type=float, help="(1)")
    p.add_argument("--largest-millions", type=float, help="at most, whatever the cards have free")
    p.add_argument("--caliterra-steps", type=int, help="(500)")
    p.add_argument("--downscale", type=int, help="of caliterra's images (1)")
    p.add_argument("--seeds", type=int, nargs="+", help="of caliterra (42 43 44)")
    p.add_argument(
        "--ahead", type=int, help="processes that import and prepare while others run (3; without a GPU 0)"
    )
    p.add_argument("--logs", type=Path, help="folder for what each part prints; default: a temporary one")
    p.add_argument("--json", type=Path, help="file for the figures")
    p.add_argument("--worker", choices=list(PARTS), help=argparse.SUPPRESS)
    p.add_argument("--shards", type=int, help=argparse.SUPPRESS)
    return p


def main() -> int:
    """Measure, print, and write JSON if asked; 1 if a part failed or a mesh is not equal to one GPU."""
    options = parser().parse_args()
    if options.worker:
        serve(options.worker, options.shards)
        return 0
    gpus = list(range(torch.cuda.device_count()))
    large = {
        "millions": [2.79, 49.3, 200.0],
        **{
            "gardens": [],
            "size": None,
            "weak_millions": 100.0,
            "equality_millions": 1.0,
            "largest_millions": None,
        },
        **{"caliterra_steps": 500, "downscale": 1, "seeds": [42, 43, 44]},
    }
    for name, value in (large if gpus else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.gpus is None:
        options.gpus = [g for g in (1, 2, 4, 8) if options.virtual or not gpus or g <= len(gpus)]
    if options.ahead is None:
        options.ahead = 3 if gpus else 0
    absent = [g for g in options.gpus if gpus and not options.virtual and g > len(gpus)]
    if absent:
        raise SystemExit(f"--gpus {absent[0]}, but torch sees {len(gpus)}; --virtual puts all shards on one.")
    order = sorted(options.gpus, reverse=True)
    with tempfile.TemporaryDirectory() as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        schedule = Schedule(options, gpus, logs, Path(temporary))
        result: Row = {
            "benchmark": "scaling",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "machine": schedule.machine,
            "meshes": schedule.kind,
            "options": {name: value for name, value in vars(options).items() if name not in NOT_OPTIONS},
            "rows": schedule.rows,
            "problems": schedule.problems,
        }
        try:
            schedule.run([Task(part, shards) for part in options.only for shards in order])
        finally:  # what there is
            result |= {"machine": schedule.machine, "memory": schedule.memory}
            print(show(result), flush=True)
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    wrong = [row for row in schedule.rows if row.get("equal") is False]
    return 1 if wrong or any("failed" in problem for problem in schedule.problems) else 0


if __name__ == "__main__":
    sys.exit(main())
