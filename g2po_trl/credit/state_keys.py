"""Configured state keys, which replace those that environments give; steps with equal keys are one node of the graph.

The default key of a step is the environment's (`Observation.state_key`; for an agent's request, `AgentEnvironment`
makes it), or else the text of the observation (`Step.key`). `state_key` replaces it or merges more states:

- a function `Step -> str`, given to the trainer, replaces it;
- `"workspace"`, `"files"` and `"messages"` keep parts of the key of an agent with a workspace (`part_of_key`);
- `"similar"` and `"similar:0.8"` merge keys of a group that share most of their word pairs (`merge_similar`).

Each is applied with `state_key_ignores`: `NormalisedKey` ignores numbers or letter case.

Merging states of different values costs more than it gains (docs/benchmarks.md): "the drawer 1 is open" and "the
drawer 1 is closed" are nearly the same text. Watch `graph/value_std_within_node` with coarser keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from ..trajectory import Step, Trajectory
from ..utils.extras import install_command
from ..utils.options import require

IGNORABLE = ("numbers", "case")
PARTS = ("workspace", "files", "messages")

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"\w+|[^\w\s]")
# What must be equal: system message and tools in the key of a chat request, and the hashes of images.
_EXACT = re.compile(r'\{"asked": "[a-p]{16}"\}|^[0-9a-f]{32}$', re.MULTILINE)
_PERMUTATIONS = 128
_EXIT_CODE = re.compile(r"(?:exit(?:ed with)?[ _-]?(?:code|status)|returncode)[^\w-]{1,3}(-?\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class NormalisedKey:
    """A state key that ignores details. Spaces at line ends and repeated spaces are always ignored."""

    numbers: bool = True  # every number becomes `#`: "drawer 1" and "drawer 2" are equal
    case: bool = True  # of letters
    key: Callable[[Step], str] | None = None  # the key to normalise; `None`: the step's own

    def __call__(self, step: Step) -> str:
        text = step.key if self.key is None else self.key(step)
        if self.case:
            text = text.lower()
        if self.numbers:
            text = NUMBER.sub("#", text)
        return "\n".join(" ".join(line.split()) for line in text.splitlines())


def part_of_key(step: Step, part: str) -> str:
    """Return a part of a `workspace_key` and who is asked; `workspace` is its files and the last exit code, if any."""
    is_whole = step.key.startswith('{"files": ')
    require(is_whole, "state_key", part, "it is for agents with a workspace; leave it out")
    key = json.loads(step.key)
    news = key.pop("news")
    changes = {"workspace": {"exit": _EXIT_CODE.findall(news)[-1:]}, "messages": {"files": news}}
    return json.dumps(key | changes.get(part, {}))


def make_state_key(state_key: Callable[[Step], str] | str | None, ignores: Iterable[str] | None) -> Callable | None:
    """Return the function of a `state_key`, normalised; `None` if it has none. Each detail is one of `IGNORABLE`."""
    named = partial(part_of_key, part=state_key) if state_key in PARTS else None
    state_key = state_key if callable(state_key) else named
    if not ignores:
        return state_key
    ignores = [ignores] if isinstance(ignores, str) else list(ignores)
    others = [name for name in ignores if name not in IGNORABLE]
    require(not others, "state_key_ignores", others and others[0], f"choose {', '.join(IGNORABLE)}")
    return NormalisedKey(**{name: name in ignores for name in IGNORABLE}, key=state_key)


def similarity_threshold(state_key: Callable[[Step], str] | str | None) -> float | None:
    """Return the threshold of `merge_similar` in a `state_key`: 0.8 for `"similar:0.8"`, 0.9 for `"similar"`."""
    if state_key in (None, *PARTS) or callable(state_key):
        return None
    kind, colon, number = str(state_key).partition(":")
    try:
        threshold = float(number) if colon else 0.9
    except ValueError:
        threshold = 0.0
    remedy = f"write similar:0.9 or {', '.join(PARTS)}; a function goes to G2POTrainer(state_key=…)"
    require(kind == "similar" and 0 < threshold < 1, "state_key", state_key, remedy)
    require(find_spec("datasketch") is not None, "state_key", state_key, install_command("similarity"))
    return threshold


def assign_keys(trajectories: Iterable[Trajectory], key: Callable[[Step], str]) -> None:
    """Write `key(step)` into every step's `state_key`. Raises `G2POError` if it is not a string."""
    for trajectory in trajectories:
        for step in trajectory.steps:
            text = key(step)
            remedy = f"it must return a text, equal for equal states; task {trajectory.task_id}"
            require(isinstance(text, str), "state_key", text, remedy)
            step.state_key = text


