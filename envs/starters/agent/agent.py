"""An agent to start from: it puts things where they belong, through the `openai` client. Turn it into your own."""

PLACES = {
    "fridge": ["apple", "egg"],
    "cabinet": ["cup", "plate"],
    "desk": ["pen", "laptop"],
    "bed": ["pillow", "newspaper"],
}
RULES = f"Put each thing where it belongs: {', '.join(PLACES)}. Answer in one line: move THING to PLACE"


def look(things: list[str]) -> str:
    """Equal messages are one state of the graph: leave clocks and counters out."""
    return f"You hold {things[0]}. On the floor: {', '.join(things[1:]) or 'nothing'}."


def tidy(task, client):
    """Play one task, a line of tasks.jsonl, and return the reward."""
    things, note, model = list(task["things"]), "", client.openai()
    for _ in range(client.max_turns):
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": note + look(things)}]
        answer = model.chat.completions.create(model=client.model, messages=messages)
        text = answer.choices[0].message.content or ""
        right = text.strip() == f"move {things[0]} to {place_of(things[0])}"
        things, note = (things[1:], "") if right else (things, "Wrong place. ")
        if not things:
            return 1.0
    return 0.0


def place_of(thing: str) -> str:
    return next(place for place, things in PLACES.items() if thing in things)


def expert(messages, tools, rng):
    """Return an expert's next answer, for `g2po teach`: it knows the fridge, and guesses the other places."""
    thing = messages[-1]["content"].partition("You hold ")[2].partition(".")[0]
    return f"move {thing} to {'fridge' if thing in PLACES['fridge'] else rng.choice(list(PLACES))}"
