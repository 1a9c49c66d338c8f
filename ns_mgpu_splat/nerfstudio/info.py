# SPDX-License-Identifier: Apache-2.0
"""Command line `mgpu-splat-info`: what a run's newest checkpoint holds, and where it would lie on this mesh. No GPU needed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ns_mgpu_splat.words import counted, shown_bytes

if TYPE_CHECKING:
    from torch import Tensor

kName = "mgpu-splat-info"
kSample = 1 << 20  # rows from which the box of most Gaussians is taken
kLeftOut = 0.005  # share of rows that this box leaves out at each end of each axis
kPageBytes = 2 << 20
kPaths = ("config", "checkpoint", "picture")


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=kName,
        description="Say what a run's newest checkpoint holds: Gaussians, extent, voxels, memory, and which shard would be home "
        "to how much of it on this machine (MGPU_DEVICES chooses the shards). No GPU is needed.",
        epilog="Lengths are in the frame that the model was trained in (z up); docs/partition.md says what the terms mean.",
    )
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("config", metavar="CONFIG.yml", type=Path, nargs="?",
                       help="config.yml of the run, as ns-train wrote it; its folder may have been moved")  # fmt: skip
    which.add_argument("--load-config", metavar="CONFIG.yml", type=Path, dest="config_too",
                       help="the same, as for the other tools")  # fmt: skip
    p.add_argument("--picture", metavar="FILE.png", type=Path,
                   help="also draw the scene from above, coloured by home shard")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print JSON instead of lines for people")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 1 for an error told in one sentence on stderr."""
    from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError
    from ns_mgpu_splat.nerfstudio.saved_run import RunError
    from ns_mgpu_splat.nerfstudio.say import say_facts

    args = parser().parse_args(argv)
    try:
        run = Run(args.config or args.config_too)
        info = run.describe()
        if args.picture is not None:
            run.draw(args.picture)
            info["picture"] = str(args.picture)
    except (CheckpointError, RunError, ValueError) as error:
        print(f"{kName}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{kName}: {error.filename or args.picture}: {error.strerror or error}.", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(info, indent=1))
    else:
        say_facts(facts_of(info), whole=kPaths)
    return 0