def keys_of_groups(trajectories: Iterable[Trajectory], groups: Iterable[int]) -> dict[int, set[str]]:
    """Return the distinct keys of each group, without trajectories that are not counted."""
    keys: dict[int, set[str]] = {}
    for trajectory, group in zip(trajectories, groups):
        if trajectory.counted:
            keys.setdefault(group, set()).update(step.key for step in trajectory.steps)
    return keys


def merge_similar_keys(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int],
    threshold: float,
    gathered: Sequence[Mapping[int, Iterable[str]]] | None = None,
) -> None:
    """Replace each step's key by its representative within the group, in place.

    `gathered` are `keys_of_groups` of every rank, if groups are spread over ranks.
    """
    parts = [keys_of_groups(trajectories, groups)] if gathered is None else gathered
    merged = {
        group: merge_similar({key for part in parts for key in part.get(group, ())}, threshold)
        for group in set(groups)
    }
    for trajectory, group in zip(trajectories, groups):
        for step in trajectory.steps:
            step.state_key = merged[group].get(step.key, step.key)


def merge_similar(texts: Iterable[str], threshold: float) -> dict[str, str]:
    """Return the representative of each distinct text.

    In sorted order, a text joins the most similar representative before it if their similarity is at least
    `threshold`, and else becomes a representative. The result depends only on the texts. Every text is similar to its
    representative; two texts of a node may be less similar to each other.

    Similarity is the fraction of common word pairs (Jaccard). Candidates come from MinHash and locality-sensitive
    hashing (the `datasketch` library), so that the cost grows linearly with the number of distinct texts. A pair above
    the threshold is missed with a small probability.

    Args:
        texts: keys of a group.
        threshold: above 0 and below 1.
    """
    from datasketch import MinHash, MinHashLSH

    texts = sorted(set(texts))
    if len(exact := {tuple(_EXACT.findall(text)) for text in texts}) > 1:  # those with other images are never similar
        parts = [
            merge_similar([one for one in texts if tuple(_EXACT.findall(one)) == part], threshold) for part in exact
        ]
        return {text: representative for part in parts for text, representative in part.items()}
    # A lower threshold here, for recall: the exact comparison below rejects the rest.
    index = MinHashLSH(threshold=0.8 * threshold, num_perm=_PERMUTATIONS, weights=(0.05, 0.95))
    pairs_of = [word_pairs(text) for text in texts]
    sketches = MinHash.bulk([[pair.encode("utf-8", "replace") for pair in pairs] for pairs in pairs_of])
    representative = {}
    for number, text in enumerate(texts):
        similar = [(similarity(pairs_of[number], pairs_of[other]), -other) for other in index.query(sketches[number])]
        best = max((pair for pair in similar if pair[0] >= threshold), default=None)
        if best is None:
            index.insert(number, sketches[number], check_duplication=False)
            representative[text] = text
        else:
            representative[text] = texts[-best[1]]
    return representative


def word_pairs(text: str) -> set[str]:
    """Return the pairs of neighbouring words of a text, its ends included."""
    words = ["", *_WORD.findall(text.lower()), ""]
    return {f"{first} {second}" for first, second in zip(words, words[1:])}


def similarity(pairs: set[str], others: set[str]) -> float:
    """Return the Jaccard similarity: common pairs / all pairs."""
    common = len(pairs & others)
    return common / (len(pairs) + len(others) - common)
