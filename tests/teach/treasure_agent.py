"""Treasure as an agent that calls a tool for each way, and an expert that knows the format alone."""

WAYS = {"go_left": -1, "go_right": 1}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Go to the room on the {name.removeprefix('go_')}.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in WAYS
]


def look(position: int) -> str:
    return f"You are in room {position} of 7."


def find_treasure(task, client):
    """Play one task, and return the reward."""
    position, model = 3, client.openai()
    messages = [{"role": "system", "content": "Find the treasure."}, {"role": "user", "content": look(position)}]
    while True:
        answer = model.chat.completions.create(model=client.model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            position += WAYS.get(call.function.name, 0)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": look(position)})
            if position == task["treasure"]:
                return 10.0
        if not message.tool_calls or not 1 <= position <= 7:
            return 0.0


def expert(messages, tools, rng):
    """It knows how to call a tool, not which."""
    return {"name": rng.choice(list(WAYS)), "arguments": {}}
