# SPDX-License-Identifier: Apache-2.0
"""Registration: when it happens, what it refuses, and in which words. Each claim runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat import device
from ns_mgpu_splat.device import build
from ns_mgpu_splat.device.config import MeshConfig, parse_devices


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process."""
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith("MGPU_") or k == "MGPU_CACHE"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_init_returns_the_one_device() -> None:
    assert ns_mgpu_splat.init() == torch.device("mgpu", 0)
    assert torch.device("mgpu").index is None
    assert torch.mgpu.device_count() == 1
    assert torch.mgpu.current_device() == 0


def test_init_again_with_the_same_devices_is_harmless() -> None:
    shards = torch.mgpu.mesh().shards
    assert ns_mgpu_splat.init(f"cpu:{len(shards)}") == torch.device("mgpu", 0)


def test_init_again_with_blank_devices_is_harmless() -> None:
    assert ns_mgpu_splat.init("") == ns_mgpu_splat.init(" ") == torch.device("mgpu", 0)


@pytest.mark.parametrize("devices", [3, torch.device("cpu"), ["cpu:2"]])
def test_devices_that_are_no_text_are_named(devices: object) -> None:
    with pytest.raises(TypeError, match=r"devices is .*, expected text such as 'cpu:4'"):
        ns_mgpu_splat.init(devices)  # type: ignore[arg-type]


def test_init_again_with_other_devices_says_so() -> None:
    with pytest.raises(RuntimeError, match="cannot change to 'cpu:17' in this process"):
        ns_mgpu_splat.init("cpu:17")


@pytest.mark.any_mesh
def test_import_registers_nothing_and_loads_nothing() -> None:
    done = run(
        "import sys, torch, ns_mgpu_splat, ns_mgpu_splat.device\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert not hasattr(torch, 'mgpu') and '_mgpu' not in sys.modules\n"
        "assert not ns_mgpu_splat.device.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.any_mesh
def test_the_environment_names_the_mesh() -> None:
    code = "import ns_mgpu_splat, torch; ns_mgpu_splat.init(); print(torch.mgpu.mesh().shards)"
    done = run(code, MGPU_DEVICES="cpu:5")
    assert done.stdout.strip() == "('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3', 'cpu:4')", done.stderr
    if not torch.cuda.is_available():
        done = run(code)
        assert done.stdout.strip() == "('cpu:0',)", done.stderr


@pytest.mark.any_mesh
def test_gpus_that_are_not_there_get_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    done = run("import ns_mgpu_splat; ns_mgpu_splat.init()", MGPU_DEVICES="0")
    assert done.returncode != 0
    assert "RuntimeError: MGPU_DEVICES is '0', but torch sees no CUDA device here" in done.stderr
    assert done.stderr.count("File") == 2, done.stderr  # the caller's line, and init()


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the mesh; one beside it is only not built for."""
    capabilities = {"cuda:0": (9, 0), "cuda:1": (7, 5), 0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    device._check_gpus(MeshConfig("cuda", ("cuda:0", "cuda:0")))
    with pytest.raises(RuntimeError, match=r"cuda:1 \(T4\) has compute capability 7.5, and mgpu needs 8.0"):
        device._check_gpus(MeshConfig("cuda", ("cuda:0", "cuda:1")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(build, "cuda_home", lambda: Path("/cuda"))
    monkeypatch.setattr(build, "_version", str)
    monkeypatch.delenv("MGPU_CUDA_ARCHS", raising=False)
    flags = build.cuda_compiler.__wrapped__().flags
    assert [flag for flag in flags if "gencode" in flag] == ["-gencode=arch=compute_90,code=sm_90"]


@pytest.mark.any_mesh
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MGPU_DEVICES", "gpu:1", "MGPU_DEVICES is 'gpu:1', expected cpu:COUNT"),
        ("MGPU_SHARD_THRESHOLD", "big", "MGPU_SHARD_THRESHOLD is 'big', expected a number of bytes"),
        ("MGPU_CHECK_LOCALITY", "yes", "MGPU_CHECK_LOCALITY is 'yes', expected 0 or 1"),
        ("MGPU_LAUNCH_THREADS", "two", "MGPU_LAUNCH_THREADS is 'two', expected 0, shards, or nothing"),
        ("MGPU_TEST_APART", "2", "MGPU_TEST_APART is '2', expected 0 or 1"),
        ("MGPU_TEST_LATE_GPU", "1", "MGPU_TEST_LATE_GPU is '1', expected GPU:MICROSECONDS"),
    ],
)
def test_a_bad_variable_is_named_and_nothing_is_registered(name: str, value: str, words: str) -> None:
    done = run(
        "import ns_mgpu_splat, torch\n"
        "try: ns_mgpu_splat.init()\n"
        "except ValueError as error: print(error)\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'",
        **{"MGPU_DEVICES": "cpu:1", name: value},
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.any_mesh
def test_another_backend_in_the_same_place_is_named() -> None:
    done = run(
        "import torch, ns_mgpu_splat\ntorch.utils.rename_privateuse1_backend('npu')\nns_mgpu_splat.init('cpu:1')"
    )
    assert "RuntimeError: Another backend, 'npu', holds torch's PrivateUse1 place" in done.stderr


@pytest.mark.parametrize(
    ("text", "gpus", "shards"),
    [
        ("cpu:3", 0, ("cpu:0", "cpu:1", "cpu:2")),
        ("cpu", 2, ("cpu:0",)),
        (" 0, 1 ", 2, ("cuda:0", "cuda:1")),
        ("0,0,0,0", 1, ("cuda:0",) * 4),
        (None, 0, ("cpu:0",)),
        ("", 2, ("cuda:0", "cuda:1")),
    ],
)
def test_devices_are_read(text: str | None, gpus: int, shards: tuple[str, ...]) -> None:
    flavour = "cuda" if shards[0].startswith("cuda") else "host"
    assert parse_devices(text, gpus=gpus) == MeshConfig(flavour, shards)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cpu:0", "a mesh has 1 to 64 shards"),
        ("cpu:65", "a mesh has 1 to 64 shards"),
        ("cpu:-1", "expected cpu:COUNT"),
        ("cuda:0", "expected cpu:COUNT"),
        ("0,,1", "expected cpu:COUNT"),
        ("0,2", "there is no GPU 2"),
    ],
)
def test_bad_devices_get_one_sentence(text: str, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        parse_devices(text, gpus=2)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.any_mesh
@pytest.mark.parametrize("backward", [False, True])
def test_the_wait_at_exit_ends_when_autograds_thread_is_done(backward: bool) -> None:
    """This thread's own reference kept every process for the whole timeout, two seconds."""
    done = run(
        "import os, time, torch, ns_mgpu_splat; ns_mgpu_splat.init()\n"
        f"if {backward}: torch.ones(3, device='mgpu', requires_grad=True).sum().backward()\n"
        "start = time.monotonic(); ns_mgpu_splat.device._wait_for_autograd(os.getpid(), timeout_s=20)\n"
        "print(time.monotonic() - start)",
        MGPU_DEVICES="cpu:2",
    )
    assert float(done.stdout) < 10, done.stderr