class Run:
    """A run's newest checkpoint, its means on the device as a table of its size would lie there."""

    def __init__(self, config: Path) -> None:
        """Raises RunError or CheckpointError, in one sentence; SystemExit where `mgpu` cannot be had."""
        from ns_mgpu_splat.nerfstudio import checkpoint
        from ns_mgpu_splat.nerfstudio.device import start_device
        from ns_mgpu_splat.nerfstudio.names import kColumnOf
        from ns_mgpu_splat.nerfstudio.saved_run import open_run

        if config.is_dir() and (config / "config.yml").is_file():
            config = config / "config.yml"
        self.run = run = open_run(config)
        self.config, self.checkpoint = run.config, run.checkpoint
        self.state = checkpoint.read(run.checkpoint)
        pipeline = self.state["pipeline"]
        self.columns: dict[str, Tensor] = {
            column: pipeline.get(f"_model.gauss_params.{name}", pipeline.get(f"_model.{name}"))
            for name, column in kColumnOf.items()
        }
        start_device(announce=False)
        self.layout = self._layout()
        self.order = self._order()
        self.table = self._table()

    def _layout(self) -> Any:
        """How training would lay rows out on this mesh."""
        from ns_mgpu_splat.nerfstudio.device import run_layout

        layout = self.run.model_option("layout", Literal["auto", "space", "stripes"], "auto")
        return run_layout(layout, self.run.model_option("reorder_decay", float, 1.5))

    def _order(self) -> Any:
        """What the checkpoint says of the order of its rows. Raises CheckpointError if this version does not understand it."""
        from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError, strategy_of
        from ns_mgpu_splat.partition.order import RowOrder

        order = RowOrder(layout=self.layout)
        strategy = strategy_of(self.state, self.checkpoint) or {}
        try:
            order.load_state_dict(strategy.get("order") or {})
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Checkpoint {self.checkpoint} says of the order of its rows what this version of ns-mgpu-splat does not "
                f"understand ({error}). Upgrade ns-mgpu-splat, if a newer one wrote it."
            ) from None
        return order

    def _table(self) -> Any:
        """A table of the checkpoint's size with its means, dealt to the shards as training would begin with it."""
        from ns_mgpu_splat.partition.placement import Placement, PlacementSettings
        from ns_mgpu_splat.splats.table import SplatTable

        table = SplatTable(self.rows, sh_degree=self.sh_degree, half=self.half)
        table.write_rows(0, {"means": self.columns["means"]})
        Placement(PlacementSettings(layout=self.layout)).update(table)
        return table

    @property
    def rows(self) -> int:
        """Gaussians."""
        return int(self.columns["means"].shape[0])

    @property
    def sh_degree(self) -> int:
        """Of the view-dependent colour."""
        return round((self.columns["shN"].shape[1] + 1) ** 0.5) - 1

    @property
    def half(self) -> bool:
        """Whether colours of higher degrees are in 16 bits."""
        return self.columns["shN"].element_size() == 2

    def shards(self) -> list[dict[str, Any]]:
        """Of each shard of this mesh: its name, the Gaussians it would be home to, and pages of the table's columns."""
        import torch

        from ns_mgpu_splat.nerfstudio.device import shard_names

        names = shard_names()
        pages = np.zeros(len(names), np.int64)
        for column in self.table.columns():
            if column.numel():
                homes = torch.mgpu.placement(column.detach()).numpy()  # type: ignore[attr-defined]
                pages += np.bincount(homes[homes >= 0], minlength=len(names))
        return [
            {"name": name, "gaussians": end - begin, "pages": int(count)}
            for name, (begin, end), count in zip(names, self.table.homes, pages, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """All that the command says, as plain values; no NaN. `facts_of` says the same under the same names."""
        schedule, trained_on = self.state.get("schedule_steps"), self.state.get("shards")
        shards = self.shards()
        pages = sum(shard["pages"] for shard in shards)
        return {
            "config": str(self.config),
            "checkpoint": str(self.checkpoint),
            "step": int(self.state["step"]) + 1,
            "schedule": schedule if isinstance(schedule, int) else None,
            "gaussians": self.rows,
            "colours": {"sh_degree": self.sh_degree, "half": self.half},
            "memory": self._memory(),
            "lengths": {"capture_units": self._capture_units()},
            **self._extents(),
            **self._partition(),
            "layout": self._layout_of_rows(),
            "pages": {"number": pages, "mib": pages * kPageBytes >> 20},
            "shards": shards,
            "trained_on": list(map(str, trained_on)) if isinstance(trained_on, (list, tuple)) else None,
        }

    def _capture_units(self) -> float | None:
        """How many of the capture's units of length one of the scene's is; None where the run does not say."""
        from ns_mgpu_splat.nerfstudio.saved_run import RunError

        try:
            return self.run.world().scale
        except RunError:
            return None

    def _memory(self) -> dict[str, int]:
        """Bytes on the device of a Gaussian: its columns, and its optimizer state (two moments of each value, and a step);
        and of all of them."""
        values = sum(column[:1].numel() if self.rows else 0 for column in self.columns.values())
        render = sum(column[:1].nbytes if self.rows else 0 for column in self.columns.values())
        train = values * ((2 if self.half else 4) + 4) + 4 if self.rows else 0
        each = render + train
        return {
            "bytes_per_gaussian": each,
            "to_render": render,
            "to_train": train,
            "in_all": each * self.rows,
        }

    def _extents(self) -> dict[str, dict[str, list[float]] | None]:
        """Boxes of the finite means, for each axis its two ends: of all, and of nearly all."""
        means = self.columns["means"]
        low, high = np.full(3, np.inf), np.full(3, -np.inf)
        for piece in means.split(1 << 22):
            values = piece.float().numpy()
            values = values[np.isfinite(values).all(1)]
            if len(values):
                low, high = np.minimum(low, values.min(0)), np.maximum(high, values.max(0))
        if not np.isfinite(low).all():
            return {"extent": None, "extent_of_99_percent": None}
        sample = means[:: max(1, -(-self.rows // kSample))].double().numpy()
        most = np.quantile(sample[np.isfinite(sample).all(1)], [kLeftOut, 1 - kLeftOut], axis=0)
        return {
            name: dict(zip("xyz", np.stack(box, axis=1).tolist(), strict=True))
            for name, box in (("extent", (low, high)), ("extent_of_99_percent", (most[0], most[1])))
        }

    def _partition(self) -> dict[str, Any]:
        """The grid in use with voxels of some hundreds of Gaussians, and the order of rows."""
        from ns_mgpu_splat.partition.summary import summarise

        found = summarise(self.table.means)
        return {
            "grid": {
                "in_use": found.in_use,
                "voxels": found.voxels,
                "voxel_size": found.voxel_size,
                "gaussians_per_voxel": found.rows_per_voxel,
            },
            "order": {"out_of_order": found.out_of_order, "span_of_256_rows": found.run_extent / 3},
            "not_finite": self.rows - found.finite_rows,
        }

    def _layout_of_rows(self) -> dict[str, Any]:
        """What a shard's rows are on this mesh, and whether training would have to sort the checkpoint's rows for that."""
        from ns_mgpu_splat.partition.stripes import stripe_rows

        stripes = self.layout == "stripes"
        return {
            "kind": self.layout,
            "stripes_of": stripe_rows(self.rows, len(self.table.homes)) if stripes else None,
            "sorted_anew": self.order.begins_anew,
        }

    def draw(self, path: Path) -> None:
        """Write the picture. Raises ValueError for a suffix that is no picture's, OSError if it cannot be written."""
        from ns_mgpu_splat.partition.picture import ShardLegend, draw, save

        legend = [ShardLegend(each["name"], each["gaussians"], each["pages"]) for each in self.shards()]
        title = f"{self.config.parent.name or self.config}: {self.rows:,} Gaussians from above"
        save(draw(*self._places(), self.table.homes, legend, title), path)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Means and opacities in the order in which training would have the rows on this mesh."""
        from ns_mgpu_splat.partition.stripes import stripe_rows
        from ns_mgpu_splat.splats.table import SplatTable

        means, opacities = self.columns["means"], self.columns["opacities"].reshape(-1)
        if not self.order.begins_anew:
            return means, opacities
        table = SplatTable(self.rows, sh_degree=0)
        table.write_rows(0, {"means": means, "opacities": opacities})
        homes = self.table.homes
        stripes = self.layout == "stripes"
        table.reorder(deal=homes if stripes else (), stripe=stripe_rows(self.rows, len(homes)))
        return table.means.detach().cpu(), table.opacities.detach().cpu()


def facts_of(info: dict[str, Any]) -> list[tuple[str, str]]:
    """For people: all that `describe` has, under its names."""
    memory, grid, order = info["memory"], info["grid"], info["order"]
    facts = [
        ("config", info["config"]),
        ("checkpoint", info["checkpoint"]),
        ("step", f"{info['step']:,}{f' of a schedule of {n:,}' if (n := info['schedule']) else ''}"),
        ("Gaussians", f"{info['gaussians']:,}"),
        ("colours", _colours_text(info["colours"])),
        (
            "memory",
            f"{memory['bytes_per_gaussian']:,} bytes per Gaussian: {memory['to_render']:,} to render, "
            f"{memory['to_train']:,} to train; {shown_bytes(memory['in_all'])} in all",
        ),
        ("lengths", _lengths_text(info["lengths"]["capture_units"])),
    ]
    for name in ("extent", "extent_of_99_percent"):
        if (box := info[name]) is not None:
            ends = (f"{axis} {low:.4g} to {high:.4g}" for axis, (low, high) in box.items())
            facts.append((name.replace("_", " "), ", ".join(ends)))
    facts += [
        (
            "grid",
            f"{grid['in_use']}: {counted(grid['voxels'], 'voxel')}, voxel size {grid['voxel_size']:.4g}, "
            f"{grid['gaussians_per_voxel']:,.0f} Gaussians per voxel",
        ),
        (
            "order",
            f"{order['out_of_order']:.1%} of neighbouring rows out of order; span of 256 rows: "
            f"{order['span_of_256_rows']:.3g} an axis",
        ),
        (
            "not finite",
            f"{counted(info['not_finite'], 'Gaussian')}{', not drawn' if info['not_finite'] else ''}",
        ),
        ("layout", _layout_text(info["layout"], len(info["shards"]))),
        ("pages", _pages_text(info)),
    ]
    for shard in info["shards"]:
        rows = shown_bytes(shard["gaussians"] * memory["to_render"])
        text = f"{counted(shard['gaussians'], 'Gaussian')}: {rows} to render; {_pages(shard['pages'])}"
        facts.append((shard["name"], text))
    if info["trained_on"]:
        facts.append(("trained on", ", ".join(info["trained_on"])))
    if "picture" in info:
        facts.append(("picture", info["picture"]))
    return facts


def _colours_text(colours: dict[str, Any]) -> str:
    return f"SH degree {colours['sh_degree']}, half {'on: 16 bits in higher degrees' if colours['half'] else 'off'}"


def _layout_text(layout: dict[str, Any], shards: int) -> str:
    text = (
        f"{layout['kind']}: {'a piece of the scene each' if shards > 1 else 'all of the scene on one shard'}"
    )
    if layout["kind"] == "stripes":
        text = f"stripes of {layout['stripes_of']:,} Gaussians, dealt to the shards in turn"
    return (
        f"{text}; training {'would have' if layout['sorted_anew'] else 'need not have'} the rows sorted anew"
    )


def _lengths_text(capture_units: float | None) -> str:
    one = "of unknown length" if capture_units is None else f"one is {capture_units:.4g} capture units"
    return f"in units of the scene; {one}"


def _pages_text(info: dict[str, Any]) -> str:
    """What the shards' lines add up to, and why a shard's pages need not be as many as its rows fill."""

    shards, held = info["shards"], info["memory"]["to_render"] * info["gaussians"]
    text = (
        f"{_pages(info['pages']['number'])} for {shown_bytes(held)} to render; each holds one column of "
        "neighbouring rows"
    )
    return text + (", and lies on the shard whose row is in its middle" if len(shards) > 1 else "")


def _pages(number: int) -> str:
    return f"{counted(number, 'page')} ({number * kPageBytes >> 20:,} MiB)"


if __name__ == "__main__":
    sys.exit(main())
