# SPDX-License-Identifier: Apache-2.0
"""Numbers come to tensorboard under the names and with the values that Nerfstudio's own writer gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nerfstudio.configs import base_config  # noqa: F401  first: Nerfstudio's writer and its configs import each other
from nerfstudio.utils import writer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ns_mgpu_splat.nerfstudio.scalars import write_out


def fill() -> None:
    for step in (10, 20):
        writer.put_scalar("Train Loss", torch.tensor(0.5 + step), step)
        writer.put_scalar(writer.EventName.ETA, 3 * step, step)
        writer.put_dict("Train Metrics Dict", {"psnr": torch.tensor(20.0 + step), "gaussian_count": 7}, step)
    writer.put_image("Eval Images/img", torch.zeros(4, 5, 3), 20)


def found(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    numbers = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return numbers | {
        tag: [(e.step, float(e.width)) for e in events.Images(tag)] for tag in events.Tags()["images"]
    }


def test_numbers_are_those_of_nerfstudios_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, write in (("one by one", writer.write_out_storage), ("together", write_out)):
        place = writer.TensorboardWriter(tmp_path / name)
        monkeypatch.setattr(writer, "EVENT_WRITERS", [place])
        monkeypatch.setattr(writer, "EVENT_STORAGE", [])
        fill()
        write()
        assert writer.EVENT_STORAGE == []
        place.tb_writer.close()
    theirs, ours = found(tmp_path / "one by one"), found(tmp_path / "together")
    assert len(theirs) == 5
    assert ours == theirs
