# SPDX-License-Identifier: Apache-2.0
"""torch's own operator database on `mgpu` against the CPU: forward and first-order gradient, float32, all operands split.

The oracle is torch's CPU kernels on CPU tensors. `EXCEPTIONS` lists what differs, with the reason; the test fails if an
operator on it passes again, or if fewer than 99 % of the operators pass.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from scipy import stats
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

SAMPLES = 6  # inputs of an operator; 60 find nothing more and take four times as long
REPEATS = 32  # draws of a random operator

# operator: why it is not the same as on the CPU (repeated in docs/device.md)
EXCEPTIONS: dict[str, str] = {
    "as_strided.partial_views": "reads memory around its view, which a move to another device does not take along",
    "sparse.mm.reduce": "needs a sparse tensor, and the device has strided tensors only",
    "sparse.sampled_addmm": "needs a sparse tensor, and the device has strided tensors only",
    "to_sparse": "makes a sparse tensor, and the device has strided tensors only",
    "tensor_split": "wants a tensor of indices on the CPU, as on every device",
}

UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

RANDOM_WORDS = (
    "bernoulli",
    "cauchy",
    "dropout",
    "exponential",
    "fractional_max_pool",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rrelu",
    "scaled_dot_product_attention",
    "uniform",
)


def full_name(op: Any) -> str:
    """`nn.functional.gelu`, `norm.fro`: name and variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def is_random(name: str) -> bool:
    """Whether the operator draws random numbers for some of its inputs."""
    return any(word in name for word in RANDOM_WORDS) and "normalize" not in name


def moved(value: Any) -> Any:
    """The same inputs on `mgpu`, as leaves of a new graph."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to("mgpu").requires_grad_(leaf.requires_grad)
        return "mgpu" if leaf in ("cpu", torch.device("cpu")) else leaf

    return pytree.tree_map(move, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """All dense tensors in a result."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]


def with_gradient(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that a backward pass can start from."""
    return [t for t in outputs if t.requires_grad and t.dtype.is_floating_point]


def compare(op: Any, name: str, sample: Any) -> None:
    """Run one sample on both devices; AssertionError or RuntimeError if `mgpu` differs."""
    arguments = (sample.input, sample.args, dict(sample.kwargs))
    torch.manual_seed(0)
    expected = op(sample.input, *sample.args, **sample.kwargs)
    there = moved(arguments)
    torch.manual_seed(0)
    actual = op(there[0], *there[1], **there[2])
    expected_tensors, actual_tensors = tensors(expected), tensors(actual)
    assert len(expected_tensors) == len(actual_tensors)
    exact = name not in UNINITIALISED and not is_random(name)
    for want, got in zip(expected_tensors, actual_tensors, strict=True):
        # an operator without a tensor operand makes its result where its `device` argument says: the CPU, here
        assert got.device.type == "mgpu" or not tensors(there), f"result on {got.device}"
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if exact:
            torch.testing.assert_close(
                got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-4, equal_nan=True
            )
    if not op.supports_autograd:
        return
    want_roots, got_roots = with_gradient(expected_tensors), with_gradient(actual_tensors)
    assert len(want_roots) == len(got_roots)
    if not want_roots:
        return
    want_leaves = [t for t in tensors(arguments) if t.requires_grad]
    got_leaves = [t for t in tensors(there) if t.requires_grad]
    torch.manual_seed(1)
    want_grads = torch.autograd.grad(sum(t.sum() for t in want_roots), want_leaves, allow_unused=True)
    torch.manual_seed(1)
    got_grads = torch.autograd.grad(sum(t.sum() for t in got_roots), got_leaves, allow_unused=True)
    for want_grad, got_grad in zip(want_grads, got_grads, strict=True):
        assert (want_grad is None) == (got_grad is None)
        if want_grad is not None and exact and want_grad.layout == torch.strided:
            assert got_grad.device.type == "mgpu"
            torch.testing.assert_close(got_grad.cpu(), want_grad, rtol=1e-3, atol=1e-3, equal_nan=True)


def draws(op: Any, arguments: Any, first_seed: int) -> torch.Tensor:
    """Values of many draws, in one vector on the CPU."""
    out = []
    for seed in range(first_seed, first_seed + REPEATS):
        torch.manual_seed(seed)
        result = op(arguments[0], *arguments[1], **arguments[2])
        out += [t.detach().cpu().flatten().double() for t in tensors(result) if not t.dtype.is_complex]
    return torch.cat(out) if out else torch.empty(0)


def compare_distribution(op: Any, sample: Any) -> None:
    """Draw with other seeds on each device: Kolmogorov-Smirnov, and mean and variance within five standard errors."""
    arguments = (sample.input, sample.args, dict(sample.kwargs))
    want = draws(op, arguments, 0)
    there = moved(arguments)
    got = draws(op, there, 10_000)
    assert got.shape == want.shape
    want, got = want[want.isfinite()], got[got.isfinite()]
    if min(want.numel(), got.numel()) < 200:
        return
    assert stats.ks_2samp(want.numpy(), got.numpy()).pvalue > 1e-6
    if want.abs().max() < 1e3:  # heavy tails (Cauchy) have no mean to compare
        error = 5 * ((want.var() + got.var()) / min(want.numel(), got.numel())).sqrt() + 1e-6
        assert (want.mean() - got.mean()).abs() <= error
        assert (want.var() - got.var()).abs() <= 0.25 * want.var() + 1e-6


def samples(op: Any) -> Iterator[Any]:
    """The first inputs that the operator accepts on the CPU."""
    count = 0
    generator = iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    while count < SAMPLES:
        try:
            sample = next(generator)
        except Exception:
            return  # no more, or they cannot be made on this machine (a missing library)
        try:
            torch.manual_seed(0)
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue  # the CPU cannot do it either
        count += 1
        yield sample


def failure(op: Any, name: str) -> str | None:
    """Why an operator differs from the CPU, in one line; None if it does not. Raises LookupError if nothing ran."""
    ran = False
    for sample in samples(op):
        ran = True
        try:
            compare(op, name, sample)
            if is_random(name):
                compare_distribution(op, sample)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"{type(error).__name__}: {' '.join(lines)[:200]}"
    if not ran:
        raise LookupError(name)
    return None


@pytest.fixture(autouse=True)
def no_search_for_a_test_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each operator torch looks through all frames of the stack for a unittest.TestCase: two thirds of the time."""
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)  # what it finds here


