"""The TextWorld/ALFWorld engine with memoised pure work. For worker processes, never the trainer's.

    game file ─▶ Game: PDDL translated once, then a lazily explored graph of engine states
                   State ──command──▶ (feedback, State) ──command──▶ …
    Session ─▶ one cursor on that graph, for one environment

An ALFWorld game is deterministic, and its texts depend only on its facts. So the engine computes each transition once,
and all episodes look it up. The planner library that holds the engine's state is loaded once per process; to compute a
new transition from another state, it is reset to the start (1 to 4 ms) and moved there by replaying operators (0.05 ms
each). Memory is bounded by `GameCache`.

Every text and every list of commands equals that of `textworld.envs.PddlEnv`; `tests/envs/test_alfworld_engine.py`
plays both. The engine is not imported before the first game is loaded. Not thread-safe.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from g2po_envs.alfworld.installed import guarded, installed_engine
from g2po_trl.utils.errors import G2POError

NOTHING_HAPPENS = "Nothing happens."
_TASK = re.compile(r"Your task is to: ([^\"\\{}\[\]#|]*)\.\"")
_NO_TASK = "UNKNOWN GOAL"


class CorruptGameError(G2POError):
    """A game file that cannot be read; the message names it."""


def read_game(path: str) -> dict[str, Any]:
    """Return the content of a `game.tw-pddl` file after checking the required fields."""
    try:
        with open(path, encoding="utf-8") as file:
            game = json.load(file)
    except (OSError, ValueError) as error:
        raise CorruptGameError(f"{path}: not a readable game file ({error})") from error
    missing = [
        key for key in ("pddl_domain", "grammar", "pddl_problem") if not isinstance(game, dict) or key not in game
    ]
    if missing:
        raise CorruptGameError(f"{path}: not an ALFWorld game: it lacks {', '.join(missing)}")
    return game


def task_text(grammar: str) -> str:
    """Return the goal in words from the game's grammar, without the final full stop."""
    match = re.search(r'Your task is to: (.*?)\.?\s*"\s*\}', grammar)
    return match.group(1).strip() if match else ""


class State:
    """One state of a game, with its commands and the known transitions."""

    __slots__ = ("actions", "admissible", "edges", "parent", "won")

    def __init__(self, actions: dict[str, Any], won: bool, parent: tuple[State, Any] | None):
        self.actions = actions
        self.admissible = sorted(actions)
        self.edges: dict[str, tuple[str, State]] = {}
        self.parent = parent
        self.won = won


