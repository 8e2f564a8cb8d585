"""Random small modules as the coding agent of `g2po init --coding` shows them: what its bundled model is taught on.

Names, operators and statements are drawn at random, not taken from the agent's repositories.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

from g2po_trl.prompts.conversation import Message

NOUNS = """
account age amount apple area balance bird boat book bottle box bread bridge cake card chair city class cloud
coin color cost cup day depth desk dog door dress egg engine event farm field fish flag floor flower game
garden glass goal group guest hand hat heat hill horse house island jar key kite lake lamp letter level limit
line list load lunch map mark meal member mile milk minute money month mountain name night note number order
page paper part path pen person piece place plant plate player point pool price prize queue rain rate record
result ring river road room rope row rule salt score season seat share shelf ship shirt shop side size snow
song speed star step stone store street student sum sun table task team text ticket time title top tower town
toy track train tree trip user value vote wall water week weight wheel width wind window word year zone
""".split()
VERBS = "add count find fits get has is is_good is_in largest make may merge needs pick rest sum take total".split()
NUMBERS = "0 0 1 1 2 3 4 5 7 9 10 12 20 50 60 100".split()


def draw_state(rng: random.Random, agent: ModuleType) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages of a random moment of an episode, and the call of the agent's expert."""
    name, lines, ran, test = _module(rng)
    while not agent.guesses(_shown(lines, ran, []), careful=True):
        name, lines, ran, test = _module(rng)
    total = rng.randint(2, 5)
    result, edits = f"{rng.randint(1, total)} of {total} tests fail: {test}", []

    def ask(shown: str) -> dict[str, Any]:
        return agent.expert([{"content": shown}], None, rng)

    def guess() -> str:
        return "line {line}: {old} is now {new}".format(**ask(_shown(lines, ran, [result]))["arguments"])

    undone = sorted({f"undone: {guess()}" for _ in range(rng.choice([0, 0, 1, 1, 2, 2, 3, 4]))})
    kind = rng.random()  # before the files are listed; before one is opened; after an edit; before it
    note = []
    if kind < 0.1:
        lines, undone, edits = [], [], [] if kind < 0.05 else [f"{name}.py test_{name}.py"]
    elif kind < 0.25:
        edit = ask(_shown(lines, ran, [result]))["arguments"]
        lines[edit["line"] - 1] = lines[edit["line"] - 1].replace(edit["old"], edit["new"], 1)
        edits = ["line {line}: {old} is now {new}".format(**edit)]
        if rng.random() < 0.5:
            result, ran = "not tested", set()
    elif rng.random() < 0.15:  # a line that does not have the text that was to be replaced
        number = rng.choice([number for number, line in enumerate(lines, 1) if line])
        text = rng.choice([text for text in agent.GUESSES if text not in lines[number - 1]])
        note = [f"This call failed: line {number} has no {text}"]
    messages = [
        {"role": "system", "content": agent.RULES},
        {"role": "user", "content": _shown(lines, ran, [*undone, *note, *edits, result])},
    ]
    return messages, ask(messages[-1]["content"])


def _shown(lines: list[str], ran: set[int], notes: list[str]) -> str:
    code = [f" {number}{'>' if number in ran else ''} {line}" for number, line in enumerate(lines, 1) if line]
    return "\n".join([*code, *notes])


def _module(rng: random.Random) -> tuple[str, list[str], set[int], str]:
    """Return the name of a module, its lines, the lines that a failing test runs, and that test's line."""
    functions = [_function(rng) for _ in range(rng.choice([1, 2, 2, 3, 3, 4]))]
    lines = "\n\n\n".join("\n".join(body) for _, body in functions).split("\n")
    tested, ran = rng.choice(functions)[0], set()
    for name in {tested, rng.choice(functions)[0]} if rng.random() < 0.1 else {tested}:
        start = next(number for number, line in enumerate(lines, 1) if line.startswith(f"def {name}("))
        body = next(len(body) for own, body in functions if own == name) - 1
        ran |= {start + one for one in range(1, body + 1) if one == 1 or rng.random() < 0.85}
    number = rng.choice(NUMBERS)
    given = [rng.choice([number, f'"{rng.choice(NOUNS)}"', f"[{number}, 2]"]) for _ in range(rng.randint(1, 2))]
    call = f"{tested}({', '.join(given)})"
    ends = [f"assert {call} == {rng.choice(NUMBERS)}", f"assert {call}", f"assert not {call}", f"{call}: IndexError"]
    return rng.choice(NOUNS), lines, ran, rng.choice(ends)


def _function(rng: random.Random) -> tuple[str, list[str]]:
    """Return the name of a function and its lines: one expression, a condition, or a loop."""
    own = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}" if rng.random() < 0.5 else _name(rng)
    names = [_name(rng) for _ in range(rng.randint(1, 3))]
    head, kind = f"def {own}({', '.join(names)}):", rng.random()
    if kind < 0.3:
        return own, [head, f"    return {_comparison(rng, names)}"]
    if kind < 0.6:
        return own, [head, f"    return {_arithmetic(rng, names)}"]
    test = rng.choice(["", "", "not "])
    if kind < 0.7:
        test += _comparison(rng, names)
        return own, [
            head,
            f"    if {test}:",
            f"        return {_value(rng, names)}",
            f"    return {_value(rng, names)}",
        ]
    result, one = _name(rng), _name(rng)
    value = _value(rng, [one, *names])
    changes = [f"{result} += {value}", f"{result} -= {value}", f"{result} = {one}", f"{result}.append({one})"]
    start, change = rng.choice(["0", "0", "1", "[]", f"{names[0]}[0]", f"{names[0]}[1]"]), rng.choice(changes)
    lines = [head, f"    {result} = {start}", f"    for {one} in {names[0]}:"]
    if rng.random() < 0.5:
        lines += [f"        if {test}{_comparison(rng, [*names, result, one])}:", f"            {change}"]
    else:
        lines.append(f"        {change}")
    returned = rng.choice([result, result, result, _arithmetic(rng, [*names, result, one])])
    return own, [*lines, f"    return {returned}"]


def _name(rng: random.Random) -> str:
    return rng.choice(NOUNS) + rng.choice(["", "", "", "s", "s", f"_{rng.choice(NOUNS)}"])


def _value(rng: random.Random, names: list[str]) -> str:
    one = rng.choice(names)
    parts = [f"{one}[0]", f"{one}[1]", f"{one}[-1]", f"{one}.get({rng.choice(names)}, 0)", f"{one} - 1", f"{one} + 1"]
    return rng.choice([*[one] * 4, rng.choice(NUMBERS), f"len({one})", *parts, f'"{rng.choice(NOUNS)}"'])


def _comparison(rng: random.Random, names: list[str]) -> str:
    operator = rng.choice(["<", "<=", ">", ">=", "==", "!=", "in", "not in"])
    one = f"{_value(rng, names)} {operator} {_value(rng, names)}"
    return one if rng.random() < 0.75 else f"{one} {rng.choice(['and', 'or'])} {_comparison(rng, names)}"


def _arithmetic(rng: random.Random, names: list[str]) -> str:
    one = f"{_value(rng, names)} {rng.choice(['+', '-', '*', '/', '//'])} {_value(rng, names)}"
    return one if rng.random() < 0.8 else f"{one} {rng.choice(['+', '-', '*'])} {_value(rng, names)}"
