# SPDX-License-Identifier: Apache-2.0
"""A config.yml that was written before an option came: the option has its default, whatever kind of default that is."""

from __future__ import annotations

import dataclasses
from typing import Any


class FillsIn:
    """For dataclasses of options: what a saved one lacks is filled in where it is loaded (by YAML, which calls no `__init__`)."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.name not in state and field.default_factory is not dataclasses.MISSING:
                setattr(self, field.name, field.default_factory())
