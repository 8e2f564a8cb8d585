"""Environments in TRL's style, in a module that does not import torch."""

import asyncio

from g2po_trl.environments.causes import BrokenEnvironmentError


class Safe:
    """A dial with the digits of a code; it opens when they have been turned in order."""

    def reset(self, code: str = "12", **row) -> str | None:
        self.code, self.turned, self.closed = code, "", False
        return "The safe is locked."

    def turn(self, digit: int) -> str:
        """Turn the dial.

        Args:
            digit: where to.
        """
        self.turned += str(digit)
        return "click" if self.code.startswith(self.turned) else "clack"

    async def listen(self) -> str:
        """Listen at the door."""
        return f"{len(self.turned)} digits"

    def get_reward(self) -> float:
        return 10.0 * (self.turned == self.code)

    def close(self):
        self.closed = True


class Telephone:
    """Its line is opened in `reset` and awaited in a tool: they have one event loop."""

    async def reset(self, **row) -> str:
        self.line = asyncio.create_task(asyncio.sleep(0.01))
        return "It rings."

    async def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: which.
        """
        if word == "…":
            raise ConnectionResetError("the line is dead")
        if word == "!":
            raise BrokenEnvironmentError("in pieces")
        await self.line
        return word.upper()

    def get_reward(self) -> float:
        return 1.0
