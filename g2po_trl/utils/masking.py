"""Detect secrets by name or form, and mask them in data that is written, logged or pushed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .options import require

HIDDEN = "<not written: it looks like a secret>"
# A name looks like a secret's with one of these in it …
_PARTS = (
    r"PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET(?!AR)|CREDENTIAL|CREDS|AUTHORIZATION|(API|ACCESS|PRIVATE)[_-]?KEY"
    r"|(?<![A-Z0-9])(PIN|OTP)[_-]?CODE"
    r"|(CONNECTION|CONN)[_-]?STR|(DATABASE|DB|REDIS|MONGO|MONGODB|POSTGRES|MYSQL|AMQP|BROKER|WEBHOOK)[_-]?UR[LI]$"
)
# … or with one of these words at its end; in upper case, as variables are written, anywhere.
_SHORT = r"(?<![A-Z0-9])(PIN|OTP|BEARER)"
_WORDS = rf"({_SHORT}|(?<![A-Z0-9])(TOKENS?|KEYS?|PAT|AUTH|COOKIES?|JWT|DSN))"
_AT_END = r"(?<![A-Z0-9])PASS\d*$|(DB|PG|SSH|USER|SMTP|ROOT|ADMIN)PASS(FILE)?$|PWD$|\BTOKEN$"
_ARGUMENT = re.compile(rf"{_PARTS}|{_WORDS}[_-]?\d*$|{_AT_END}", re.IGNORECASE)
_VARIABLE = re.compile(rf"{_PARTS}|{_WORDS}(?![A-Z0-9])|{_AT_END}")
# A bare `key` is a state key in ALFWorld and AppWorld, and an object in other games; PWD is the current folder.
_ORDINARY = re.compile(
    r"(?<![A-Z0-9])((BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE|VIDEO|AUDIO|SPECIAL|STATE|TASK|SORT|PRIMARY|FOREIGN|PUBLIC"
    r"|CACHE|GROUP)_(TOKEN|KEY)S?|(MAX|MIN|NUM|N|NEW|TOTAL)_(\w+_)?TOKENS|(FIRST|SECOND|LAST|FORWARD|BACKWARD)_PASS"
    r"|PIN_MEMORY)$"
    r"|(?-i:^keys?$|^(OLD)?PWD$)",
    re.IGNORECASE,
)
_CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])")
# A password may have an @; what stands alone before a host of the web may be a token.
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@:]*:[^\s/]+(?=@)|((?<=http://)|(?<=https://))[^\s/@:?#]+(?=@)")
_IN_QUERY = re.compile(
    rf"([?&#][^=?&#\s]*(?:token|key|secret|password|passcode|signature|sig|auth|{_SHORT})=)[^&#\s]+", re.IGNORECASE
)
# Known credentials under any name: the Hub, OpenAI-style APIs, Groq, xAI, NVIDIA, Replicate, Stripe, GitHub, GitLab,
# AWS, Slack, Google, SendGrid, npm, PyPI, Docker; JSON Web Tokens, private keys. No folder's name in a path is one.
_CREDENTIAL = re.compile(
    r"(?<![\w/-])(hf_\w{16,}|sk-[\w-]{16,}|gsk_\w{16,}|xai-\w{16,}|nvapi-[\w-]{16,}|r8_\w{16,}|[rs]k_(live|test)_\w{10,}"
    r"|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}|xox[abeprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|npm_\w{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<=Bearer )\S{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*-----|\Z)"
)

# Variables that programs need to run: of the system, of Python and its libraries, of the network, of bundled games.
_NEEDED = re.compile(
    r"_|PATH|HOME|USER|LOGNAME|SHELL|SHLVL|LANG|LANGUAGE|TZ|TERM|TE?MP|TMPDIR|(OLD)?PWD|HOSTNAME|DISPLAY|VIRTUAL_ENV"
    r"|_?JAVA_\w+|CLASSPATH|XAUTHORITY|WAYLAND_DISPLAY|DOCKER_HOST|NODE_(PATH|EXTRA_CA_CERTS)"
    r"|LD_(LIBRARY_PATH|PRELOAD)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|(HTTPS?|FTP|ALL|NO)_PROXY"
    r"|(LC|XDG|PYTHON|CONDA|OMP|KMP|MKL|OPENBLAS|NUMEXPR|CUDA|NVIDIA|HIP|ROCR|TORCH|PYTORCH|TF(?!_VAR)|HF|TRANSFORMERS"
    r"|TOKENIZERS|TQDM|MUJOCO|PYOPENGL|SDL|MPL|NUMBA|JAX|XLA|G2PO|ALFWORLD|WEBSHOP|APPWORLD|TEXTWORLD)\w*",
    re.IGNORECASE,
)


def withheld_variables(passed: Sequence[str] = ()) -> list[str]:
    """Return the names of variables that programs do not need to run, or that look like secrets.

    Those in `passed`, which must be set, are left out.
    """
    unknown = sorted(set(passed) - set(os.environ))
    require(not unknown, "environment_variables", unknown, "export what is not set here, or remove it")
    needed = {name for name, text in os.environ.items() if _NEEDED.fullmatch(name) and masked(text, name) == text}
    return sorted(os.environ.keys() - needed - set(passed))


def masked(data: Any, name: str = "") -> Any:
    """Return the data with texts that look like secrets replaced by `HIDDEN`.

    Masked are texts under a secret's name (`api_key`, `hub_token`), users and passwords in URLs, and words with the
    prefix of a known credential. Mappings and lists are searched; numbers are never masked.
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


def _is_secret(name: str) -> bool:
    words = _CAMEL.sub("_", name)
    return bool((_VARIABLE if name.isupper() else _ARGUMENT).search(words)) and not _ORDINARY.search(words)
