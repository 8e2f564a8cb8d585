"""Serve an environment as an OpenEnv server; the trainer plays it on other machines.

    g2po serve my_game.py:MyGame --port 8000                                    # on the server
    environment_factory = partial(RemoteEnvironment, ["http://there:8000"])     # for the trainer

Each session plays its episodes in its own worker process: environments need not be thread-safe, and a crash ends only
one session. If a server cannot be reached or is lost during an episode, the episode ends with outcome `error`, and the
next one uses another server if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from g2po_envs.adapters.serving import make_app

from ...environments.loading import load
from ...utils.options import Options, option
from ..parser import parse


@dataclass
class ServeOptions(Options):
    environment: str = option("module:Class, file.py:Class, or file.py with one environment", positional=True)
    host: str = option("address; with 0.0.0.0, anyone who can reach the port can play", "127.0.0.1")
    port: int = option("port to listen on", 8000, within="[0, 65535]")
    max_sessions: int = option("concurrent episodes", 64, within="[1, inf)")
    environment_variables: list[str] = option("variables to pass even if the name looks secret", [], metavar="NAME")
    max_turns: int | None = option("the trainer's; for tool-based classes only", None, within="[1, inf)")


def main(argv: Sequence[str] | None = None) -> None:
    options, _ = parse((ServeOptions,), argv, command="g2po serve", description=__doc__)
    import uvicorn  # of an extra

    given = options.max_sessions, options.environment_variables, options.max_turns, options.host
    uvicorn.run(make_app(load(options.environment), *given), host=options.host, port=options.port)