@pytest.mark.usefixtures("split_everything")
def test_operators_give_the_cpus_values_and_gradients() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # samples are tiny
    torch.mgpu.reset_op_stats()
    failures: dict[str, str] = {}
    without_samples = []
    passed = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op in op_db:
                if torch.float32 not in op.dtypes:
                    continue
                name = full_name(op)
                try:
                    reason = failure(op, name)
                except LookupError:
                    without_samples.append(name)  # none that runs on the CPU here
                    continue
                if reason is None:
                    passed += 1
                else:
                    failures[name] = reason
    finally:
        torch.set_num_threads(threads)

    surprises = {name: why for name, why in failures.items() if name not in EXCEPTIONS}
    stale = sorted(set(EXCEPTIONS) - set(failures))
    total = passed + len(failures)
    print(
        f"\n{passed} of {total} operators equal to the CPU; exceptions: {sorted(failures)}; no samples: {without_samples}"
    )
    assert len(without_samples) <= 12
    assert not surprises, "\n".join(f"{name}: {why}" for name, why in surprises.items())
    assert not stale, f"these pass now: take them off EXCEPTIONS and out of docs/device.md: {stale}"
    assert total > 600, "the database shrank: is it still torch's whole list?"
    assert passed >= 0.99 * total
    sharded = sum(counts["sharded"] for counts in torch.mgpu.op_stats().values())
    assert sharded > 5_000, f"only {sharded} runs were split"


@pytest.mark.usefixtures("split_everything")
def test_in_place_variants_give_the_cpus_values() -> None:
    failures: dict[str, str] = {}
    compared = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            name = full_name(op)
            if op.inplace_variant is None or torch.float32 not in op.dtypes or is_random(name):
                continue
            for sample in itertools.islice(
                op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES
            ):
                if not isinstance(sample.input, torch.Tensor):
                    continue
                arguments = (sample.input, sample.args, dict(sample.kwargs))
                here, there = sample.input.clone(), moved(arguments)
                addresses = here.data_ptr(), there[0].data_ptr()
                try:
                    op.inplace_variant(here, *sample.args, **sample.kwargs)
                except Exception:
                    continue  # the CPU refuses: a result of another shape or dtype
                try:
                    op.inplace_variant(there[0], *there[1], **there[2])
                    torch.testing.assert_close(there[0].cpu(), here, rtol=1e-4, atol=1e-4, equal_nan=True)
                    assert here.data_ptr() != addresses[0] or there[0].data_ptr() == addresses[1]
                    compared += 1
                except Exception as error:
                    failures[name] = str(error).strip().splitlines()[0]
    assert not {name: why for name, why in failures.items() if name not in EXCEPTIONS}
    assert compared > 500
