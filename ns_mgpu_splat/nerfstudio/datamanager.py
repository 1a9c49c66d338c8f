# SPDX-License-Identifier: Apache-2.0
"""Hand out whole images and cameras, reading ahead and keeping a bounded number of bytes.

The order of training images is a function of (seed, step) alone: a resumed run sees the images that an uninterrupted
one would have seen, and there is no sampler state to lose. Images stay uint8 until the loss; feed.py brings them to the
device of the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.base_datamanager import DataManager
from nerfstudio.data.datamanagers.full_images_datamanager import (
    FullImageDatamanager,
    FullImageDatamanagerConfig,
)
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.datasets.base_dataset import InputDataset
from torch.nn import Parameter
from tyro.conf import Suppress

from ns_mgpu_splat.data.cache import BoundedCache
from ns_mgpu_splat.data.capture import kGiveData
from ns_mgpu_splat.data.checks import DatasetError, Level
from ns_mgpu_splat.data.depth import DepthSamples
from ns_mgpu_splat.data.images import ImageError, ImageSource
from ns_mgpu_splat.data.memory import available_memory
from ns_mgpu_splat.device import is_initialized, native
from ns_mgpu_splat.nerfstudio.dataparser import MgpuSplatDataParserConfig
from ns_mgpu_splat.nerfstudio.feed import DeviceImage, ImageFeed, kAhead
from ns_mgpu_splat.nerfstudio.older_runs import FillsIn
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.nerfstudio.tools import speaker

kMostThreads = 16  # that decode by themselves: beyond, memory and disk are the limit
kAheadShare = 4  # at most this part of the image cache is on its way


@dataclass
class MgpuSplatDatamanagerConfig(FillsIn, FullImageDatamanagerConfig):
    """Where images come from and how many of them stay in memory."""

    _target: type = field(default_factory=lambda: MgpuSplatDatamanager)
    """Class that hands out images."""
    data: Path | None = None
    """Folder of the capture; --data sets it."""
    dataparser: MgpuSplatDataParserConfig = field(default_factory=MgpuSplatDataParserConfig)  # type: ignore[assignment]
    """How the folder is read: down-scaling, held-out images, orientation, seed points."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """What to do about images that are missing, damaged or of the wrong size, and poses that are none: "stop" lists all of
    them and ends before training; "skip" lists them and goes on without."""
    image_cache_gib: float | None = None
    """Host memory for decoded images in GiB, at most three quarters of what is free when training starts; None takes half of
    that. Images beyond it are read again when their turn comes: raise it when steps wait for a slow disk."""
    device_cache_gib: float = 4.0
    """Memory of the device for training images in GiB, at most an eighth of what is free when training starts. If all fit,
    they are copied there once; if not, each is copied a little ahead of its use."""
    max_thread_workers: int | None = None
    """Threads that decode images ahead of use; None takes one a core, at most 16. Raise it when steps wait for images."""
    train_cameras_sampling_seed: int = 42
    """Seed of the order in which training images are drawn; every image is seen once an epoch."""

    wants_depth: Suppress[bool] = False  # the pipeline sets it where depth is supervised
    camera_res_scale_factor: Suppress[float] = 1.0
    eval_num_images_to_sample_from: Suppress[int] = -1
    eval_num_times_to_repeat_images: Suppress[int] = -1
    eval_image_indices: Suppress[tuple[int, ...] | None] = None
    cache_images: Suppress[Literal["cpu", "gpu"]] = "gpu"
    cache_images_type: Suppress[Literal["uint8", "float32"]] = "uint8"
    train_cameras_sampling_strategy: Suppress[Literal["random", "fps"]] = "random"
    fps_reset_every: Suppress[int] = 100
    masks_on_gpu: Suppress[bool] = False
    images_on_gpu: Suppress[bool] = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Exit with one sentence if an option is impossible."""
        for option, value, least in (
            ("image-cache-gib", self.image_cache_gib, 0),
            ("device-cache-gib", self.device_cache_gib, 0),
            ("max-thread-workers", self.max_thread_workers, 1),
            ("train-cameras-sampling-seed", self.train_cameras_sampling_seed, 0),
        ):
            if value is not None and not least <= value < math.inf:
                raise SystemExit(
                    f"mgpu-splat: --pipeline.datamanager.{option} is {value}, it must be at least {least}."
                )


