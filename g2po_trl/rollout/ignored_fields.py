"""Say once what agents ask for and the trainer decides."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..trajectory import Trajectory

logger = logging.getLogger(__name__)


class IgnoredFields:
    """The fields of agents' requests that have no effect, each named once."""

    def __init__(self) -> None:
        self.named: set[str] = set()

    def name(self, trajectories: Iterable[Trajectory]) -> None:
        """Log a warning with the fields that have not been named before."""
        asked = {field for trajectory in trajectories for field in trajectory.info.get("ignored_fields", ())}
        if new := sorted(asked - self.named):
            self.named |= asked
            logger.warning(
                "The agent sets %s in its requests. Training decides how completions are sampled, so this has no "
                "effect: set temperature, top_p and the like in the trainer's configuration.",
                ", ".join(new),
            )
