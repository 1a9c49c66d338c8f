# SPDX-License-Identifier: Apache-2.0
"""Generators: seeds, states, forks. Distributions are in test_opinfo.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scipy import stats


def test_a_seed_repeats_the_numbers() -> None:
    torch.manual_seed(3)
    first = torch.rand(50, device="mgpu")
    second = torch.rand(50, device="mgpu")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(50, device="mgpu"), first)
    assert not torch.equal(first, second)
    assert torch.mgpu.initial_seed() == 3
    torch.mgpu.manual_seed_all(4)
    assert torch.mgpu.initial_seed() == 4


def test_own_generators() -> None:
    generator = torch.Generator(device="mgpu")
    assert generator.device == torch.device("mgpu", 0)
    generator.manual_seed(1)
    first = torch.randn(9, generator=generator, device="mgpu")
    state = generator.get_state()
    second = torch.empty(9, device="mgpu").normal_(generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.empty(9, device="mgpu").normal_(generator=generator), second)
    generator.manual_seed(1)
    assert torch.equal(torch.randn(9, generator=generator, device="mgpu"), first)
    copy = generator.clone_state()
    assert torch.equal(
        torch.rand(3, generator=copy, device="mgpu"), torch.rand(3, generator=generator, device="mgpu")
    )
    assert sorted(torch.randperm(7, generator=generator, device="mgpu").tolist()) == list(range(7))


def test_state_of_the_default_generator() -> None:
    state = torch.mgpu.get_rng_state()
    assert state.device.type == "cpu"
    first = torch.rand(5, device="mgpu")
    torch.mgpu.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="mgpu"), first)


def test_fork_rng_leaves_no_trace() -> None:
    torch.manual_seed(5)
    want = torch.rand(5, device="mgpu")
    torch.manual_seed(5)
    with torch.random.fork_rng(device_type="mgpu"):
        torch.rand(3, device="mgpu")
    assert torch.equal(torch.rand(5, device="mgpu"), want)


def test_dropout_and_checkpoints_repeat() -> None:
    x = torch.ones(1000, device="mgpu")
    torch.manual_seed(1)
    first = F.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.5), first)
    assert 350 < (first == 0).sum().item() < 650


def test_a_foreign_generator_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a generator of device mgpu, and got one of cpu"):
        torch.rand(3, generator=torch.Generator(device="cpu"), device="mgpu")


def test_large_draws_have_the_right_distribution() -> None:
    torch.manual_seed(0)
    draws = torch.randn(500_000, device="mgpu").cpu().double()
    assert stats.kstest(draws.numpy(), "norm").pvalue > 1e-6
    assert abs(draws.mean().item()) < 5 / 500_000**0.5
