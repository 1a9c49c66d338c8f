# SPDX-License-Identifier: Apache-2.0
"""One line of numbers while training: step, loss, PSNR, Gaussians, memory of each shard, steps a second, time left."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from nerfstudio.configs.base_config import LocalWriterConfig
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName, LocalWriter
from tyro.conf import Suppress

from ns_mgpu_splat.nerfstudio.open_line import OpenLine

kLineEvery = 10.0  # seconds between lines that stay, where the output is no terminal
kHeldOut, kAllHeldOut = "Eval Images Metrics/psnr", "Eval Images Metrics Dict (all images)/psnr"


@dataclass
class ProgressWriterConfig(LocalWriterConfig):
    """The progress line."""

    _target: type = field(default_factory=lambda: ProgressWriter)
    """Class that prints the line."""
    enable: bool = True
    """Print a line of numbers while training; off prints nothing between start and end."""
    stats_to_track: Suppress[tuple[EventName, ...]] = ()
    max_log_size: Suppress[int] = 0


class ProgressWriter(LocalWriter):
    """Rewrites one line in a terminal, which other output ends; in a log file it writes one now and then."""

    def __init__(self, config: ProgressWriterConfig, banner_messages: list[str] | None = None) -> None:
        super().__init__(config, banner_messages)
        self.latest: dict[str, float] = {}
        self.measured: dict[str, int] = {}  # the steps that these are of
        self.last_line = 0.0
        self.finished = False
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.open_line = OpenLine()
        if banner_messages:
            print(*banner_messages, sep="\n")

    def write_stats_log(self, step: int) -> None:
        """Take in the stored events and print where the step is one that logs."""
        for event in writer.EVENT_STORAGE:
            name, value, of_step = event["name"], event["event"], int(event["step"])
            step = max(step, of_step)  # Nerfstudio hands over the oldest event's: 0 when a run is resumed
            entries = (
                {f"{name}/{key}": entry for key, entry in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            self.latest.update(entries)
            self.measured.update(dict.fromkeys(entries, of_step))
        # of the last step `finish` says the numbers, once; Nerfstudio counts the time of the whole run to the step behind it
        if self.finished or step + 1 >= int(writer.GLOBAL_BUFFER["max_iter"]):
            return
        if step % writer.GLOBAL_BUFFER["steps_per_log"]:
            return
        now = time.monotonic()
        if self.terminal:
            self.open_line.rewrite(self.line(step))
        elif now - self.last_line >= kLineEvery or step == 0:
            self.last_line = now
            print(self.line(step), flush=True)

    def finish(self, step: int) -> None:
        """Say the last line, once: no other one is printed after it.

        It has no steps a second, which would be those of the latest steps: the trainer then says those of the whole run.
        """
        if self.latest and not self.finished:
            if self.terminal:
                self.open_line.rewrite(self.line(step, rate=False))
            else:
                print(self.line(step, rate=False), flush=True)
        self.open_line.end()
        self.finished = True

    def line(self, step: int, rate: bool = True) -> str:
        """The numbers of a step, in a fixed order; those that are not known yet are left out, and of what was measured before, at
        which step is said. `rate`: with steps a second and time left."""

        def known(name: str, text: str) -> str | None:
            value = self.latest.get(name)
            return None if value is None else text.format(float(value))

        memory = [
            float(value)
            for name, value in sorted(self.latest.items())
            if name.startswith("Train Metrics Dict/memory_mib/")
        ]
        last = int(writer.GLOBAL_BUFFER["max_iter"])
        seconds = self.latest.get(EventName.ETA.value) if rate else None
        of_step = self.measured.get("Train Loss", step)

        def held_out(name: str, what: str) -> str | None:
            of = self.measured.get(name, step)
            return known(name, what + " {:.2f} dB" + f" (step {of + 1:,})" * (of != of_step))

        parts = [
            f"step {step + 1:,}/{last:,}",
            None if of_step == step else f"at step {of_step + 1:,}:",
            known("Train Loss", "loss {:.4f}"),
            known("Train Metrics Dict/psnr", "PSNR {:.2f} dB"),
            known("Train Metrics Dict/gaussian_count", "{:,.0f} Gaussians"),
            "memory " + " + ".join(f"{used:,.0f}" for used in memory) + " MiB" if memory else None,
            known("Train Iter / Sec", "{:.2f} steps/s") if rate else None,
            held_out(kHeldOut, "one held-out view"),
            held_out(kAllHeldOut, "all held-out views"),
            None if seconds is None else f"{_clock(float(seconds))} left",
        ]
        return "  ".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    minutes, whole = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
