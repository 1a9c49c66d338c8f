# SPDX-License-Identifier: Apache-2.0
"""What a run is told of its schedule: one advice at most. Of a resumed one two came, which contradicted each other."""

from __future__ import annotations

import pytest

from ns_mgpu_splat.nerfstudio.schedule import schedule_advice

pytestmark = pytest.mark.any_mesh


@pytest.mark.parametrize(
    ("end", "schedule", "former", "advice"),
    [
        (300, 30_000, 400, "add --schedule-steps 400."),
        (300, 30_000, 30_000, "add --schedule-steps 300."),
        (300, 300, 30_000, "add --schedule-steps 30000."),
        (300, 300, 300, None),
        (15_000, 30_000, 30_000, None),
    ],
)
def test_one_advice_at_most(end: int, schedule: int, former: int, advice: str | None) -> None:
    said = schedule_advice(end, schedule, former)
    if advice is None:
        assert said is None
    else:
        assert said is not None
        assert said.endswith(advice)
        assert said.count("add --schedule-steps") == 1
