# SPDX-License-Identifier: Apache-2.0
"""Write a step's numbers out: to tensorboard all in one event.

Nerfstudio's writers take one number at a time, and tensorboard's makes an event of each and wakes a thread for it, with which
the training loop then shares Python's interpreter: a dozen numbers every ten steps cost as much as the steps themselves.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventType, LocalWriter, TensorboardWriter

from ns_mgpu_splat.nerfstudio.event_bytes import event_of, picture_event_of


def write_out() -> None:
    """What `writer.write_out_storage()` does, and clears the storage."""
    storage = writer.EVENT_STORAGE
    for place in writer.EVENT_WRITERS:
        if isinstance(place, LocalWriter):
            if storage:
                place.write_stats_log(storage[0]["step"])
        elif isinstance(place, TensorboardWriter):
            _to_tensorboard(place, storage)
        else:
            for event in storage:
                getattr(place, event["write_type"].value)(event["name"], event["event"], event["step"])
    storage.clear()


def _to_tensorboard(place: TensorboardWriter, storage: list[dict[str, Any]]) -> None:
    """Numbers of a step together, under the names that Nerfstudio gives them; pictures without its PNGs' slow compression."""
    numbers: dict[int, dict[str, float]] = defaultdict(dict)
    for event in storage:
        kind, name, value, step = event["write_type"], event["name"], event["event"], event["step"]
        if kind is EventType.SCALAR:
            numbers[step][name] = float(value)
        elif kind is EventType.DICT:
            numbers[step].update({f"{name}/{key}": float(entry) for key, entry in value.items()})
        elif kind is EventType.IMAGE and value.shape[-1] == 3:
            _write(place, picture_event_of(step, name, writer.to8b(value).numpy()))
        else:
            getattr(place, kind.value)(name, value, step)
    for step, values in numbers.items():
        _write(place, event_of(step, values))


def _write(place: TensorboardWriter, data: bytes) -> None:
    """Hand a serialised event to the thread that writes the file."""
    writer_of_file = place.tb_writer._get_file_writer().event_writer
    queue = getattr(writer_of_file, "_async_writer", None)  # of tensorboard 2: takes bytes
    if queue is not None:
        queue.write(data)
        return
    from tensorboard.compat.proto.event_pb2 import Event

    writer_of_file.add_event(Event.FromString(data))
