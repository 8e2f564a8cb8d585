"""`g2po train` in this process, with its trainer changed: what a flag cannot say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from unittest import mock

from g2po_trl import G2POTrainer
from g2po_trl.cli.commands import train


def run(
    words: Sequence[str],
    change: Callable[[dict[str, Any]], None] = lambda given: None,
    made: Callable[[G2POTrainer], None] = lambda trainer: None,
) -> None:
    """Run `g2po train WORDS`.

    Args:
        change: is called with the arguments by name that the trainer is about to get.
        made: is called with the trainer.
    """
    init = G2POTrainer.__init__

    @wraps(init)
    def changed(self, *args, **kwargs):
        given = dict(inspect.signature(init).bind(self, *args, **kwargs).arguments)
        del given["self"]
        given |= given.pop("kwargs", {})
        change(given)
        init(self, **given)
        made(self)

    with mock.patch.object(G2POTrainer, "__init__", changed):
        train.main(list(words))
