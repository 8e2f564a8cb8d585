"""Agents, and scripts of what the model answers them, for tests without a model."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from g2po_trl.agents.agent import AgentEnvironment
from g2po_trl.prompts.conversation import ChatResponse

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}

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
    """The action of a completion without tool calls."""
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
    """Wait for another thread or process."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def arrived(environment):
    """Return how many requests of its episode have arrived."""
    return len(environment._session._calls)


def has_ended(environment):
    """Return whether its agent has."""
    return not environment._thread.is_alive()


def suppress_all(function, *given):
    with contextlib.suppress(Exception):
        function(*given)


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


async def async_loop(task, client):
    """Two questions at the same time, then one with both answers."""
    model = client.async_openai()

    async def one(text):
        message = [{"role": "user", "content": text}]
        made = await model.chat.completions.create(model=client.model, messages=message)
        return made.choices[0].message.content

    answers = await asyncio.gather(*(one(text) for text in task["parts"]))
    return len(await one(" and ".join(answers)))


def in_threads(task, client):
    """Sub-agents in threads."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda text: ask(client, text).content, task["parts"]))
    return sum(map(float, answers))


def streaming(task, client):
    """Streams with tools and usage; the reward is the number of tokens, the info what the deltas were."""
    text, arguments, names, ends, usage = "", {}, [], [], None
    for chunk in client.openai().chat.completions.create(
        model=client.model,
        messages=[{"role": "user", "content": "go"}],
        tools=[ADD],
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ends += [choice.finish_reason] * (choice.finish_reason is not None)
            for call in choice.delta.tool_calls or ():
                names += [(call.id, call.function.name)] * bool(call.id)
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    seen = {"text": text, "arguments": list(arguments.values()), "names": names, "ends": ends}
    return {"reward": usage.total_tokens, "info": seen}


def stubborn(task, client):
    """Asks for ever; may hang, leave, raise, or return what the task says, where the model says so."""
    for turn in range(1000):
        said = ask_plainly(client, f"{task['name']} {turn}")
        if said == "hang":
            time.sleep(60)
        if said == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if said == "raise":
            raise TypeError("no such tool\nat all")
        if said == "end":
            return turn
    return None


def unsteady(task, client):
    """Asks otherwise in each process."""
    while ask_plainly(client, f"I am {os.getpid()}") != "end":
        pass
    return 1.0
