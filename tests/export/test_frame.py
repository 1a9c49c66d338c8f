# SPDX-License-Identifier: Apache-2.0
"""Changing frames: against the twin's rotations and colours, and against the transform applied forwards."""

from __future__ import annotations

import numpy as np
import pytest
import saved_runs
import torch
import twin
from scipy.spatial.transform import Rotation

from ns_mgpu_splat.export.frame import Frame, quat_from_rotation, sh_rotation, world_frame


def random_rotation(seed: int) -> np.ndarray:
    return Rotation.random(random_state=seed).as_matrix()


def directions(count: int, seed: int = 0) -> np.ndarray:
    d = np.random.default_rng(seed).normal(size=(count, 3))
    return d / np.linalg.norm(d, axis=1, keepdims=True)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("mirrored", [False, True])
def test_turned_harmonics_have_the_old_colour_in_the_turned_direction(degree: int, mirrored: bool) -> None:
    rotation = random_rotation(degree) * (-1 if mirrored else 1)
    matrix = sh_rotation(rotation, degree)
    assert np.allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-12), "a rotation keeps energy"
    rows = 40
    sh = np.random.default_rng(1).normal(size=(rows, len(matrix), 3)) * 0.1
    turned = np.einsum("ij,njc->nic", matrix, sh)
    d = directions(rows)
    before = twin.sh_color(degree, torch.from_numpy(d), torch.from_numpy(sh))
    after = twin.sh_color(degree, torch.from_numpy(d @ rotation.T), torch.from_numpy(turned))
    assert torch.allclose(before, after, atol=1e-12)


def test_harmonics_turn_one_rotation_after_the_other() -> None:
    a, b = random_rotation(1), random_rotation(2)
    assert np.allclose(sh_rotation(a @ b, 3), sh_rotation(a, 3) @ sh_rotation(b, 3), atol=1e-12)


def test_a_quaternion_is_found_for_every_rotation() -> None:
    half_turns = [Rotation.from_rotvec(np.pi * np.eye(3)[i]).as_matrix() for i in range(3)]
    for rotation in [np.eye(3), *half_turns, *(random_rotation(seed) for seed in range(20))]:
        quat = quat_from_rotation(rotation)
        assert quat[0] >= 0
        assert np.allclose(
            twin.rotation(torch.from_numpy(quat)[None].double())[0].numpy(), rotation, atol=1e-12
        )


@pytest.mark.parametrize("mirrored", [False, True])
def test_covariances_and_means_go_along(mirrored: bool) -> None:
    rotation = random_rotation(5) * (-1 if mirrored else 1)
    frame = Frame("x", rotation, 7.0, np.array([1.0, -2.0, 3.0]), np.array([0.5, 0.0, 0.0]))
    columns = saved_runs.random_columns(30)
    moved = frame.apply({name: column.numpy() for name, column in columns.items()}, 3)

    def covariances(quats: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        half = twin.rotation(quats.double()) * scales.double().exp()[:, None]
        return half @ half.transpose(1, 2)

    before = covariances(columns["quats"], columns["scales"])
    after = covariances(torch.from_numpy(moved["quats"]), torch.from_numpy(moved["scales"]))
    q = torch.from_numpy(rotation)
    expected = 49.0 * q @ before @ q.T
    assert ((after - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max() < 1e-5
    means = columns["means"].double().numpy() @ rotation.T * 7 + [0.5, -2, 3]
    assert np.allclose(moved["means"], means, atol=1e-5)
    assert np.array_equal(moved["opacities"], columns["opacities"].numpy())
    assert np.array_equal(moved["sh0"], columns["sh0"].numpy())
    assert all(column.dtype == np.float32 for column in moved.values())


def test_no_frame_leaves_every_bit() -> None:
    columns = {name: column.numpy() for name, column in saved_runs.random_columns(9).items()}
    moved = Frame().apply(columns, 3)
    assert all(np.array_equal(moved[name], columns[name]) for name in columns)
    assert Frame().apply(columns, 1)["shN"].shape == (9, 3, 3)


def test_the_world_frame_undoes_the_dataparser_to_a_tenth_of_a_millimetre_at_utm_coordinates() -> None:
    """float32 keeps half a metre there."""
    rotation, centre, scale = random_rotation(3), np.array([445_123.75, 4_562_345.5, 210.25]), 1 / 80.0
    transform = np.hstack([rotation, -(rotation @ centre)[:, None]])
    world = np.random.default_rng(0).uniform(-100, 100, (50, 3)) + centre
    trained = ((world @ transform[:, :3].T + transform[:, 3]) * scale).astype(np.float32)
    frame = world_frame(transform, scale)
    assert np.abs(frame.positions(trained) - world).max() < 1e-4
    assert np.array_equal(frame.offset, np.round(centre))
    columns = saved_runs.random_columns(50)
    columns["means"] = torch.from_numpy(trained)
    moved = frame.apply({name: column.numpy() for name, column in columns.items()}, 3)
    assert np.abs(moved["means"].astype(np.float64) + frame.offset - world).max() < 1e-4
    assert np.allclose(moved["scales"], columns["scales"].numpy() + np.log(80.0), atol=1e-5)


def test_a_world_whose_origin_is_near_has_no_offset() -> None:
    transform = np.hstack([random_rotation(3), [[3.0], [-40.0], [5.0]]])
    assert not world_frame(transform, 1.0).offset.any()


@pytest.mark.parametrize(
    ("transform", "scale", "what"),
    [
        (np.diag([1.0, 1.0, 2.0, 0.0])[:3], 1.0, "must not stretch"),
        (np.full((3, 4), np.nan), 1.0, "finite"),
        (np.eye(3), 1.0, "3 x 4"),
        (np.eye(3, 4), 0.0, "above 0"),
    ],
)
def test_what_is_no_similarity_is_refused(transform: np.ndarray, scale: float, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        world_frame(transform, scale)


def test_y_up_turns_what_was_up_and_its_offset() -> None:
    transform = np.hstack([np.eye(3), [[-5e5], [-4e6], [-7e3]]])
    frame, turned = world_frame(transform, 0.5), world_frame(transform, 0.5).y_up()
    means = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)
    x, y, z = frame.positions(means)[0]
    assert np.array_equal(turned.positions(means)[0], [x, z, -y])
    assert np.array_equal(turned.offset, [5e5, 7e3, -4e6])
    assert np.linalg.det(turned.rotation) == pytest.approx(1.0)
