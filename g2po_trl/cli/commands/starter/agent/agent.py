"""An agent to start from: it walks through a house with one tool, on the `openai` client. Make it your own."""

import json

HOUSE = {
    "hall": {"north": "kitchen", "east": "study"},
    "kitchen": {"south": "hall", "east": "pantry"},
    "pantry": {"west": "kitchen", "south": "study"},
    "study": {"north": "pantry", "west": "hall", "east": "library"},
    "library": {"west": "study"},
}
DOOR = {"type": "string", "enum": ["north", "east", "south", "west"]}
PARAMETERS = {"type": "object", "properties": {"door": DOOR}, "required": ["door"]}
GO = {"name": "go", "description": "Go through a door of this room.", "parameters": PARAMETERS}


def go(room: str, arguments: str) -> str:
    """Return the room behind a door; the same room, if the model's call names none of its doors."""
    try:
        return HOUSE[room][json.loads(arguments)["door"]]
    except (ValueError, KeyError, TypeError):
        return room


def look(room: str) -> str:
    """Equal answers are one state of the graph: leave clocks and counters out."""
    return f"You are in the {room}. Doors: {', '.join(HOUSE[room])}."


def walk(task, client):
    """Play one task, a line of tasks.jsonl, and return the reward."""
    room, model = task["start"], client.openai()
    rules = f"Walk to the {task['goal']}: call the tool go, one door at a time."
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": look(room)}]
    tools = [{"type": "function", "function": GO}]
    for _ in range(8):
        answer = model.chat.completions.create(model=client.model, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            room = go(room, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look(room)})
        if room == task["goal"]:
            return 1.0
        if not message.tool_calls:
            break  # the model has stopped
    return 0.0


def expert(messages, tools):
    """Return the next call of a demonstration, for `g2po teach`: the first door on the shortest way."""
    goal = messages[0]["content"].removeprefix("Walk to the ").partition(":")[0]
    room = messages[-1]["content"].removeprefix("You are in the ").partition(".")[0]
    ways = [[(None, room)]]
    while ways[0][-1][1] != goal:
        ways = ways[1:] + [[*ways[0], step] for step in HOUSE[ways[0][-1][1]].items()]
    return {"name": "go", "arguments": {"door": ways[0][1][0]}}
