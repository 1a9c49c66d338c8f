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

from ns_mgpu_splat.nerfstudio.event_bytes import event_of


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
    """Numbers of a step together, under the names that Nerfstudio gives them; all else as it does."""
    from tensorboard.compat.proto.event_pb2 import Event

    numbers: dict[int, dict[str, float]] = defaultdict(dict)
    for event in storage:
        kind, name, value = event["write_type"], event["name"], event["event"]
        if kind is EventType.SCALAR:
            numbers[event["step"]][name] = float(value)
        elif kind is EventType.DICT:
            numbers[event["step"]].update({f"{name}/{key}": float(entry) for key, entry in value.items()})
        else:
            getattr(place, kind.value)(name, value, event["step"])
    writer_of_file = place.tb_writer._get_file_writer().event_writer
    queue = getattr(writer_of_file, "_async_writer", None)  # of tensorboard 2: takes bytes
    for step, values in numbers.items():
        data = event_of(step, values)
        if queue is not None:
            queue.write(data)
        else:
            writer_of_file.add_event(Event.FromString(data))
