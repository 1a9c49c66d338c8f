# SPDX-License-Identifier: Apache-2.0
"""The check that local means local: a planted violation ends the process, and nothing else does. Always cpu:3."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_mesh
PREPARE = """
import threading, time, torch, ns_mgpu_splat
from ns_mgpu_splat.device import native
ns_mgpu_splat.init()
C = native()
assert C.locality_checked()
"""


def run(code: str, check: str = "1") -> subprocess.CompletedProcess[str]:
    """Run code on cpu:3 with the locality check on."""
    environment = {**os.environ, "MGPU_DEVICES": "cpu:3", "MGPU_CHECK_LOCALITY": check}
    environment.pop("MGPU_SHARD_THRESHOLD", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_touching_another_shards_page_ends_the_process_with_a_sentence() -> None:
    done = run(PREPARE + "C.planted_violation(torch.zeros(3_000_000, device='mgpu'))")
    assert done.returncode == 86
    assert "locality violation: shard 0 (cpu:0) touched page 0x" in done.stderr
    assert "of a tensor of 12000000 bytes, home of shard 2, in stage planted" in done.stderr


def test_a_declared_column_is_named() -> None:
    done = run(
        PREPARE + "t = torch.mgpu.reserve((100_000, 3), 200_000)\n"
        "C.set_row_split(t, [(0, 10), (10, 20), (20, 100_000)], 'column means')\n"
        "C.planted_violation(t)"
    )
    assert done.returncode == 86
    assert "of column means, home of shard 2" in done.stderr


def test_own_rows_and_small_tensors_are_open() -> None:
    done = run(
        PREPARE + "t = torch.mgpu.reserve((100_000, 3), 200_000)\n"
        "C.set_row_split(t, [(0, 100_000), (100_000, 100_000), (100_000, 100_000)], 'column means')\n"
        "C.planted_violation(t)\n"
        "C.planted_violation(torch.zeros(100, device='mgpu'))\n"
        "print(t[-1, -1].item() != 0)"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_without_the_check_nothing_is_protected() -> None:
    done = run(
        PREPARE.replace("assert C", "assert not C")
        + "C.planted_violation(torch.zeros(3_000_000, device='mgpu'))",
        "0",
    )
    assert done.returncode == 0, done.stderr


def test_torch_operators_are_exchanges() -> None:
    done = run(
        PREPARE + "x = torch.rand(999_999, 3, device='mgpu', requires_grad=True)\n"
        "y = (x[1:] * x[:-1]).sum() + x.flip(0).exp().mean()\n"
        "y.backward()\n"
        "print(torch.allclose(x.grad.cpu()[0], (x[1] + x[0].exp() / x.numel()).detach().cpu()))"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_thread_outside_the_stage_waits_for_its_end() -> None:
    done = run(
        PREPARE + "t = torch.ones(3_000_000, device='mgpu')\n"
        "host = torch.mgpu.as_host(t)\n"
        "stop = False\n"
        "sums = []\n"
        "def read():\n"
        "    while not stop: sums.append(host.sum().item())\n"
        "torch.set_num_threads(1)\n"
        "reader = threading.Thread(target=read); reader.start()\n"
        "for _ in range(50): C.idle_stage(2)\n"
        "stop = True; reader.join()\n"
        "print(len(sums) > 0 and set(sums) == {3_000_000.0})"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_real_fault_still_ends_the_process_as_usual() -> None:
    done = run(PREPARE + "C.idle_stage(0)\nimport ctypes; ctypes.string_at(8)")
    assert done.returncode == -11
    assert "locality violation" not in done.stderr


@pytest.mark.parametrize("owner", [1, 2])
def test_a_buffer_belongs_to_its_owner(owner: int) -> None:
    done = run(PREPARE + f"C.planted_buffer_violation({owner})")
    assert done.returncode == 86
    assert f"of a buffer of 100 bytes, home of shard {owner}" in done.stderr


def test_an_owners_and_an_exchange_buffer_are_open() -> None:
    done = run(PREPARE + "C.planted_buffer_violation(0); C.planted_buffer_violation(-1)")
    assert done.returncode == 0, done.stderr
