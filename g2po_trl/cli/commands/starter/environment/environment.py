"""A small game to start from: fetch the coin and put it on the table in the hall. Make it your own."""

from g2po_trl import Observation, StepResult, TextEnvironment

DOORS = {
    "hall": ["kitchen", "study"],
    "kitchen": ["hall", "cellar"],
    "study": ["hall", "attic"],
    "cellar": ["kitchen"],
    "attic": ["study"],
}


class CoinEnvironment(TextEnvironment):
    def reset(self, start: str, coin: str) -> Observation:
        """Start a task; the arguments are a line of tasks.jsonl."""
        self.room, self.coin = start, coin  # the coin's room, or "hand" or "table"
        self.task = f"The coin is in the {coin}. Put it on the table in the hall."
        return self.observe()

    def step(self, action: str) -> StepResult:
        """Play an action of the model; what is not possible here changes nothing."""
        over = self.coin == "table"
        if action in self.actions():
            if action.startswith("go to "):
                self.room = action.removeprefix("go to ")
            else:
                self.coin = {"take the coin": "hand", "put the coin on the table": "table"}[action]
        done = self.coin == "table"
        return StepResult(self.observe(), reward=10.0 if done and not over else 0.0, terminated=done)

    def actions(self) -> list[str]:
        here = ["take the coin"] if self.coin == self.room else []
        here += ["put the coin on the table"] if (self.room, self.coin) == ("hall", "hand") else []
        return [*here, *(f"go to {room}" for room in DOORS[self.room])]

    def observe(self) -> Observation:
        """Equal texts are one state of the graph (or give a state_key)."""
        text = f"You are in the {self.room}." + {"hand": " You hold the coin."}.get(self.coin, "")
        text += {self.room: " The coin is here.", "table": " The coin is on the table."}.get(self.coin, "")
        return Observation(text, admissible_actions=self.actions(), task=self.task)


def expert(game: CoinEnvironment) -> str:
    """Return the next action of a demonstration, for `g2po teach`."""
    actions, goal = game.actions(), "hall" if game.coin == "hand" else game.coin
    return actions[0] if game.room == goal else f"go to {way(game.room, goal)[0]}"


def way(start: str, end: str) -> list[str]:
    """Return the rooms of the shortest way."""
    ways = [[start]]
    while ways[0][-1] != end:
        ways = ways[1:] + [[*ways[0], room] for room in DOORS[ways[0][-1]]]
    return ways[0][1:]
