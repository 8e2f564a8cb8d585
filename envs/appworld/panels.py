"""Evaluation sets for `g2po evaluate --environment appworld`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from g2po_envs.appworld.environment import AppworldEnvironment
from g2po_envs.appworld.prompts import APPWORLD_PROMPT
from g2po_envs.appworld.server import Installation
from g2po_trl.evaluation.panel import Panel

ABOUT = """You solve tasks on somebody's behalf by writing Python against their apps, a piece at a time; variables \
stay from piece to piece, and what you print is shown to you. apis.api_docs.show_app_descriptions() lists the apps, \
apis.api_docs.show_api_descriptions(app_name=...) the functions of one, apis.api_docs.show_api_doc(app_name=..., \
api_name=...) tells how to call one; apis.supervisor.show_account_passwords() gives passwords to log in with. When \
the task is done, call apis.supervisor.complete_task(), with answer=... if it asks for something."""
COLUMNS = {"Succ.": "success_rate", "Score": "score"}


def load_panel(
    name: str = "test_normal",
    installation: str = "~/.cache/g2po_trl/appworld",
    max_turns: int = 50,
    difficulties: Sequence[int] = (),
    refused: Sequence[str] = (),
    key: str = "output",
    code_timeout: float = 40.0,
) -> Panel:
    """Return the evaluation set of an AppWorld dataset.

    Args:
        name: "train", "dev", "test_normal" or "test_challenge".
        installation: folder of the installation.
        max_turns: maximum turns per episode.
        difficulties: difficulties of the tasks. Empty: all.
        refused: see `AppworldEnvironment`.
        key: see `AppworldEnvironment`.
        code_timeout: see `AppworldEnvironment`.
    """
    place = Installation(installation)
    place.check()
    return Panel(
        name=f"AppWorld {name}" + (f", difficulty {', '.join(map(str, difficulties))}" if difficulties else ""),
        rows=place.rows(name, difficulties),
        environment_factory=partial(
            AppworldEnvironment,
            place,
            key=key,
            max_turns=max_turns,
            code_timeout=code_timeout,
            refused=tuple(refused),
        ),
        prompt_template=APPWORLD_PROMPT,
        max_turns=max_turns,
        history_length=10,
        about=ABOUT,
        action_form="a piece of Python between ```python and ```",
        multiline=True,
        columns=COLUMNS,
    )
