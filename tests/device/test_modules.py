# SPDX-License-Identifier: Apache-2.0
"""Unmodified model code trains on `mgpu` as on the CPU. Oracle: the same code and seed on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Sequential):
    """Two convolutions with normalisation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Two levels down, two up, skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = Block(3, 8), Block(8, 16), Block(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.third, self.fourth = Block(32, 8), Block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        a = self.first(image)
        b = self.second(F.max_pool2d(a, 2))
        c = self.up(self.bottom(F.avg_pool2d(b, 2)))
        d = F.interpolate(
            self.third(torch.cat([b, c], 1)), scale_factor=2, mode="bilinear", align_corners=False
        )
        return self.head(self.fourth(torch.cat([a, d], 1)))


def losses(device: str, steps: int, images: int = 2, height: int = 32, width: int = 48) -> list[float]:
    """Training losses of the U-Net on a batch of images."""
    torch.manual_seed(0)
    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    image = torch.rand(images, 3, height, width, generator=generator)
    mask = (image.mean(1, keepdim=True) > 0.5).float()
    image, mask = image.to(device), mask.to(device)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(image), mask)
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.usefixtures("split_everything")
def test_a_unet_trains_with_the_cpus_losses() -> None:
    want, got = losses("cpu", 25), losses("mgpu", 25)
    assert want[-1] < 0.7 * want[0]
    # float32 sums in another order: differences grow with the steps
    assert got[:5] == pytest.approx(want[:5], rel=1e-5)
    assert got == pytest.approx(want, rel=1e-3)


@pytest.mark.usefixtures("split_everything")
def test_layers_equal_the_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 32, 32, generator=generator)
    window = torch.rand(3, 1, 11, 11, generator=generator)
    grid = torch.rand(1, 8, 8, 2, generator=generator) * 2 - 1
    query = torch.rand(1, 2, 8, 16, generator=generator)
    there = image.to("mgpu")
    for got, want in (
        (
            F.conv2d(there, window.to("mgpu"), groups=3, padding=5),
            F.conv2d(image, window, groups=3, padding=5),
        ),
        (F.avg_pool2d(there, 2), F.avg_pool2d(image, 2)),
        (
            F.grid_sample(there, grid.to("mgpu"), align_corners=False),
            F.grid_sample(image, grid, align_corners=False),
        ),
        (F.softmax(there, 1), F.softmax(image, 1)),
        (
            F.scaled_dot_product_attention(*[query.to("mgpu")] * 3),
            F.scaled_dot_product_attention(query, query, query),
        ),
        (
            nn.Embedding.from_pretrained(query[0, 0]).to("mgpu")(torch.arange(3, device="mgpu")),
            query[0, 0, :3],
        ),
    ):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


def test_autocast_lowers_matmul_and_keeps_float32_where_torch_says() -> None:
    x = torch.randn(8, 4, device="mgpu", requires_grad=True)
    with torch.autocast("mgpu", dtype=torch.bfloat16):
        product = x @ x.t()
        assert product.dtype == torch.bfloat16
        assert F.mse_loss(product, torch.zeros_like(product)).dtype == torch.float32
        assert torch.mgpu.is_autocast_enabled()
    assert (x @ x.t()).dtype == torch.float32
    product.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_compile_with_eager_backends() -> None:
    x = torch.randn(20, 3, device="mgpu")
    function = torch.compile(lambda t: t.exp().sum(1) * 2, backend="aot_eager")
    torch.testing.assert_close(function(x), x.exp().sum(1) * 2)


def test_tracing_and_fake_tensors() -> None:
    module, x = nn.Linear(3, 2).to("mgpu"), torch.randn(5, 3, device="mgpu")
    torch.testing.assert_close(torch.jit.trace(module, (x,))(x), module(x))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert (torch.empty(3, 4, device="mgpu") @ torch.empty(4, 5, device="mgpu")).device.type == "mgpu"