class Game:
    """A loaded game: `intro`, `task` and the graph of its states from `start` on.

    With `planning`, the planner's own translation is made too (which doubles the time), and `plan()` can be called.
    """

    def __init__(self, data: dict[str, Any], planning: bool = False):
        engine = installed_engine()
        self._engine = engine
        self.task = task_text(data["grammar"])
        # The grammar differs between games in the task's sentence alone: parsed once, the sentence put in afterwards.
        task = _TASK.search(data["grammar"])
        grammar = data["grammar"].replace(task.group(0), f'Your task is to: {_NO_TASK}."') if task else data["grammar"]
        engine.owner = None  # should loading fail half way, the game before must not trust the library
        with guarded():
            self._logic = engine.logic(data["pddl_domain"], grammar)
            self._facts = engine.new_facts(data["pddl_problem"], self._logic, planning)
        facts = self._facts
        self.memory = 8 * len(facts.sas)  # estimates, from measurements
        self._sas, facts.sas = facts.sas.encode(), None
        self._operators: dict[int, Any] = {}
        self._actions: dict[int, tuple[str, Any]] = {}
        self._commands: dict[tuple, str] = {}
        self._entities = engine.entities(facts)
        self._names = {name: info.name for name, info in self._entities.items()}
        self._read, self._constant = _read_and_constant_predicates(facts.task, grammar)
        facts.task = None
        self._initial = _snapshot(facts)
        self._at_start = self._read_facts()
        self._states: dict[frozenset, State] = {}
        engine.owner, self._here = self, None
        intro = self._logic.grammar.derive("#intro#", self._context())
        self.intro = intro.replace(_NO_TASK, task.group(1)) if task else intro
        self.start = self._here = self._state(None)

    def plan(self) -> list[str]:
        """Return commands that solve the game from the start, empty if there are none. Call it right after loading."""
        return self._facts.replan(self._entities)

    def follow(self, state: State, command: str) -> tuple[str, State]:
        """Return feedback and next state of a command; an inapplicable command changes nothing."""
        edge = state.edges.get(command)
        if edge is None:
            if command not in state.actions:
                return NOTHING_HAPPENS, state
            edge = state.edges[command] = self._explore(state, command)
        return edge

    def _explore(self, state: State, command: str) -> tuple[str, State]:
        self._go_to(state)
        action = state.actions[command]
        self._here = None  # in doubt until all is done
        self._facts.apply(action)
        feedback = self._logic.grammar.derive(action.feedback_rule, self._context(action))
        self._here = self._state((state, action))
        return feedback, self._here

    def _go_to(self, state: State) -> None:
        if self._engine.owner is self and self._here is state:
            return
        path = []
        goal = state
        while state.parent is not None:
            state, action = state.parent
            path.append(action)
        self._engine.library.load_sas(self._sas)
        self._engine.owner = self
        _restore(self._facts, self._initial)
        self._facts._operators = self._operators
        for action in reversed(path):
            self._facts.apply(action)
        self._here = goal

    def _state(self, parent: tuple[State, Any] | None) -> State:
        """Return the engine's current state, known or new."""
        key = frozenset(self._read_facts() ^ self._at_start)  # what is different: a small set
        state = self._states.get(key)
        if state is None:
            actions: dict[str, Any] = {}
            for action in self._applicable():
                actions.setdefault(self._command(action), action)
            self.memory += 1000 + 400 * len(actions)
            state = self._states[key] = State(actions, bool(self._engine.library.check_goal()), parent)
        return state

    def _read_facts(self) -> set[Any]:
        read = (facts for sign, facts in self._facts._facts.items() if _base(sign.name) in self._read)
        return set().union(*read)

    def _applicable(self) -> Iterator[Any]:
        """Return the engine's applicable actions in its order; each operator's object is constructed once."""
        library, seen = self._engine.library, set()
        operators = (self._engine.Operator * library.get_applicable_operators_count())()
        library.get_applicable_operators(operators)
        for operator in operators:
            if operator.id not in self._actions:
                # A copy: a slice of the array would keep the whole array alive.
                self._operators[operator.id] = type(operator).from_buffer_copy(operator)
                self._actions[operator.id] = (operator.name, self._engine.action(self._facts, operator))
            name, action = self._actions[operator.id]
            if name not in seen:
                seen.add(name)
                yield action
        self._facts._operators = self._operators

    def _command(self, action: Any) -> str:
        template = action.command_template
        key = (template, *((slot.name, variable.name) for slot, variable in action.mapping.items()))
        command = self._commands.get(key)
        if command is None:
            derived = self._logic.grammar.derive(template, self._context(action))
            command = derived.format(**{slot.name: self._names[var.name] for slot, var in action.mapping.items()})
            if self._depends_on_constants(template):
                self._commands[key] = command
        return command

    def _depends_on_constants(self, template: str) -> bool:
        queried = re.findall(r"([\w@-]+)\(", template)
        return "#" not in template and all(name in self._constant for name in queried)

    def _context(self, action: Any = None) -> dict[str, Any]:
        mapping = action.mapping if action else {}
        return {
            "state": self._facts,
            "facts": [],  # no grammar rule reads them from here
            "variables": {slot.name: self._entities[variable.name] for slot, variable in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entities,
        }


class Session:
    """One episode on a game: a cursor on its graph of states."""

    def __init__(self, game: Game):
        self.game = game
        self.reset()

    def reset(self) -> str:
        self.state = self.game.start
        return self.game.intro

    def step(self, command: str) -> str:
        feedback, self.state = self.game.follow(self.state, command.strip())
        return feedback

    @property
    def admissible(self) -> list[str]:
        return self.state.admissible

    @property
    def won(self) -> bool:
        return self.state.won


class GameCache:
    """The most recently played games of this process, by id, within about `max_bytes` of memory.

    A small generated game takes half a megabyte after a group has played it, an official kitchen six megabytes.
    """

    def __init__(self, max_bytes: int = 128_000_000):
        self.max_bytes = max_bytes
        self._games: OrderedDict[str, Game] = OrderedDict()

    def get(self, key: str, read: Callable[[], dict[str, Any]]) -> Game:
        """Return the game under `key`; `read()` returns its content if it is not cached."""
        if key not in self._games:
            self._games[key] = Game(read())
        self._games.move_to_end(key)
        while len(self._games) > 1 and sum(game.memory for game in self._games.values()) > self.max_bytes:
            self._games.popitem(last=False)
        return self._games[key]

    def __len__(self) -> int:
        return len(self._games)


GAMES = GameCache()


def _base(name: str) -> str:
    return name.removeprefix("not_")


def _snapshot(facts: Any) -> tuple:
    copied = {sign: set(found) for sign, found in facts._facts.items()}
    by_type = {kind: set(found) for kind, found in facts._vars_by_type.items()}
    return copied, dict(facts._vars_by_name), by_type, dict(facts._var_counts)


def _restore(facts: Any, snapshot: tuple) -> None:
    copied, by_name, by_type, counts = snapshot
    facts._facts.clear()
    facts._facts.update((sign, set(found)) for sign, found in copied.items())
    facts._vars_by_name = dict(by_name)
    facts._vars_by_type.clear()
    facts._vars_by_type.update((kind, set(found)) for kind, found in by_type.items())
    facts._var_counts.clear()
    facts._var_counts.update(counts)


def _read_and_constant_predicates(task: Any, grammar: str) -> tuple[set[str], set[str]]:
    """Return the predicates that change and are read (they distinguish states), and those that never change."""
    changing = {effect.literal.predicate for action in task.actions for effect in action.effects}
    derived = {axiom.name for axiom in task.axioms}
    read: set[str] = set()

    def collect(condition: Any) -> None:
        if hasattr(condition, "predicate"):
            read.add(condition.predicate)
        for part in getattr(condition, "parts", ()):
            collect(part)

    for action in task.actions:
        collect(action.precondition)
        for effect in action.effects:
            collect(effect.condition)
    for axiom in task.axioms:
        collect(axiom.condition)
    collect(task.goal)
    read.update(_base(name) for name in re.findall(r"([\w@-]+)\(", grammar))
    known = {fact.predicate for fact in task.init if hasattr(fact, "predicate")}
    return read & changing, known - changing - derived
