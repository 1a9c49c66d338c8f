# SPDX-License-Identifier: Apache-2.0
"""GPUs wait for each other's results. One GPU is made late with every operator (mesh/late.h), so that whoever does not
wait for it reads what is not there yet. Oracle: the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from test_rows import CASES, MASK, MASK_2D, ONCE, X
from test_tensors import EXPRESSIONS, ROWS, same

from ns_mgpu_splat.device import config, native

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("split_everything")]

LATE = 2000  # microseconds: a hundred times what these operators take


@pytest.fixture(params=["the first", "the last"])
def late(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """One GPU of the mesh is late."""
    gpus = native().shard_gpus()
    if len(set(gpus)) < 2:
        pytest.skip("one GPU keeps its own order; with MGPU_TEST_APART=1 it counts as several")
    native().set_late_gpu(gpus[0 if request.param == "the first" else -1], LATE)
    yield
    native().set_late_gpu(*(config.late_gpu() or (-1, 0)))
    torch.mgpu.synchronize()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name: str) -> None:
    same(EXPRESSIONS[name](ROWS.to("mgpu")), EXPRESSIONS[name](ROWS), 1e-4)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", CASES)
def test_rows_and_their_gradients(name: str) -> None:
    here, there = X.clone().requires_grad_(), X.to("mgpu").requires_grad_()
    want, got = CASES[name](here), CASES[name](there)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (want * weights).sum().backward()
    (got * weights.to("mgpu")).sum().backward()
    same(got, want, 2e-5)
    same(there.grad, here.grad, 1e-4)


@pytest.mark.usefixtures("late")
def test_writing_where_a_mask_says() -> None:
    here, there = X.clone(), X.to("mgpu")
    for x in (here, there):
        at = x.device
        x[x > 1] = 0
        x[MASK.to(at)] = x[MASK.to(at)] * 2
        x[MASK_2D.to(at)] += 1
        x[(ONCE.to(at) - 1001)[:, None].expand(-1, 2), torch.tensor([[0, 2]], device=at)] = 3
        x.index_fill_(0, (x[:, 0, 0] > 0.5).nonzero().flatten(), 4)
    same(there, here)


@pytest.mark.usefixtures("late")
def test_outputs_that_are_refused_a_cut() -> None:
    """`out=` is given self's values by all shards before the call turns out to be the lead shard's."""
    here, there = torch.empty(1001, 7, 3), torch.empty(1001, 7, 3, device="mgpu")
    for x, out in ((X, here), (X.to("mgpu"), there)):
        nothing = torch.zeros((), dtype=torch.int64, device=x.device)
        torch.index_add(x, 0, nothing, x[5:6].clone(), out=out)
    same(there, here)


@pytest.mark.usefixtures("late")
def test_a_training_loop() -> None:
    losses = []
    for device in ("cpu", "mgpu"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.SiLU(), torch.nn.Linear(64, 3)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        x = ROWS.to(device)
        for _ in range(5):
            optimizer.zero_grad()
            loss = (net(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.usefixtures("late")
def test_streams_that_wait_for_each_other_wait_on_all_gpus() -> None:
    """Written by all GPUs on one stream, read by the lead shard's on another."""
    side = torch.Stream(device="mgpu")
    x = torch.zeros(1 << 20, device="mgpu")
    torch.mgpu.synchronize()
    for turn in range(1, 4):
        x.fill_(turn)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            assert x[-1].item() == turn  # of the last shard
            x.add_(10)
        torch.accelerator.current_stream().wait_stream(side)
        assert x[-1].item() == turn + 10


@pytest.mark.usefixtures("late")
def test_threads_on_one_stream_do_not_take_each_others_joins() -> None:
    """A thread gives all GPUs work and reads it on the lead shard, while another joins the same stream again and again."""
    over = threading.Event()

    def join_often() -> None:
        y = torch.zeros((), device="mgpu")  # of the lead shard's GPU alone
        while not over.is_set():
            y.neg_().item()

    other = threading.Thread(target=join_often)
    other.start()
    try:
        x = torch.zeros(1 << 20, device="mgpu")
        for turn in range(200):
            x.fill_(turn)
            assert x[-1].item() == turn
    finally:
        over.set()
        other.join(60)
