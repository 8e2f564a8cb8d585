"""An environment of trainers whose episodes are recorded ones; apart, so that its workers import little."""

from g2po_trl import Observation, StepResult, TextEnvironment


class NeverPlayed(TextEnvironment):
    """Lets a trainer be made."""

    def reset(self, seed):
        return Observation(f"room {seed}", task="go")

    def step(self, action):
        return StepResult("end", reward=0.0, terminated=True)
