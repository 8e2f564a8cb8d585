"""A small game and experts, in a module that does not import torch: workers import it."""

from g2po_trl import Observation, StepResult, TextEnvironment


class Corridor(TextEnvironment):
    """Go right until the end; a step back fails. Its key has what its text hides."""

    def reset(self, length):
        self.place, self.length = 0, length
        return self.look()

    def look(self):
        listed = ["go left", "go right"]
        return Observation(f"room {self.place}", f"key {self.place}", listed, task="reach the last room")

    def step(self, action):
        self.place += {"go right": 1, "go left": -1}[action]
        done = self.place == self.length
        return StepResult(self.look(), 10.0 * done, terminated=done or self.place < 0)

    def expert(self):
        return "go right"


def go(corridor, rng):
    return rng.choice(["go left", "go right"])


def open_safe(safe):
    """Listens, then turns twice in one message."""
    if not safe.turned:
        return [{"name": "turn", "arguments": {"digit": int(digit)}} for digit in safe.code]
    return "It is open."


def add(messages, tools):
    """The expert of `tool_loop`."""
    last = messages[-1]
    if last["role"] == "tool":
        return last["content"]
    a, b = last["content"].split("+")
    called = {"name": tools[0]["function"]["name"], "arguments": {"a": int(a), "b": int(b)}}
    return {"content": "I add.", "tool_calls": [called]}


def sometimes(corridor):
    """Raises in one task, and gives up in another."""
    if corridor.length == 2:
        raise KeyError("lost")
    return None if corridor.place and corridor.length == 3 else "go right"
