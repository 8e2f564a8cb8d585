"""A run's page as a static Space of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from ..utils.errors import G2POError
from .page import data_folder

_CARD = """---
title: {title}
emoji: 🕸️
sdk: static
tags: [g2po, trl, reinforcement-learning]
---

Success, state graphs and episodes of an agent trained by G2PO: written by `g2po view` of g2po-trl.
"""


def push_space(page: Path, name: str) -> str:
    """Upload a page to a static Space, OWNER/NAME, made public unless it exists; return the Space's address.

    Raises `G2POError` if the Hub cannot be reached or rejects the upload; the page is kept.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, card = HfApi(), _CARD.format(title=name.rpartition("/")[2])
    files = {"index.html": page, "README.md": card.encode()}
    folder = data_folder(page)
    files |= {f"{folder.name}/{path.name}": path for path in sorted(folder.glob("*.js"))}
    try:
        address = api.create_repo(name, repo_type="space", space_sdk="static", exist_ok=True)
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        api.create_commit(name, operations, commit_message="g2po view", repo_type="space")
    except Exception as error:  # of the Hub and of the way to it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = f"It is in {page}. `hf auth login` logs in; OWNER must be you or an organization of yours"
        message = f"push_space is {name!r}: the page was not uploaded ({reason}). {remedy}"
        raise G2POError(message, "push_space", name) from error
    return str(address)
