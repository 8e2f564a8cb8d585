"""The installed TextWorld and ALFWorld packages, with their pure functions memoised.

Two thirds of the engine's time repeat pure work: parsing the same few grammar strings and queries at every step, deep
copies of constant data, a translation that only the planner needs, and time measurements. Importing this module does
not import the engine; `installed_engine()` does, once per process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any


class InstalledEngine:
    """The installed packages, imported once and with their pure functions memoised, and the one planner library."""

    def __init__(self):
        with guarded():
            import fast_downward
            from alfworld.agents.utils.misc import Demangler
            from textworld.envs.pddl import logic, textgen
            from textworld.generator.game import EntityInfo
            from textworld.logic import Action, Placeholder, Rule, Variable

            sys.argv = [sys.argv[0]]  # the translator's options read it when they are imported
            from fast_downward.translate import timers

        timers.timing = lambda *_, **__: contextlib.nullcontext()  # a tenth of the time went into taking it
        self.library = fast_downward.load_lib()
        self.Operator = fast_downward.Operator
        self.owner: Any = None  # whose translation the library holds
        self._pddl, self._demangler, self._entity = logic, Demangler, EntityInfo
        self._action, self._placeholder, self._variable = Action, Placeholder, Variable
        self.logic = functools.lru_cache(8)(logic.GameLogic)

        parse = functools.lru_cache(4096)(textgen._parse_and_convert)
        # Symbols are changed while a text is derived, so each use gets its own.
        textgen._parse_and_convert = lambda text, **options: [_fresh(s) for s in parse(text, **options)]
        textgen.deepcopy = lambda symbols: (
            [_fresh(s) for s in symbols] if isinstance(symbols, list) else _fresh(symbols)
        )
        textgen.copy_context = _copy_context
        textgen.EvalSymbol.derive = lambda symbol, context=None: [
            textgen.TerminalSymbol(_evaluated(symbol.expression, context or symbol.context, vars(textgen)))
        ]
        query = functools.lru_cache(4096)(Rule.parse_conjunctive_query)
        Rule.parse_conjunctive_query = staticmethod(query)

    def new_facts(self, problem: str, logic: Any, planning: bool) -> Any:
        """Return the engine's initial state, without the second translation unless planning needs it."""
        import fast_downward

        if planning:
            return self._pddl.PddlState(self.library, problem, logic)

        translate = fast_downward.pddl2sas

        def once(domain, problem, verbose=False, optimize=False):
            return (None, "") if optimize else translate(domain, problem, verbose)

        fast_downward.pddl2sas = once
        try:
            return self._pddl.PddlState(_PlayOnly(self.library), problem, logic)
        finally:
            fast_downward.pddl2sas = translate

    def entities(self, facts: Any) -> dict[str, Any]:
        entities = {}
        for fact in facts.facts:
            for variable in fact.arguments:
                entities.setdefault(variable.name, self._entity(variable.name, variable.type))
        demangler = self._demangler(game_infos=entities)
        for entity in entities.values():
            entity.name = demangler.demangle_alfred_name(entity.id)
            entity.definite, entity.indefinite = "the", "a"
        return entities

    def action(self, facts: Any, operator: Any) -> Any:
        name, *arguments = operator.name.split()
        action = self._action(name=name, preconditions=[], postconditions=[])
        action.id = operator.id
        action.mapping = {
            self._placeholder(slot.name.strip("?"), slot.type_name): self._variable(argument, slot.type_name)
            for slot, argument in zip(facts._actions[name].parameters, arguments)
        }
        described = facts._logic.actions[name]
        action.command_template, action.feedback_rule = described.template, described.feedback_rule
        return action


@functools.lru_cache(1)
def installed_engine() -> InstalledEngine:
    return InstalledEngine()


class _PlayOnly:
    """The planner library without the part that plans."""

    def __init__(self, library: Any):
        self._library = library

    def load_sas_replan(self, sas: bytes) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Restore `sys.argv` and stdout after the translator, which replaces both."""
    argv, stdout = sys.argv, sys.stdout
    collecting = gc.isenabled()
    gc.disable()  # a translation makes many small objects and drops few: collecting them costs a third of its time
    try:
        yield
    finally:
        sys.argv, sys.stdout = argv, stdout
        if collecting:
            gc.enable()


def _fresh(symbol: Any) -> Any:
    """Return a deep copy of a grammar symbol, so that it has separate contexts."""
    new = copy.copy(symbol)
    for name in ("symbol", "expression"):
        inner = getattr(new, name, None)
        if hasattr(inner, "context"):
            setattr(new, name, _fresh(inner))
    return new


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    # Names and mappings are added to a context, never changed in place: shallow copies do.
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _evaluated(expression: str, context: dict[str, Any], module: dict[str, Any]) -> Any:
    """Return the value of a grammar's expression with the context's variables.

    textworld 1.7 puts them into `locals()`, which `eval` does not see from Python 3.13 on (PEP 667).
    """
    return eval(expression, module, dict(context["variables"]))
