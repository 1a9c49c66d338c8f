# SPDX-License-Identifier: Apache-2.0
"""Photographs on the device of the model: all of them where they fit, else copied a few steps ahead of their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ns_mgpu_splat.data.cache import BoundedCache
    from ns_mgpu_splat.nerfstudio.datamanager import Picture

kAhead = 2  # images on their way to the device


@dataclass
class DeviceImage:
    """An image (H, W, 3 or 4) uint8 and its mask (H, W) bool on the device."""

    image: Tensor
    mask: Tensor | None
    picture: Any = None  # the host's copy, kept while it is being copied
    copied: Any = None  # event on the copying stream; None: in order with the training stream


class ImageFeed:
    """Hands out images on the device by index.

    Args:
        pictures: the decoded images on the host.
        total: bytes of all images. limit: bytes that may stay on the device: if `total` is more, images are copied when
            their turn is near and forgotten after it.
        device: where to.
    """

    def __init__(
        self, pictures: BoundedCache[Picture], total: int, limit: int, device: torch.device | str
    ) -> None:
        self.pictures, self.device = pictures, device
        self.resident = total <= limit
        self._there: dict[int, DeviceImage] = {}
        self._stream: Any = None

    def has(self, index: int) -> bool:
        """Whether an image is on the device or on its way there."""
        return index in self._there

    def resting(self, index: int) -> DeviceImage | None:
        """An image that came to the device to stay, if it is there; nothing is read ahead."""
        return self._there.get(index) if self.resident else None

    def get(self, index: int, coming: Sequence[int] = ()) -> DeviceImage:
        """An image that work given to the device from now on may read; `coming` are wanted next, in this order."""
        found = self._there.get(index)
        if found is None:
            found = self._copy(self.pictures.get(index))
        if found.copied is not None:
            torch.accelerator.current_stream().wait_event(found.copied)
        if self.resident:
            found.picture = found.copied = None
            self._there[index] = found
            missing = [i for i in coming if i not in self._there]
            if missing:
                self.pictures.prefetch(missing)
            return found
        # a copy that nobody came for is waited for before its memory goes back
        for other in [i for i in self._there if i != index and i not in coming]:
            self._wait(self._there.pop(other))
        self._there.pop(index, None)
        self.pictures.prefetch(coming)
        for near in coming[:kAhead]:
            picture = None if near in self._there else self.pictures.ready(near)
            if picture is not None:
                self._there[near] = self._copy(picture, ahead=True)
        return found

    def _copy(self, picture: Picture, ahead: bool = False) -> DeviceImage:
        """Start a copy; ahead of use, on a stream of its own where the host's memory is pinned."""
        if not (ahead and picture.image.is_pinned()):
            return self._copied(picture)
        # allocated in order with the training stream, so the memory may be given back without asking this one
        training = torch.accelerator.current_stream()
        out = DeviceImage(_like(picture.image, self.device), None, picture)
        if picture.mask is not None:
            out.mask = _like(picture.mask[..., 0], self.device)
        if self._stream is None:
            self._stream = torch.Stream(device=self.device)
        self._stream.wait_stream(training)
        with self._stream:
            out.image.copy_(picture.image, non_blocking=True)
            if out.mask is not None:
                assert picture.mask is not None
                out.mask.copy_(picture.mask[..., 0], non_blocking=True)
            out.copied = self._stream.record_event()
        return out

    def _copied(self, picture: Picture) -> DeviceImage:
        mask = None if picture.mask is None else picture.mask[..., 0].contiguous().to(self.device)
        return DeviceImage(picture.image.to(self.device, non_blocking=True), mask, picture)

    @staticmethod
    def _wait(image: DeviceImage) -> None:
        if image.copied is not None:
            torch.accelerator.current_stream().wait_event(image.copied)


def _like(host: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty(tuple(host.shape), dtype=host.dtype, device=device)
