"""Agents, and scripts of what the model answers them, for tests without a model."""

import json
import time
import urllib.request

import psutil

from g2po_trl.agents.agent import AgentEnvironment
from g2po_trl.prompts.conversation import ChatResponse

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}

# The beginning of a program that asks the model without any library.
ASKING = """import json, os, subprocess, sys, urllib.request

def ask(text):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

"""


def says(content, **fields):
    return ChatResponse(content, prompt_tokens=7, completion_tokens=2, **fields).to_action()


def calls(*made, content=""):
    """The action of a completion with tool calls, each (name, arguments)."""
    tool_calls = tuple({"type": "function", "function": {"name": n, "arguments": a}} for n, a in made)
    return ChatResponse(content, tool_calls, "tool_calls").to_action()


def play(agent, actions, max_turns=20, **task):
    """Drive an agent with a script; return all observations, and the last result: `None`, if it has not ended."""
    environment = AgentEnvironment(agent, max_turns)
    try:
        seen = [environment.reset(**task)]
        for action in actions:
            result = environment.step(action)
            if result.terminated or result.truncated:
                return seen, result
            seen.append(result.observation)
        return seen, None
    finally:
        environment.close()


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def running(word):
    """Return the ids of processes with this word among their arguments."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or ())]


def ask(client, *messages, **options):
    """One request by the openai client; the message of its answer."""
    messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    made = client.openai(max_retries=0).chat.completions.create(model=client.model, messages=messages, **options)
    return made.choices[0].message


def ask_plainly(client, text):
    """One request without any library; the text of its answer."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{client.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def tool_loop(task, client):
    """A loop on the openai client, as people write it: calls `add` until the model answers with a text."""
    model = client.openai()
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": task["question"]}]
    for _ in range(10):
        made = model.chat.completions.create(model=client.model, messages=messages, tools=[ADD], temperature=0.3)
        message = made.choices[0].message
        if not message.tool_calls:
            return float(message.content == task["answer"]), message.content == task["answer"]
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
    return 0.0
