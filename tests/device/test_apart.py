# SPDX-License-Identifier: Apache-2.0
"""MGPU_TEST_APART=1: each shard of `0,0,0` counts as a GPU of its own, so that one GPU shows who does not wait for whom.

Each GPU is late in turn. Oracles: the CPU for operators, the same mesh without the mode (one stream, which cannot be out of
order) for splats. The rest of tests/device and tests/splats runs in the mode as a whole (`make test-gpu`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ns_mgpu_splat.device import config, native

pytestmark = pytest.mark.any_mesh
TESTS = Path(__file__).resolve().parents[1]


# ---- numbers of GPUs, and what the variables say: no GPU is needed


@pytest.mark.parametrize(
    ("names", "apart", "numbers"),
    [
        (["cuda:0"] * 3, False, [0, 0, 0]),
        (["cuda:0"] * 3, True, [0, 8, 16]),
        (["cuda:1", "cuda:0", "cuda:1", "cuda:7"], True, [1, 0, 9, 7]),
        (["cuda:63", "cuda:9"], False, [63, 9]),
        (
            [f"cuda:{gpu}" for gpu in range(8) for _ in range(8)],
            True,
            [g + 8 * k for g in range(8) for k in range(8)],
        ),
        (["cpu:0", "cpu:1"], True, [-1, -1]),
    ],
)
def test_the_kth_shard_of_a_gpu_is_a_gpu_of_its_own(
    names: list[str], apart: bool, numbers: list[int]
) -> None:
    assert native().gpus_of(names, apart) == numbers


@pytest.mark.parametrize(
    ("names", "words"),
    [(["cuda:0"] * 9, "names cuda:0 more often."), (["cuda:0", "cuda:8"], "names cuda:8.")],
)
def test_gpus_that_cannot_be_apart_are_refused_in_one_sentence(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=f"takes GPUs 0 to 7, each up to 8 times, and MGPU_DEVICES {words}$"):
        native().gpus_of(names, True)
    assert len(native().gpus_of(names, False)) == len(names)


def test_a_late_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, want in ((" 8:300 ", (8, 300)), ("", None)):
        monkeypatch.setenv("MGPU_TEST_LATE_GPU", text)
        assert config.late_gpu() == want
    for text in ("300", "-1:5", "a:b", "1:2:3"):
        monkeypatch.setenv("MGPU_TEST_LATE_GPU", text)
        with pytest.raises(ValueError, match="expected GPU:MICROSECONDS"):
            config.late_gpu()


def run(script: str, devices: str, *arguments: str, apart: bool = True) -> str:
    """Run Python code in a process of its own, with the tests' helpers on its path; what it prints."""
    path = [str(TESTS.parent), str(TESTS / "device"), str(TESTS / "splats"), os.environ.get("PYTHONPATH", "")]
    mode = {"MGPU_TEST_APART": str(int(apart)), "MGPU_DEVICES": devices}
    streams = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # with fewer, streams that share one wait for each other
    environment = {k: v for k, v in os.environ.items() if k != "MGPU_TEST_LATE_GPU"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**environment, **mode, **streams, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


HOST = """
import os, torch, ns_mgpu_splat
from ns_mgpu_splat.device import native
os.environ["MGPU_TEST_LATE_GPU"] = "0:300"
ns_mgpu_splat.init()
print(native().shard_gpus(), (torch.arange(9.0, device="mgpu") * 2).sum().item())
"""


def test_the_host_flavour_ignores_both_variables() -> None:
    assert run(HOST, "cpu:2").strip() == "[-1, -1] 72.0"


# ---- on a GPU


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that starts processes in the mode."""
    here = pytest.mark.skipif(config.gpus_apart(), reason="starts processes in the mode, and is in one")
    return pytest.mark.gpu(here(test))


START = """
import sys, threading, time, torch, ns_mgpu_splat
from ns_mgpu_splat.device import native
ns_mgpu_splat.init()
gpus = native().shard_gpus()
assert gpus == [0, 8, 16], gpus
assert native().part_count() == 3
native().set_shard_threshold(1)

def each_late(work, microseconds=3000):
    for gpu in (-1, *gpus):
        native().set_late_gpu(gpu, microseconds)
        work(gpu)
        native().set_late_gpu(-1, 0)
        torch.mgpu.synchronize()
"""

RACE = (
    START
    + """
x = torch.zeros(300, device="mgpu")
alias = torch.mgpu.as_cuda(x)
torch.mgpu.synchronize()
for late, first, last in ((16, 1, 0), (8, 3, 3)):
    native().set_late_gpu(late, 500_000)
    x.fill_(first)
    time.sleep(0.05)  # for those that are not late
    assert alias[0].item() == first  # the lead's stream waits for nobody here
    assert alias[-1].item() == last, "nothing was late: the shards share a stream"
    assert x[-1].item() == x[150].item() == first  # an operator does wait
    native().set_late_gpu(-1, 0)
    torch.mgpu.synchronize()
"""
)


@on_a_gpu
def test_who_does_not_wait_reads_what_is_not_there_yet() -> None:
    """The mode's own claim, without which all other tests in it would be empty."""
    run(RACE, "0,0,0")


OPERATORS = (
    START
    + """
import os
g = torch.Generator().manual_seed(3)
a, b = torch.randn(999, 7, generator=g), torch.randn(999, 7, generator=g)
index = torch.randint(0, 999, (500,), generator=g)
w = torch.randn(7, 999, generator=g)
WORK = {
    "pointwise": lambda a, b, i, w: (a * b + 1).relu_().sub_(b),
    "broadcast": lambda a, b, i, w: a * b.amax(0),
    "sum": lambda a, b, i, w: a.sum() + b.sum(0) + a.mean(),
    "extremes": lambda a, b, i, w: torch.stack([a.amax(0), b.amin(0), a.norm(dim=0)]),
    "rows": lambda a, b, i, w: a.softmax(1).cumsum(1),
    "index_select": lambda a, b, i, w: a.index_select(0, i),
    "index_add": lambda a, b, i, w: b.clone().index_add_(0, i.unique(), a[: len(i.unique())]),
    "index_put": lambda a, b, i, w: b.clone().index_put_((i.unique(),), a[: len(i.unique())]),
    "mask": lambda a, b, i, w: a[a > 0.3] * 2,
    "nonzero": lambda a, b, i, w: (a > 1).nonzero(),
    "masked_scatter": lambda a, b, i, w: a.masked_scatter(a > 0, b.flatten()),
    "cat": lambda a, b, i, w: torch.cat([a, b[:10], a[500:]]),
    "product": lambda a, b, i, w: a @ w,
    "small product": lambda a, b, i, w: w @ a,
    "sort": lambda a, b, i, w: (a * 2).sort(0).values[:, 3],
    "lists": lambda a, b, i, w: torch._foreach_mul([a, b[:9].clone()], 2.0)[1],
    "copies": lambda a, b, i, w: (a + b).cpu().to(a.device).t().contiguous().clone(),
    "views": lambda a, b, i, w: (a + b)[1::2].t() * 2,
}
want = {name: work(a, b, index, w) for name, work in WORK.items()}

def check(late):
    for name, work in WORK.items():
        got = work(*(x.to("mgpu") for x in (a, b, index, w)))
        assert got.is_mgpu
        torch.testing.assert_close(got.cpu(), want[name], rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}, late {late}: {text}")
    file = os.path.join(sys.argv[1], "x.pt")
    for save, load in ((torch.mgpu.save, torch.mgpu.load), (torch.save, torch.load)):
        save({"x": a.to("mgpu") * 2}, file)
        assert torch.equal(load(file)["x"].cpu(), a * 2), (save, late)
    x = (torch.arange(8 << 20, dtype=torch.int32, device="mgpu") + 1).sub_(1)
    for places in ([2, 0, 1] * 5 + [2], [0] * 16, [-1, 1] * 8):
        torch.mgpu.place(x, places)
        assert torch.mgpu.placement(x).tolist() == places
        assert torch.equal(x.add_(1).sub_(1).cpu(), torch.arange(8 << 20, dtype=torch.int32)), (places, late)

each_late(check)
"""
)


@on_a_gpu
def test_operators_copies_files_and_pages_with_each_gpu_late(tmp_path: Path) -> None:
    run(OPERATORS, "0,0,0", str(tmp_path))


REUSE = (
    START
    + """
def check(late):
    for size in (60_000, 3 << 20):  # floats: of a slab, of an arena of its own
        for turn in range(20):
            x = torch.full((size,), float(turn), device="mgpu")  # by all
            native().set_shard_threshold(1 << 40)
            read = x[-1000:] * 1  # by the lead, from the last one's part
            native().set_shard_threshold(1)
            again = x + 1  # by all
            del x
            torch.full((size,), -1.0, device="mgpu")  # in the same memory
            assert torch.equal(read.cpu(), torch.full((1000,), float(turn))), (late, size, turn)
            del read
            torch.full((1000,), -1.0, device="mgpu")
            assert torch.equal(again.cpu(), torch.full((size,), turn + 1.0)), (late, size, turn)

each_late(check)
torch.mgpu.empty_cache()

# threads, each with a stream of its own, and one that frees what others made
def work(number, failed):
    with torch.Stream(device="mgpu") if number else torch.accelerator.current_stream():
        for turn in range(30):
            x = torch.full((50_000,), float(number), device="mgpu")
            y = (x * 2 + turn).sum(dtype=torch.float64).item()
            if y != 50_000 * (2.0 * number + turn):
                failed.append((number, turn, y))

def check_threads(late):
    failed = []
    threads = [threading.Thread(target=work, args=(number, failed)) for number in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not failed, (late, failed)

each_late(check_threads, 300)
"""
)


@on_a_gpu
def test_memory_freed_on_one_and_used_again_on_another() -> None:
    run(REUSE, "0,0,0")


TRAIN = """
import sys, threading
import numpy as np
import torch
import splat_scenes as scenes
import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.device import native

ns_mgpu_splat.init()
torch.use_deterministic_algorithms(True)
LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
views = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(130, 90), (64, 48), (200, 150)])]
photograph = torch.randint(0, 256, (90, 130, 3), generator=torch.Generator().manual_seed(2)).to(torch.uint8)

def results():
    out = {}
    table = scenes.table_of(scenes.random_columns(4000, 5))
    images = render(table, [scenes.camera_of(view) for view in views], background=[0.1, 0.2, 0.3])
    loss = 0
    for i, image in enumerate(images):
        for name in ("rgb", "depth", "accumulation"):
            out[f"{name}{i}"] = getattr(image, name).detach().cpu()
        (weights,) = scenes.image_weights(i, tuple(image.rgb.shape))
        loss = loss + (image.rgb * weights.to(image.rgb.device)).sum() + image.depth.sum()
    loss.backward()
    for name, column in table.named_columns().items():
        out[f"grad_{name}"] = column.grad.cpu()
    table = SplatTable.from_columns(**scenes.random_columns(4000, 6), capacity=5000).requires_grad_(True)
    adam = SplatAdam(table, LRS, opacity_reg=0.01)
    target = photograph.to("mgpu")
    for step in range(4):
        out[f"loss{step}"] = torch.as_tensor(train_step(table, adam, scenes.camera_of(views[0]), target).loss).cpu()
    adam.flush()
    for name, column in table.named_columns().items():
        out[f"trained_{name}"] = column.detach().cpu()
    return {name: value.numpy() for name, value in out.items()}

if sys.argv[1] == "write":
    np.savez(sys.argv[2], **results())
    sys.exit()
reference = dict(np.load(sys.argv[2]))
gpus = native().shard_gpus()
assert gpus == [0, 8, 16], gpus
plain = scenes.table_of(scenes.random_columns(2000, 1), requires_grad=False)
cameras = [scenes.camera_of(view) for view in views]
alone = [render(plain, camera)[0].rgb.cpu() for camera in cameras]
for late in (-1, *gpus):
    native().set_late_gpu(late, 300)
    for name, value in results().items():
        want = reference[name]
        if name.startswith(("grad", "trained", "loss")):
            assert np.abs(value - want).max() <= 1e-6 * np.abs(want).max(), (late, name, np.abs(value - want).max())
        else:
            assert np.array_equal(value, want), (late, name, int((value != want).sum()))
    wrong = []
    def work(i):
        with torch.Stream(device="mgpu") if i > 2 else torch.accelerator.current_stream():
            for turn in range(5):
                if not torch.equal(render(plain, cameras[i % 3])[0].rgb.cpu(), alone[i % 3]):
                    wrong.append((i, turn))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not wrong, (late, wrong)
    native().set_late_gpu(-1, 0)
"""


@on_a_gpu
@pytest.mark.parametrize("launch", ["lanes", "0"])
def test_renders_and_steps_with_each_gpu_late_are_those_of_one_stream(
    launch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images bit-equal, gradients, losses and trained rows within 1e-6 of the largest; six threads render at once."""
    if launch == "0":
        monkeypatch.setenv("MGPU_LAUNCH_THREADS", "0")
    reference = str(tmp_path / "one_stream.npz")
    run(TRAIN, "0,0,0", "write", reference, apart=False)
    run(TRAIN, "0,0,0", "compare", reference)


FREED = """
import threading, torch
import splat_scenes as scenes
import ns_mgpu_splat
from ns_mgpu_splat import render
from ns_mgpu_splat.device import native

ns_mgpu_splat.init()
native().set_shard_threshold(1 << 40)  # operators are the lead's
table = scenes.table_of(scenes.random_columns(4000, 5), requires_grad=False)
camera = scenes.camera_of(scenes.random_twin_camera(0, 130, 90))
generator = torch.Generator().manual_seed(1)
values = [torch.randn(table.sh0.shape, generator=generator).to("mgpu") * 1e-4 for _ in range(2)]

def picture(turn):
    value = values[turn % 2]
    torch.sum(value.expand(20_000, *value.shape), 0, out=table.sh0)  # takes the lead's GPU a while
    return render(table, camera)[0].rgb.cpu()

want = [picture(turn) for turn in range(2)]
assert not torch.equal(*want)
over = threading.Event()

def free_often():
    while not over.is_set():
        native().Temporary(1000, 0)

other = threading.Thread(target=free_often)
other.start()
try:
    wrong = [turn for turn in range(400) if not torch.equal(picture(turn), want[turn % 2])]
finally:
    over.set()
    other.join()
assert not wrong, f"{len(wrong)} of 400 renders saw older rows: {wrong[:9]}"
"""


@on_a_gpu
def test_the_leads_operator_is_waited_for_though_another_thread_frees_memory_meanwhile() -> None:
    """To free memory of a stage a thread asks for the stream, outside of turns, and that joined the GPUs and forgot that the
    lead's was ahead: between the note of it and the launch, so that stages on the other GPUs read what was there before."""
    run(FREED, "0,0,0")


@on_a_gpu
def test_the_tests_of_the_order_find_several_gpus() -> None:
    """test_order_gpu.py has work to do in the mode: nothing of it is skipped. All of it runs there in `make test-gpu`."""
    chosen = "test_a_training_loop or test_streams_that_wait or test_threads_on_one_stream"
    command = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    file = str(TESTS / "device" / "test_order_gpu.py")
    said = run(command, "0,0,0", "-q", "-p", "no:cacheprovider", "-k", chosen, file)
    assert "6 passed" in said, said
    assert "skipped" not in said, said