@dataclass
class Picture:
    """A decoded image (H, W, 3 or 4) uint8 and its mask (H, W, 1) bool, on the host."""

    image: torch.Tensor
    mask: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of memory; torch rounds pinned memory up to a power of two."""
        parts = [self.image, *([self.mask] if self.mask is not None else [])]
        return sum(1 << (t.nbytes - 1).bit_length() if t.is_pinned() else t.nbytes for t in parts)


def read_picture(source: ImageSource) -> Picture:
    """Decode, rescale and undistort one image; in pinned memory where the mesh has GPUs."""
    image, mask = source.read()
    return Picture(_host_tensor(image), None if mask is None else _host_tensor(mask))


def _host_tensor(values: np.ndarray) -> torch.Tensor:
    """A writable tensor of an array, copied at most once."""
    # on a mesh of the host, pinned memory would only make a context on a GPU that nobody asked for
    if is_initialized() and native().flavour == "cuda":
        tensor = torch.empty(values.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(tensor.numpy(), values.view(np.uint8))
        return tensor.view(torch.bool) if values.dtype == np.bool_ else tensor
    return torch.from_numpy(values if values.flags.writeable else values.copy())


class SplatDataset(InputDataset):
    """Images of a split; items are what Nerfstudio's viewer and tools expect, `picture` is what training uses.

    Attributes:
        largest, total: bytes of the largest image and of all, decoded, with their masks.
        ahead: how many images may be on their way.
    """

    exclude_batch_keys_from_device = ["image", "mask"]  # noqa: RUF012 - Nerfstudio's type

    def __init__(
        self,
        outputs: DataparserOutputs,
        cache_bytes: int,
        workers: int,
        next_use: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        super().__init__(outputs)
        sources: list[ImageSource] = outputs.metadata["sources"]
        pixels = [s.camera.width * s.camera.height for s in sources]
        channels = 3 + bool(outputs.metadata.get("has_alpha")) + any(s.has_mask for s in sources)
        self.largest, self.total = max(pixels, default=0) * channels, sum(pixels) * channels
        # two a thread on their way, unless they are so large that they would fill the cache
        self.ahead = max(1, min(2 * workers, cache_bytes // (kAheadShare * max(1, self.largest))))
        self.pictures: BoundedCache[Picture] = BoundedCache(
            lambda index: read_picture(sources[index]),
            lambda picture: picture.nbytes,
            max(0, cache_bytes - self.ahead * self.largest),
            workers,
            next_use,
        )

    def picture(self, index: int) -> Picture:
        """The decoded image of an index, from memory or disk. Raises ImageError."""
        return self.pictures.get(index)

    def get_numpy_image(self, image_idx: int) -> np.ndarray:
        """(H, W, 3) uint8; transparent pixels on black, since Nerfstudio's tools write JPEG files."""
        image = self.picture(image_idx).image.numpy()
        if image.shape[2] == 4:
            image = (image[..., :3].astype(np.uint16) * image[..., 3:] // 255).astype(np.uint8)
        return image

    def get_data(self, image_idx: int, image_type: Literal["uint8", "float32"] = "float32") -> dict[str, Any]:
        """Nerfstudio's item: "image_idx", "image" and, where there is one, "mask"."""
        image = torch.from_numpy(self.get_numpy_image(image_idx))
        data: dict[str, Any] = {
            "image_idx": image_idx,
            "image": image.float() / 255 if image_type == "float32" else image,
        }
        mask = self.picture(image_idx).mask
        if mask is not None:
            data["mask"] = mask
        return data


class EvalImages:
    """All held-out images as (camera, batch), read one after the other; has a length, as Nerfstudio wants."""

    def __init__(self, dataset: SplatDataset, device: torch.device | str) -> None:
        self.dataset, self.device = dataset, device

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Cameras, dict[str, Any]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return make_batch(self.dataset, index, self.device)

    def __iter__(self) -> Iterator[tuple[Cameras, dict[str, Any]]]:
        for index in range(len(self)):
            self.dataset.pictures.prefetch(range(index + 1, min(index + 3, len(self))))
            yield self[index]


def make_batch(
    dataset: SplatDataset, index: int, device: torch.device | str
) -> tuple[Cameras, dict[str, Any]]:
    """One camera (batch shape (1,), on the host) and its image on `device`."""
    picture = dataset.picture(index)
    batch: dict[str, Any] = {"image_idx": index, "image": picture.image.to(device)}
    if picture.mask is not None:
        batch["mask"] = picture.mask.to(device)
    camera = dataset.cameras[index : index + 1]
    camera.metadata = {"cam_idx": index}
    return camera, batch


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` images in an epoch: a permutation that depends on nothing else."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class MgpuSplatDatamanager(FullImageDatamanager):
    """See the module's text. Exits with the list of everything that is wrong with the capture."""

    config: MgpuSplatDatamanagerConfig
    train_dataset: SplatDataset
    eval_dataset: SplatDataset

    def __init__(
        self,
        config: MgpuSplatDatamanagerConfig,
        device: torch.device | str = "cpu",
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        self.config = config
        self.device = device
        self.world_size, self.local_rank = world_size, local_rank
        self.sampler = None
        self.test_mode = test_mode
        self.test_split = "test" if test_mode in ("test", "inference") else "val"
        self.dataparser_config = config.dataparser
        if config.data is not None:
            config.dataparser.data = Path(config.data)
        else:
            config.data = config.dataparser.data
        levels: dict[str, Level] = {"val": "full", "test": "sizes", "inference": "none"}
        self.dataparser = config.dataparser.setup()
        self.dataparser.level = levels[test_mode]
        self.dataparser.want_points = test_mode == "val"
        self.dataparser.skip = config.on_bad_image == "skip"
        self.dataparser.workers = self._workers()
        self.dataparser.want_depth = config.wants_depth and test_mode == "val"
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._unreadable: set[int] = set()  # training images that turned out to be, with on-bad-image "skip"
        self._place = (0, 0)  # epoch and place in it of the step in progress
        self.includes_time = False
        try:
            self.train_dataparser_outputs = self.dataparser.get_dataparser_outputs(split="train")
            self.train_dataset = self.create_train_dataset()
            self.eval_dataset = self.create_eval_dataset()
        except DatasetError as error:
            moved = "" if test_mode == "val" else self._where_it_was()
            said = str(error).removesuffix(kGiveData) if moved else str(error)
            raise SystemExit(f"{speaker()}: {said}{moved}") from None
        self.exclude_batch_keys_from_device = self.train_dataset.exclude_batch_keys_from_device
        self._feed: ImageFeed | None = None
        # how to get the measured depths of each training image, and those that were wanted already
        self._depths: list[Callable[[], DepthSamples]] = self.train_dataset.metadata.pop("depths", [])
        self._measured: dict[int, DepthSamples] = {}
        self._next_eval = 0
        DataManager.__init__(self)

    def _where_it_was(self) -> str:
        """For a tool that opens a run whose photographs are gone: it has no --data."""
        data = self.config.data
        if data is None or data.exists():
            return ""
        if data.is_absolute():
            how = "That is where the photographs of this run were: put them back, or leave a link there with `ln -s`."
        else:
            how = (
                f"That is where the photographs of this run were, seen from the folder in which it was started, and not from "
                f"{Path.cwd()}: call this tool from there, or set `data` in the config.yml to the whole path."
            )
        return f" {how} mgpu-splat-export and mgpu-splat-info need none."

    def _workers(self) -> int:
        return self.config.max_thread_workers or min(kMostThreads, len(os.sched_getaffinity(0)))

    @cached_property
    def cache_bytes(self) -> int:
        """Host memory for decoded images, of training and held-out ones together."""
        wanted = self.config.image_cache_gib
        free = available_memory()
        return free // 2 if wanted is None else int(min(wanted * 2**30, free * 0.75))

    def create_train_dataset(self) -> SplatDataset:
        """The images to train on, with most of the cache."""
        outputs, workers = self.train_dataparser_outputs, self._workers()
        return SplatDataset(outputs, self.cache_bytes * 7 // 8, workers, self._next_use)

    def create_eval_dataset(self) -> SplatDataset:
        """The held-out images, with the rest of the cache."""
        outputs = self.dataparser.get_dataparser_outputs(split=self.test_split)
        return SplatDataset(outputs, self.cache_bytes // 8, self._workers())

    def train_index(self, step: int) -> int:
        """Which training image a step sees: with on-bad-image "skip", the next in order if it cannot be read."""
        for index in self._wanted(step):
            if self._readable(index):
                return index
        raise ImageError("None of the training images can be read any more.")

    def _wanted(self, step: int) -> Iterator[int]:
        """The image of a step, and those that would take its place."""
        count = len(self.train_dataset)
        epoch, place = divmod(step, count)
        order = self._order(epoch)[0]
        return (i for k in range(count) if (i := int(order[(place + k) % count])) not in self._unreadable)

    def _readable(self, index: int) -> bool:
        """Whether an image is there, where it matters; reads it if need be. Large captures are not decoded before."""
        if self.config.on_bad_image == "stop" or (self._feed is not None and self._feed.has(index)):
            return True
        try:
            self.train_dataset.pictures.get(index)
        except ImageError as error:
            self._unreadable.add(index)
            say("[bold yellow]A training image is left out from now on:[/bold yellow]")
            say(f"  - {error}", markup=False, highlight=False)
            return False
        return True

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The images of an epoch in their order, and the place of each image in it; of three epochs, kept."""
        found = self._orders.get(epoch)
        if found is None:
            order = epoch_order(self.config.train_cameras_sampling_seed, epoch, len(self.train_dataset))
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            found = self._orders[epoch] = (order, np.argsort(order))
        return found

    def _next_use(self, indices: np.ndarray) -> np.ndarray:
        """In how many places, counted from the beginning of this epoch, each training image is wanted next."""
        epoch, place = self._place
        now = self._order(epoch)[1][indices]
        return np.where(now > place, now, len(self.train_dataset) + self._order(epoch + 1)[1][indices])

    def read_ahead(self, step: int) -> None:
        """Let threads begin to read the images from a step on, so that the first steps do not wait for theirs."""
        data = self.train_dataset
        self._place = divmod(step, len(data))
        data.pictures.prefetch(self._coming(step))

    def bring_images(self, step: int, steps: int) -> Iterator[None]:
        """Bring the images of so many steps to the device, one an iteration, where all of them stay there; elsewhere none.

        An image that cannot be read, or for which there is no memory, is left for its step to say so.
        """
        if self._feed is None:
            self._feed = self._new_feed()
        if not self._feed.resident:
            return
        for s in range(step, step + min(steps, len(self.train_dataset))):
            with suppress(ImageError, torch.OutOfMemoryError):
                for index in islice(self._wanted(s), 1):
                    self.train_image(s, index)
            yield

    def _coming(self, step: int) -> list[int]:
        """The images of a step and of those after it, as many as may be on their way."""
        count = min(self.train_dataset.ahead, len(self.train_dataset) - 1)
        return [index for s in range(step, step + count) for index in islice(self._wanted(s), 1)]

    def next_train(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """The camera (on the host) and the image (uint8, on the model's device) of a step."""
        index = self.train_index(step)
        found = self.train_image(step, index)
        batch: dict[str, Any] = {"image_idx": index, "image": found.image}
        if found.mask is not None:
            batch["mask"] = found.mask[..., None]
        if self._depths:
            batch["depths"] = self.depth_samples(index)
        camera = self.train_dataset.cameras[index : index + 1]
        camera.metadata = {"cam_idx": index}
        return camera, batch

    def train_image(self, step: int, index: int) -> DeviceImage:
        """Image `index` = `train_index(step)` and its mask, on the model's device; those of the next steps are on their way."""
        if self._feed is None:
            self._feed = self._new_feed()
        found = self._feed.resting(index)
        if found is not None:
            return found
        self._place = divmod(step, len(self.train_dataset))
        return self._feed.get(index, self._coming(step + 1))

    def depth_samples(self, index: int) -> DepthSamples:
        """The measured depths of a training image, on the host; read when first wanted. Raises ImageError."""
        found = self._measured.get(index)
        if found is None:
            found = self._measured[index] = self._depths[index]()
        return found

    def _new_feed(self) -> ImageFeed:
        data = self.train_dataset
        return ImageFeed(data.pictures, data.total, self._device_limit(), self.device)

    def _device_limit(self) -> int:
        limit = self.config.device_cache_gib * 2**30
        if torch.device(self.device).type == "mgpu":
            limit = min(limit, torch.mgpu.mem_get_info()[0] / 8)  # type: ignore[attr-defined]
        return int(limit)

    def device_bytes(self) -> int:
        """Memory of the device that training images will take: all of them where they fit, else those on their way."""
        data = self.train_dataset
        return data.total if data.total <= self._device_limit() else (kAhead + 1) * data.largest

    def next_eval(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """The next held-out camera and image, in turn."""
        return self.next_eval_image(step)

    def next_eval_image(self, step: int) -> tuple[Cameras, dict[str, Any]]:
        """The next held-out camera and image, in turn; does not touch the order of training images."""
        index = self._next_eval % len(self.eval_dataset)
        self._next_eval += 1
        return make_batch(self.eval_dataset, index, self.device)

    @property
    def fixed_indices_eval_dataloader(self) -> EvalImages:  # type: ignore[override]
        """All held-out images, read lazily."""
        return EvalImages(self.eval_dataset, self.device)

    @property
    def train_cameras(self) -> Cameras:  # type: ignore[override]
        """Cameras of the training images, on the host."""
        return self.train_dataset.cameras

    @cached_property
    def cached_train(self) -> list[dict[str, torch.Tensor]]:
        """Not kept: images are read lazily. Nerfstudio's own code paths that ask for it are overridden."""
        raise RuntimeError("mgpu-splat reads images lazily; use next_train or train_dataset.picture(index).")

    @cached_property
    def cached_eval(self) -> list[dict[str, torch.Tensor]]:
        """Not kept, as `cached_train`."""
        raise RuntimeError("mgpu-splat reads images lazily; use fixed_indices_eval_dataloader.")

    @cached_property
    def _first_pixels(self) -> int:
        camera = self.train_dataset.cameras
        return int(camera.width[0].item() * camera.height[0].item())

    def get_train_rays_per_batch(self) -> int:
        """Pixels of the first training image; read from its camera, not from the image."""
        return self._first_pixels

    def get_param_groups(self) -> dict[str, list[Parameter]]:
        """Nothing here is trained."""
        return {}

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps to notice that a resumed run would see other images."""
        return {"seed": self.config.train_cameras_sampling_seed, "images": len(self.train_dataset)}
