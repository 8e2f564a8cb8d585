"""What the recorded runs play. Apart from them: workers import it, and torch and TRL with what trains."""

from toy_environments import Countdown

from g2po_trl import Observation, StepResult, TextEnvironment

LISTED = ["A", "b", "c", "d", "o", "say <anything>"]


class Goals(TextEnvironment):
    """Letters a..m win. Others go on, pay something, give up, are truncated, or break the environment."""

    def reset(self, seed, goal, **others):
        self.seed, self.turn, self.goal = seed, 0, goal
        return Observation(f"hall {seed % 4}", task=goal, admissible_actions=LISTED)

    def step(self, action):
        self.turn += 1
        letter = action[:1].lower()
        if self.goal == "break" or letter in "yz" and self.seed % 2:
            raise RuntimeError(letter)
        info = {"score": self.turn / 10, "score_half": 0.5} if self.seed % 3 else {}
        if letter == "x":
            info |= {"success": False, "failure_reason": "resigned: x"}
        won = "a" <= letter <= "m"
        listed = LISTED if self.turn % 2 else None
        seen = Observation(f"room {self.turn} {letter in 'nopq'}", admissible_actions=listed)
        paid = 10.0 * won + 0.5 * (letter == "o")
        return StepResult(seen, paid, terminated=won or letter == "x", truncated=letter == "t", info=info)


class Ladder(Countdown):
    """Episodes of a task are equally long, and paid by what was said last."""

    def step(self, action):
        result = super().step(action)
        return StepResult(result.observation, result.reward * (action[:1].lower() < "n"), result.terminated)
