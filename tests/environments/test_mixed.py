"""Several environments in one run: the column `environment` chooses, and each has its own columns and prompts."""

import os
import signal

import pytest
from datasets import Dataset
from mixed_games import LAMP_PROMPT, ROWS, Lamp, Shop, speaker
from refusals import refused
from scripted_agents import calls, says

from g2po_trl import EnvironmentPool, EpisodeLimits, PoolLimits, PromptTemplate, tasks_dataset
from g2po_trl.environments.setup import Setup, agent_factory, played_as
from g2po_trl.environments.several import mixed
from g2po_trl.environments.tools.trl_rewards import check_reward_columns, with_rewards
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment, ToolEnvironment
from g2po_trl.prompts.template import DEFAULT_PROMPT, parse_plain
from g2po_trl.prompts.tool_calls import TOOL_PROMPT

GAMES = agent_factory({"speaker": speaker}, 5, environment_factory={"lamp": Lamp, "shop": Shop})
WORDED = PromptTemplate("own {observation}", "own {observation}", parse_completion=parse_plain)


def playable(environment_factory=GAMES, limits=None, given=None):
    return played_as(environment_factory, limits or EpisodeLimits(5), given)[0]


def templates_of(environment_factory, given=None):
    return played_as(environment_factory, EpisodeLimits(), given)[1]


def test_each_task_is_played_by_its_own_environment_in_workers():
    with EnvironmentPool(playable(), PoolLimits(1)) as pool:
        assert pool.environment_names == ("speaker", "lamp", "shop")
        lamp, shop, agent = pool.reset(ROWS[:3])
        assert (lamp.text, lamp.task, lamp.request) == ("hall 0", "go", None)
        assert [tool["function"]["name"] for tool in shop.request.tools] == ["buy"]
        assert shop.text == "user: Buy it. ['hint', 'prompt']" and agent.text == "user: room ['question']"
        results = pool.step({0: "a", 1: calls(("buy", {"thing": "mug 0"})), 2: says("b")})
        texts = [result.observation.text for result in results.values()]
        assert texts == ["kitchen", "tool: you have 1", "user: room b"]
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        results = pool.step({0: "b", 1: says("done"), 2: says("c")})
        assert [(one.reward, one.terminated) for one in results.values()] == [(10, True), (1, True), (1, True)]
        assert pool.replayed == 3, "with their environments"


def table(rows):
    return Dataset.from_list([dict.fromkeys(name for one in rows for name in one) | row for row in rows])


@pytest.mark.parametrize("make", [table, tasks_dataset])
def test_tables_fill_in_columns_of_other_environments_which_no_reset_gets(make):
    dataset = make(ROWS)
    assert Setup(GAMES, EpisodeLimits(5), None, None, dataset, {"report": dataset}).first_tasks == list(dataset)[:3]
    environment = playable()()
    texts = [environment.reset(**dataset[place]).text for place in range(3)]
    environment.close()
    assert texts == ["hall 0", "user: Buy it. ['hint', 'prompt']", "user: room ['question']"]


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([*ROWS, {"seed": 1}], "environment"),
        ([*ROWS, {"environment": "lamb", "seed": 1}], "environment"),
        ([row for row in ROWS if row["environment"] != "shop"], "environment_factory"),
        ([*ROWS, {"environment": "lamp", "sed": 1}], "Lamp.reset"),
        ([{**row, "task_id": "0"} for row in ROWS if row["environment"] != "lamp"], "task_id"),
    ],
)
def test_tasks_that_do_not_fit_are_refused_by_name(rows, field):
    Setup(GAMES, EpisodeLimits(5), None, None, tasks_dataset(ROWS[::3]), {"report": tasks_dataset(ROWS)})
    with refused(field):
        Setup(GAMES, EpisodeLimits(5), None, None, tasks_dataset(rows), None)


@pytest.mark.parametrize(
    ("agent", "environment_factory", "field"),
    [
        ({}, {"a/b": Lamp}, "environment_factory['a/b']"),
        ({}, {"": Lamp}, "environment_factory['']"),
        ({}, {"lamp": Lamp()}, "environment_factory['lamp']"),
        ({}, {}, "environment_factory"),
        ({"lamp": speaker}, {"lamp": Lamp}, "agent"),
        ({"lamp": speaker}, Lamp, "environment_factory"),
    ],
)
def test_what_are_no_environments_is_refused(agent, environment_factory, field):
    with refused(field):
        agent_factory(agent, 5, environment_factory=environment_factory)


def test_prompts_by_environment():
    templates = templates_of(GAMES)
    assert [templates.of(name) for name in ("lamp", "shop", "speaker")] == [LAMP_PROMPT, TOOL_PROMPT, DEFAULT_PROMPT]
    given = templates_of(GAMES, {"shop": WORDED})
    assert given.of("shop") is WORDED and given.of("lamp") is LAMP_PROMPT and templates_of(GAMES, given) == given
    for wrong in ({"shp": WORDED}, {"shop": "x"}, 3):
        with refused("prompt_template"):
            templates_of(GAMES, wrong)
    # A class with tools and a wording of its own is asked with windows, as in a run of its own.
    for given, kind in (({"shop": WORDED}, ToolEnvironment), (None, ChatToolEnvironment)):
        assert playable(given=given).keywords["environments"]["shop"].func is kind


def test_limits_reach_each_environment():
    limits = EpisodeLimits(5, environment_limits={"shop": {"max_turns": 7}, "speaker": {"max_requests": 9}})
    parts = playable(limits=limits).keywords["environments"]
    assert parts["shop"].args[1] == 7 and parts["lamp"] is Lamp
    assert (parts["speaker"].keywords["max_turns"], parts["speaker"].keywords["max_requests"]) == (5, 9)


def test_reward_functions_get_the_columns_of_all_environments():
    """With `None` where a task has no value, and the column `environment`: as in TRL, in each run."""

    def answered(completions, answer, environment, **columns):
        assert sorted(columns) == ["environments", "goal", "prompts"] and environment in (["shop"], ["mall"])
        return [None if answer == [None] else 1.0]

    factory = with_rewards(mixed({"shop": Shop, "mall": Shop}), answered, None, None)
    environment = played_as(factory, EpisodeLimits(3), history="window")[0]()
    for name, answer, reward in (("shop", None, 0.25), ("mall", "y", 1.25)):
        row = {"environment": name, "goal": "mug", "prompt": "x", "answer": answer}
        check_reward_columns(factory, row)
        environment.reset(**row)
        assert environment.step("done").reward == reward
    with refused("reward_funcs"):
        check_reward_columns(factory, {"environment": "shop", "goal": "mug", "prompt": "x"})
