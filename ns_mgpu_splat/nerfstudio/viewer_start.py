# SPDX-License-Identifier: Apache-2.0
"""The end of `ns-viewer`'s start on a run of ours: where to look is said last, once it can be looked at."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from threading import Lock
from typing import Any, NoReturn

from ns_mgpu_splat.nerfstudio.say import say


def start_viewer(config: Any, pipeline: Any, step: int) -> NoReturn:
    """Serve a run in the browser until Ctrl-C, as `_start_viewer` (run_viewer.py:82), which speaks of its writers instead.

    Args: the run's TrainerConfig, its pipeline, and the step at which it was saved.
    """
    from nerfstudio.utils import writer
    from nerfstudio.viewer.viewer import Viewer

    viewer = Viewer(
        config.viewer,
        log_filename=config.get_base_dir() / config.viewer.relative_log_filename,
        datapath=pipeline.datamanager.get_datapath(),
        pipeline=pipeline,
        share=config.viewer.make_share_url,
        train_lock=Lock(),  # type: ignore[arg-type]
    )
    # the viewer asks this whether it may write how fast it draws; the writer it belongs to would write to the terminal
    writer.GLOBAL_BUFFER.update(
        max_iter=config.max_num_iterations,
        max_buffer_size=config.logging.max_buffer_size,
        steps_per_log=config.logging.steps_per_log,
        events={},
    )
    viewer.init_scene(
        train_dataset=pipeline.datamanager.train_dataset,
        train_state="completed",
        eval_dataset=pipeline.datamanager.eval_dataset,
    )
    viewer.update_scene(step=step)
    say(where_to_look(viewer.viewer_info), soft_wrap=True)
    while True:
        time.sleep(0.1)


def where_to_look(viewer_info: Sequence[str]) -> str:
    """A line with the addresses that Nerfstudio's viewer names."""
    addresses = re.findall(r"https?://\S+", " ".join(viewer_info))
    return f"Open {' or '.join(addresses)} in a browser. Ctrl-C ends the viewer."
