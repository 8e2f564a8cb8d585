"""A small game to start from: put the things on the floor where they belong. Turn it into your own."""

from g2po_trl import Observation, PromptTemplate, StepResult, TextEnvironment

PLACES = {
    "fridge": ["apple", "egg"],
    "cabinet": ["cup", "plate"],
    "desk": ["pen", "laptop"],
    "bed": ["pillow", "newspaper"],
}
WORDING = "Task: {task}\nSeen: {observation}\nActions:\n{actions}"


class TidyEnvironment(TextEnvironment):
    # What the model reads. Without it, prompts show the last steps as well, and explain the format of a completion.
    prompt_template = PromptTemplate(first=WORDING, later=WORDING)

    def reset(self, things: list[str]) -> Observation:
        """Start a task; the arguments are a line of tasks.jsonl."""
        self.things = list(things)  # the first is in the hand, the others are on the floor
        return self.observe()

    def step(self, action: str) -> StepResult:
        """Play an action of the model; an impossible action changes nothing."""
        won, note = False, ""
        if action in self.moves():
            if action in self.moves(right=True):
                self.things.pop(0)
                won = not self.things
            else:
                note = "Wrong place. "
        return StepResult(self.observe(note), reward=10.0 if won else 0.0, terminated=not self.things)

    def moves(self, right: bool = False) -> list[str]:
        """Return the moves of the thing in the hand, or only the right one."""
        hand = self.things[:1]
        return [f"move {it} to {place}" for it in hand for place in PLACES if it in PLACES[place] or not right]

    def observe(self, note: str = "") -> Observation:
        """Return what the model sees. Equal keys (by default: equal texts) are one state of the graph."""
        hand, floor = (", ".join(things) or "nothing" for things in (self.things[:1], self.things[1:]))
        text = f"You hold {hand}. On the floor: {floor}."
        return Observation(note + text, state_key=text, admissible_actions=self.moves(), task="tidy up")


def expert(game: TidyEnvironment, rng) -> str:
    """Return an expert's next action, for `g2po teach`: it knows the fridge, and guesses the other places."""
    return rng.choice(game.moves(right=game.things[0] in PLACES["fridge"]))
