"""Serve an environment as an OpenEnv server; the trainer plays it on other machines.

    g2po serve my_game.py:MyGame --port 8000                                    # on the server
    environment_factory = partial(RemoteEnvironment, ["http://there:8000"])     # for the trainer

Each session plays its episodes in its own worker process: environments need not be thread-safe, and a crash ends only
one session. If a server cannot be reached or is lost during an episode, the episode ends with outcome `error`, and the
next one uses another server if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...environments.adapters.openenv import make_app
from ...utils.extras import install_command
from ...utils.parser import Parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="g2po serve",
        description="Serve an environment over OpenEnv; each session plays in its own process.\n\n"
        "    g2po serve environment.py:TidyEnvironment --port 8000",
    )
    add = parser.add_argument
    add("environment", help="module:Class, file.py:Class, or file.py with one environment")
    host = "the address to listen on; default: this machine only. 0.0.0.0: anyone who can reach the port can play, "
    add("--host", default="127.0.0.1", help=f"{host}without a password, and run what the environment runs")
    add("--port", metavar="N", type=int, default=8000, help="port to listen on; default: 8000")
    add("--max-sessions", metavar="N", type=int, default=64, help="concurrent episodes; default: 64")
    given = "variables (HF_TOKEN, …) to pass to the environment although they look like secrets"
    add("--environment-variables", metavar="NAME", nargs="*", default=[], help=given)
    add("--max-turns", metavar="N", type=int, help="the trainer's max_turns; required for tool-based classes only")
    args = parser.parse_args(argv)
    try:
        import uvicorn
    except ImportError as error:
        raise SystemExit(f"serving needs openenv: {install_command('openenv')}") from error
    from ...environments.loading import load

    try:
        environment = load(args.environment)
        app = make_app(environment, args.max_sessions, args.environment_variables, args.max_turns, args.host)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    uvicorn.run(app, host=args.host, port=args.port)
