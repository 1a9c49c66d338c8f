# SPDX-License-Identifier: Apache-2.0
"""The float64 twin: Gaussian splatting in plain PyTorch, pixel by pixel, from the formulas of design.md.

It imports nothing of the package under test. It holds for any scene that fits in memory as (pixels x Gaussians); it
errs only by float64 rounding. Pairs that contribute are found once (`Contributions`) and can be held fixed, so that
finite differences and autograd see a smooth function.

Sources: EWA splatting (Zwicker et al. 2001), 3DGS (Kerbl et al. 2023), the documentation of `cv2.fisheye`, gsplat
1.4's `_torch_impl.py` for the clamp of the Jacobian, Mip-Splatting (arXiv 2311.16493) for the compensation, e3nn/3DGS
for the order and signs of SH.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEAR, DILATION, ALPHA_MIN, ALPHA_MAX, T_MIN = 0.01, 0.3, 1.0 / 255.0, 0.99, 1e-4


@dataclass
class TwinCamera:
    """viewmat (4, 4) world to camera, OpenCV; pixels (of "ortho": pixels a unit). distortion: k1..k4 of a "fisheye"."""

    viewmat: Tensor
    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    model: str = "pinhole"
    distortion: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)


@dataclass
class Projected:
    """All N Gaussians in one camera; `visible` (N,) says which may be drawn."""

    means2d: Tensor  # (N, 2)
    conics: Tensor  # (N, 3)
    opacities: Tensor  # (N,)
    colors: Tensor  # (N, 3)
    depths: Tensor  # (N,)
    visible: Tensor  # (N,) bool


def rotation(quats: Tensor) -> Tensor:
    """(N, 4) wxyz, any length, to (N, 3, 3)."""
    w, x, y, z = (quats / quats.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return torch.stack(rows, -1).reshape(-1, 3, 3)


def sh_color(degree: int, directions: Tensor, sh: Tensor) -> Tensor:
    """Colours (N, 3) of coefficients (N, K, 3) along directions (N, 3) of any length; + 0.5, clamped at 0."""
    x, y, z = (directions / directions.norm(dim=-1, keepdim=True)).unbind(-1)
    one = torch.ones_like(x)
    basis = [0.28209479177387814 * one]
    if degree >= 1:
        c = 0.4886025119029199
        basis += [-c * y, c * z, -c * x]
    if degree >= 2:
        c = (
            1.0925484305920792,
            -1.0925484305920792,
            0.31539156525252005,
            -1.0925484305920792,
            0.5462742152960396,
        )
        basis += [
            c[0] * x * y,
            c[1] * y * z,
            c[2] * (2 * z * z - x * x - y * y),
            c[3] * x * z,
            c[4] * (x * x - y * y),
        ]
    if degree >= 3:
        c3 = (-0.5900435899266435, 2.890611442640554, -0.4570457994644658, 0.3731763325901154, -0.4570457994644658,
              1.445305721320277, -0.5900435899266435)  # fmt: skip
        basis += [
            c3[0] * y * (3 * x * x - y * y),
            c3[1] * x * y * z,
            c3[2] * y * (4 * z * z - x * x - y * y),
            c3[3] * z * (2 * z * z - 3 * x * x - 3 * y * y),
            c3[4] * x * (4 * z * z - x * x - y * y),
            c3[5] * z * (x * x - y * y),
            c3[6] * x * (x * x - 3 * y * y),
        ]
    values = torch.stack(basis, -1)
    return ((values[..., None] * sh[:, : values.shape[-1]]).sum(1) + 0.5).clamp_min(0.0)


def fisheye_pixel(point: Tensor, camera: TwinCamera) -> Tensor:
    """Where a fisheye sees a point (3,) of the camera, (2,). OpenCV's formula; its Jacobian is autograd's."""
    k1, k2, k3, k4 = camera.distortion
    x, y, z = point
    r = torch.sqrt(x * x + y * y)
    t = torch.atan2(r, z)
    d = t + k1 * t**3 + k2 * t**5 + k3 * t**7 + k4 * t**9
    return torch.stack([camera.fx * x * d / r + camera.cx, camera.fy * y * d / r + camera.cy])


def fisheye_limit(distortion: tuple[float, ...]) -> float:
    """The first angle, in steps of 1e-5, where the image stops growing; at most 170 degrees."""
    k1, k2, k3, k4 = distortion
    t = torch.arange(0.0, 2.967, 1e-5, dtype=torch.float64)
    grows = 1 + 3 * k1 * t**2 + 5 * k2 * t**4 + 7 * k3 * t**6 + 9 * k4 * t**8 > 0
    return 2.967 if bool(grows.all()) else float(t[int(grows.to(torch.uint8).argmin())])


def means_and_jacobians(points: Tensor, camera: TwinCamera) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of points (N, 3) of the camera: pixels (N, 2), the projection's Jacobian (N, 2, 3) as splats are drawn with it,
    depths (N,), and which are within what the camera sees (N,)."""
    x, y, z = points.unbind(-1)
    zero = torch.zeros_like(z)
    if camera.model == "fisheye":
        from torch.func import jacrev, vmap

        def pixel(point: Tensor) -> Tensor:
            return fisheye_pixel(point, camera)

        with torch.no_grad():
            distance = points.norm(dim=-1)
            angle = torch.atan2((x * x + y * y).sqrt(), z)
            seen = (distance > NEAR) & (angle <= fisheye_limit(camera.distortion))
        aside = torch.tensor([1.0, 1.0, 1.0], dtype=points.dtype)
        points = torch.where(seen[:, None], points, aside)
        return vmap(pixel)(points), vmap(jacrev(pixel))(points), points.norm(dim=-1), seen
    in_front = z > NEAR
    if camera.model == "ortho":
        pixels = torch.stack([camera.fx * x + camera.cx, camera.fy * y + camera.cy], -1)
        jacobian = torch.tensor([[camera.fx, 0, 0], [0, camera.fy, 0]], dtype=points.dtype)
        return pixels, jacobian.expand(len(points), 2, 3), z, in_front
    z = torch.where(in_front, z, torch.ones_like(z))
    tan_x, tan_y = 0.5 * camera.width / camera.fx, 0.5 * camera.height / camera.fy
    u = (x / z).clamp(
        -(camera.cx / camera.fx + 0.3 * tan_x), (camera.width - camera.cx) / camera.fx + 0.3 * tan_x
    )
    v = (y / z).clamp(
        -(camera.cy / camera.fy + 0.3 * tan_y), (camera.height - camera.cy) / camera.fy + 0.3 * tan_y
    )
    jacobian = torch.stack(
        [camera.fx / z, zero, -camera.fx * u / z, zero, camera.fy / z, -camera.fy * v / z], -1
    ).reshape(-1, 2, 3)
    pixels = torch.stack([camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy], -1)
    return pixels, jacobian, z, in_front


