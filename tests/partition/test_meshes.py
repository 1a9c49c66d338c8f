# SPDX-License-Identifier: Apache-2.0
"""Where rows lie must not show: the city on one shard and on several, in every state that moves its rows.

Each mesh is a process of its own (placement_probe.py); on the host the second one runs with the locality check, so a
stage that took equal chunks for granted would end it. MGPU_PLACEMENT_TEST: "ROWS WIDTH HEIGHT SHARDS [SHARDS ...]";
by default 8 shards belong to the slow tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ns_mgpu_splat

PROBE = Path(__file__).with_name("placement_probe.py")
STATES = ("unsorted", "placed", "densified", "moved", "striped", "striped, refined and moved")
SIZES = os.environ.get("MGPU_PLACEMENT_TEST", "200000 320 208 4 8")
ROWS, WIDTH, HEIGHT, *SHARDS = map(int, SIZES.split())
LATER = (
    () if "MGPU_PLACEMENT_TEST" in os.environ else (pytest.mark.slow,)
)  # of all numbers of shards but the first


def mesh_of(shards: int) -> str:
    """MGPU_DEVICES for a process of its own: so many shards of the kind that this process runs on."""
    ns_mgpu_splat.init()
    on_gpus = torch.mgpu.mesh().shards[0].startswith("cuda")  # type: ignore[attr-defined]
    return ",".join(["0"] * shards) if on_gpus else f"cpu:{shards}"


def probe(out: Path, shards: int, ranges: int) -> dict[str, Any]:
    """What placement_probe.py writes on so many shards, with stripes for `ranges` of them."""
    devices = mesh_of(shards)
    settings = {**os.environ, "MGPU_DEVICES": devices}
    if devices.startswith("cpu") and shards > 1:
        settings["MGPU_CHECK_LOCALITY"] = "1"
    command = [sys.executable, str(PROBE), str(out), str(ROWS), str(WIDTH), str(HEIGHT), str(ranges)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)
    print(f"{devices}:\n{done.stdout}")
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}"
    found: dict[str, Any] = torch.load(out, weights_only=False)
    out.unlink()
    return found


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=LATER if n != SHARDS[0] else ()) for n in SHARDS]
)
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def one(shards: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(tmp_path_factory.mktemp("one") / "one.pt", 1, shards)


@pytest.fixture(scope="module")
def several(shards: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(tmp_path_factory.mktemp("several") / "several.pt", shards, shards)


@pytest.mark.parametrize("state", STATES)
def test_images_are_the_same_bits(one: dict[str, Any], several: dict[str, Any], state: str) -> None:
    """An aerial and a street view: colour, accumulated depth and accumulation."""
    for a, b in zip(one[state]["images"], several[state]["images"], strict=True):
        assert torch.equal(a, b)
        assert float(a[..., 4].mean()) > 0.5  # the city is in the picture


@pytest.mark.parametrize("state", STATES)
def test_gradients_agree(one: dict[str, Any], several: dict[str, Any], state: str) -> None:
    """design.md: within 1e-4 of the tensor's largest."""
    a, b = one[state]["gradients"], several[state]["gradients"]
    for name in ("means", "scales", "opacities", "sh0"):
        mine, theirs = dense(a, name, one["rows"][state]), dense(b, name, several["rows"][state])
        assert float(mine.abs().max()) > 0
        assert float((mine - theirs).abs().max()) <= 1e-4 * float(mine.abs().max()), name


def dense(gradients: dict[str, Any], name: str, rows: int) -> torch.Tensor:
    if name + ".rows" not in gradients:
        return gradients[name]
    out = torch.zeros(rows, *gradients[name].shape[1:])
    out[gradients[name + ".rows"]] = gradients[name]
    return out


def test_rows_are_refined_alike(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert one["refined"] == several["refined"]
    assert one["refined"]["relocated"] == -(-ROWS // 50)
    assert one["rows"] == several["rows"]
    assert one["rows"]["densified"] > ROWS
    assert one["refined stripes"] == several["refined stripes"]
    assert one["refined stripes"]["added"] > 0


def test_a_training_step_agrees(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert abs(one["loss"] - several["loss"]) < 1e-6
    for name, moment in one["exp_avg"].items():
        assert float((moment - several["exp_avg"][name]).abs().max()) <= 1e-4 * float(moment.abs().max()), (
            name
        )
    assert one["finite"]
    assert several["finite"]


def test_moving_pages_changes_no_value(several: dict[str, Any]) -> None:
    """Columns, moments and last steps are the same bits before and after, while the homes are not."""
    assert several["unchanged"]
    assert several["homes"]["trained"] != several["homes"]["moved"]


def test_homes_are_those_of_their_state(several: dict[str, Any]) -> None:
    """Contiguous ranges over all rows; even ones until rows were dealt unevenly, with an empty shard among them."""
    for state, homes in several["homes"].items():
        assert [begin for begin, _ in homes[1:]] == [end for _, end in homes[:-1]]
        assert homes[0][0] == 0
        assert homes[-1][1] == several["rows"].get(state, several["rows"][STATES[-1]])
    for state in ("placed", "densified"):
        sizes = [end - begin for begin, end in several["homes"][state]]
        assert max(sizes) <= 1.11 * sum(sizes) / len(sizes)
    if several["shards"] > 2:
        assert several["homes"]["moved"][1][0] == several["homes"]["moved"][1][1]
    assert all(begin % 256 == 0 for begin, _ in several["homes"]["striped"])
    assert several["report"]["row_imbalance"] <= 2.0 + 0.2


def test_trained_rows_cost_more_where_the_cameras_look(several: dict[str, Any]) -> None:
    """The two views see a part of the city; costs along the rows must not be a straight line then."""
    cost = torch.tensor(several["seen"])
    even = torch.linspace(0.0, 1.0, len(cost))
    assert float((cost - even).abs().max()) > 0.05


def test_in_stripes_every_shard_sees_as_many_rows(several: dict[str, Any]) -> None:
    """Of each of the two views; in pieces of space some shards see nearly nothing."""

    def unevenness(state: str) -> float:
        seen = several["seen rows"][state]
        return float((seen.max(1) / seen.mean(1)).max())

    assert unevenness("striped") < 1.25
    assert unevenness("placed") > 1.5
