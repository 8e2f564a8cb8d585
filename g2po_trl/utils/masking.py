"""Detect secrets by name or form, and mask them in data that is written, logged or pushed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "<not written: it looks like a secret>"
_WORDS = r"TOKENS?|KEYS?|SECRETS?|PASSWD|PASSPHRASE|CREDENTIALS?|PAT|AUTH"
# Separate patterns, since arguments like `max_tokens`, `state_key` and `key_room` are ordinary.
_VARIABLE = re.compile(rf"(^|_)({_WORDS})($|_)|PASSWORD|(API|ACCESS|SECRET)KEY", re.IGNORECASE)
_ARGUMENT = re.compile(
    rf"(^|[_-])({_WORDS}|AUTHORIZATION|COOKIES?)$|ACCESSTOKEN$|PASSWORD|SECRET|CREDENTIAL|(API|ACCESS|PRIVATE)[_-]?KEY",
    re.IGNORECASE,
)
# A bare `key` is a state key in ALFWorld and AppWorld, and an object in other games.
_ORDINARY = re.compile(
    r"(^|_)(BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE|VIDEO|AUDIO|SPECIAL|STATE|TASK|SORT)_(TOKEN|KEY)S?$|^KEYS?$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@]*:[^\s/]+(?=@)")  # a password may have an @
_IN_QUERY = re.compile(r"([?&#][^=&\s]*(?:token|key|secret|password|signature|auth)=)[^&#\s]+", re.IGNORECASE)
# Known credentials under any name: the Hub, OpenAI-style APIs, GitHub, AWS, Slack, Google, GitLab.
_CREDENTIAL = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|glpat-[\w-]{16,}|(?<=Bearer )\S{8,})"
)


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable looks like a secret by its name."""
    return bool(_VARIABLE.search(name))


def masked(data: Any, name: str = "") -> Any:
    """Return the data with texts that look like secrets replaced by `HIDDEN`.

    Masked are texts under a secret's name (`api_key`, `hub_token`), passwords in URLs, and words with the prefix
    of a known credential. Mappings and lists are searched; numbers are never masked.
    """
    if isinstance(data, Mapping):
        return {key: masked(value, name if _is_secret(name) else str(key)) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [masked(value, name) for value in data]
    if not isinstance(data, str):
        return data
    if data and _is_secret(name):
        return HIDDEN
    return _CREDENTIAL.sub(HIDDEN, _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(HIDDEN, data)))


def masked_names(data: Any, name: str) -> Iterator[str]:
    """Yield the names of values that `masked` replaced, like `environment_options.api_key`."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from masked_names(value, f"{name}.{key}")
    elif isinstance(data, (list, tuple)):
        for place, value in enumerate(data):
            yield from masked_names(value, f"{name}[{place}]")
    elif isinstance(data, str) and HIDDEN in data:
        yield name


def _is_secret(name: str) -> bool:
    return bool(_ARGUMENT.search(name)) and not _ORDINARY.search(name)