def project(
    columns: dict[str, Tensor], camera: TwinCamera, *, antialiased: bool, sh_degree: int
) -> Projected:
    """Columns as in the table (log scales, logit opacities), float64."""
    view_rotation, translation = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
    means_camera = columns["means"] @ view_rotation.T + translation
    means2d, jacobian, depths, in_front = means_and_jacobians(means_camera, camera)
    half = rotation(columns["quats"]) * columns["scales"].exp()[:, None, :]
    covariance = half @ half.transpose(1, 2)
    to_image = jacobian @ view_rotation
    cov2d = to_image @ covariance @ to_image.transpose(1, 2)
    det = cov2d[:, 0, 0] * cov2d[:, 1, 1] - cov2d[:, 0, 1] ** 2
    dilated = cov2d + DILATION * torch.eye(2, dtype=cov2d.dtype)
    dilated_det = dilated[:, 0, 0] * dilated[:, 1, 1] - dilated[:, 0, 1] ** 2
    conics = torch.stack([dilated[:, 1, 1], -dilated[:, 0, 1], dilated[:, 0, 0]], -1) / dilated_det[:, None]
    opacities = columns["opacities"].sigmoid()
    if antialiased:
        opacities = opacities * (det / dilated_det).clamp_min(1e-30).sqrt()
    if camera.model == "ortho":
        axis = torch.tensor([0.0, 0.0, 1.0], dtype=translation.dtype)
        directions = torch.linalg.solve(view_rotation, axis).expand(len(means_camera), 3)
    else:
        directions = columns["means"] + torch.linalg.solve(view_rotation, translation)
    sh = torch.cat([columns["sh0"][:, None], columns["shN"]], 1)
    colors = sh_color(sh_degree, directions, sh)
    return Projected(means2d, conics, opacities, colors, depths, in_front & (opacities >= ALPHA_MIN))


