"""Two walks of a robot, logged in each protocol: hall, kitchen, mug (8), and hall, cellar, hall (0)."""

import json

SYSTEM = {"role": "system", "content": "You are a robot."}
TASK = {"role": "user", "content": "Find the mug."}


def call(place, number=0):
    function = {"name": "go", "arguments": json.dumps({"to": place})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{number}", "function": function}]}


def seen(place, number=0):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": place}


def conversation(*places, number=0):
    """Go to each place in turn; the last message is the last result."""
    return [SYSTEM, TASK] + [message for place in places for message in (call(place, number), seen(place, number))]


def as_calls(messages):
    return [{"messages": messages[:i], "response": m} for i, m in enumerate(messages) if m["role"] == "assistant"]


# gamma 0.5: returns 2, 4 and 0, 0; V(start) = 1, V(kitchen) = 4,
# V(cellar) = 0. Not scaled: A_EP = ±4; A_NC = 4 - 2 and 0 - 2 at the start, 0 elsewhere; gains 3, 4, -1, 0 have mean
# 1.5.
PATHS = {"won": (8, ["kitchen", "mug"]), "lost": (0, ["cellar", "hall"])}
BY_HAND = [4 + 2 + 1.5, 4 + 0 + 2.5, -4 - 2 - 2.5, -4 + 0 - 1.5]


def as_items(messages):
    """Return the items of OpenAI's Responses that messages after the system's are."""
    items = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif role == "assistant":
            items.append({"type": "reasoning", "id": "rs", "summary": []})
            items += [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in message["tool_calls"]]
        else:
            items.append({"role": role, "content": [{"type": "input_text", "text": content}]})
    return items


def as_blocks(messages):
    """Return the messages of Anthropic's Messages that messages after the system's are."""
    found = []
    for message in messages:
        role, content = message["role"], [{"type": "text", "text": message["content"]}]
        if role == "tool":
            content = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
            role = "user"
        elif role == "assistant":
            content = [{"type": "thinking", "thinking": "…", "signature": "…"}]
            for one in message["tool_calls"]:
                given = json.loads(one["function"]["arguments"])
                content.append({"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": given})
        found.append({"role": role, "content": content})
    return found


def conversations():
    return [
        {"task_id": "mug", "id": name, "reward": reward, "messages": conversation(*places, number=n)}
        for n, (name, (reward, places)) in enumerate(PATHS.items())
    ]


LINE = {"task_id": "t", "reward": 1, "messages": [TASK, call("x")]}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