@dataclass
class Contributions:
    """Which Gaussians contribute to which pixels: order (N,) by depth then row, mask (P, N) in that order, and where
    alpha is capped."""

    order: Tensor
    mask: Tensor
    capped: Tensor


def blend(
    p: Projected, camera: TwinCamera, background: Tensor | None, fixed: Contributions | None = None
) -> tuple[Tensor, Tensor, Tensor, Contributions]:
    """Images rgb (H, W, 3), expected depth (H, W, 1), accumulation (H, W, 1), and the pairs that made them.

    With `fixed`, those pairs and caps are used again whatever the new values are.
    """
    dtype = p.means2d.dtype
    ys, xs = torch.meshgrid(
        torch.arange(camera.height, dtype=dtype) + 0.5,
        torch.arange(camera.width, dtype=dtype) + 0.5,
        indexing="ij",
    )
    pixels = torch.stack([xs, ys], -1).reshape(-1, 1, 2)
    order = fixed.order if fixed else torch.sort(p.depths, stable=True).indices
    delta = pixels - p.means2d[order]
    dx, dy = delta.unbind(-1)
    a, b, c = p.conics[order].unbind(-1)
    raw = p.opacities[order] * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)
    if fixed is None:
        with torch.no_grad():
            alpha = raw.clamp_max(ALPHA_MAX)
            hit = (alpha >= ALPHA_MIN) & p.visible[order]
            after = torch.cumprod(torch.where(hit, 1 - alpha, torch.ones_like(alpha)), 1)
            fixed = Contributions(order, hit & (after > T_MIN), raw >= ALPHA_MAX)
    alpha = torch.where(fixed.capped, torch.full_like(raw, ALPHA_MAX), raw)
    alpha = torch.where(fixed.mask, alpha, torch.zeros_like(raw))
    after = torch.cumprod(1 - alpha, 1)
    before = torch.cat([torch.ones_like(after[:, :1]), after[:, :-1]], 1)
    weight = alpha * before
    left = after[:, -1:] if order.numel() else torch.ones(len(pixels), 1, dtype=dtype)
    rgb = weight @ p.colors[order]
    if background is not None:
        rgb = rgb + left * background
    accumulation = 1 - left
    depth = (weight @ p.depths[order][:, None]) / accumulation.clamp_min(1e-10)
    shape = (camera.height, camera.width)
    return rgb.reshape(*shape, 3), depth.reshape(*shape, 1), accumulation.reshape(*shape, 1), fixed


def render(
    columns: dict[str, Tensor],
    camera: TwinCamera,
    *,
    background: Tensor | None = None,
    antialiased: bool = False,
    sh_degree: int = 3,
    fixed: Contributions | None = None,
) -> tuple[Tensor, Tensor, Tensor, Contributions]:
    """Project and blend: see `blend` for what comes back."""
    projected = project(columns, camera, antialiased=antialiased, sh_degree=sh_degree)
    return blend(projected, camera, background, fixed)
