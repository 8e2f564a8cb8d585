"""Demonstrations are the rollout's own steps: its prompts, and what an expert answers as a completion."""

from functools import partial

import pytest
from conftest import build_tokenizer
from corridor import Corridor, add, go, open_safe, sometimes
from refusals import refused
from scripted_actors import ScriptedEngine
from scripted_agents import tool_loop
from shipped_templates import CALL, NATIVE, TASK, TOOLS, stop_ids, tokenizer_of
from tools_by_hand import Safe

from g2po_trl import EnvironmentPool, Player, PoolLimits, PromptTemplate
from g2po_trl.engines.base import Completion, Engine
from g2po_trl.environments.episode_limits import EpisodeLimits
from g2po_trl.environments.setup import agent_factory, played_as
from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.prompts.conversation_encoder import ConversationEncoder, Transcript
from g2po_trl.prompts.template import DEFAULT_PROMPT, parse_plain
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.prompts.tool_calls import TOOL_PROMPT
from g2po_trl.rollout.actor import PromptActor
from g2po_trl.teach.demonstrations import ExpertActor, build_rows, message_ids, spoken_after
from g2po_trl.teach.experts import ExpertEnvironment, agent_answer, carried_answer, random_answer, recorded_answer


def episodes(tasks):
    return [{"task_id": str(n), "task": task, "seed": n} for n, task in enumerate(tasks)]


def play(factory, tasks, expert, tokenizer=None, template=DEFAULT_PROMPT, max_turns=6, **options):
    tokenizer = tokenizer or build_tokenizer()
    engine = Engine(tokenizer, [tokenizer.eos_token_id])
    actor = ExpertActor(engine, ChatEncoder(tokenizer), template, expert=expert, **options)
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        return Player(pool, actor, EpisodeLimits(max_turns)).play(tasks)[0]


def in_corridors(expert, lengths, **options):
    """Episodes of corridors of these lengths, by an expert."""
    tasks = episodes([{"length": length} for length in lengths])
    return play(partial(ExpertEnvironment, Corridor, expert), tasks, carried_answer, **options)


PLAIN = PromptTemplate("{observation}", "{history} {observation}", parse_completion=parse_plain)
CHAT = {"history": "conversation"}
NATIVE_CHAT = {**CHAT, "tokenizer": tokenizer_of("qwen2_5")}
SAFE = played_as(Safe, EpisodeLimits(6), history="window")[0]
TALK_TO_SAFE = played_as(Safe, EpisodeLimits(6))[0]
GAMES = {
    "window": (Corridor, {"length": 3}, {}),
    "conversation": (Corridor, {"length": 3}, CHAT),
    "plain": (Corridor, {"length": 2}, {"template": PLAIN}),
    "tools in prose": (TALK_TO_SAFE, {"code": "12"}, CHAT),
    "tools in a window": (SAFE, {"code": "12"}, {"template": TOOL_PROMPT}),
    "native tools": (TALK_TO_SAFE, {"code": "12", "prompt": "Open it. "}, NATIVE_CHAT),
}


@pytest.mark.parametrize("name", GAMES)
def test_the_model_that_answers_so_is_asked_the_same(name):
    """An engine that generates a demonstration's completions gets its prompts, and succeeds, in every format."""
    factory, task, options = GAMES[name]
    expert = Corridor.expert if factory is Corridor else open_safe
    (shown,) = play(partial(ExpertEnvironment, factory, expert), episodes([task]), carried_answer, **options)
    assert shown.success and len(shown.steps) > 1
    assert all(step.valid for step in shown.steps)
    answers = {tuple(step.prompt_ids): step.completion_ids for step in shown.steps}
    options = {"template": DEFAULT_PROMPT, "tokenizer": build_tokenizer()} | options
    tokenizer = options.pop("tokenizer")
    engine = ScriptedEngine(tokenizer, lambda prompts: [Completion(answers[tuple(ids)]) for ids in prompts])
    actor = PromptActor(engine, ChatEncoder(tokenizer), **options)
    with EnvironmentPool(factory, PoolLimits(1)) as pool:
        (played,), _ = Player(pool, actor, EpisodeLimits(6)).play([task])
    assert played.success and [step.action for step in played.steps] == [step.action for step in shown.steps]


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_calls_are_written_as_every_template_reads_them(name):
    """After a task, and after the result of an earlier call."""
    tokenizer = tokenizer_of(name)
    # Calls of some models end with another token, as their generation_config says.
    ends = {"gemma4": "<|tool_response>", "glm4moe": "<|observation|>", "gptoss": "<|call|>"}
    stops = [*stop_ids(tokenizer), *(tokenizer.get_vocab()[end] for kind, end in ends.items() if kind in name)]
    encoder = ConversationEncoder(ChatEncoder(tokenizer), stops)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for shown in (TASK, [*TASK, called, {"role": "tool", "name": "turn", "content": "click"}]):
        prompt = encoder.prompt(ChatRequest(shown, TOOLS), Transcript())
        ids = message_ids(encoder, shown, TOOLS, called)
        text = encoder.encode.decode(ids)
        message, valid = encoder.tools.parse(text, ids, prompt.ids, TOOLS)
        assert valid and [call["function"] for call in message["tool_calls"]] == [CALL["function"]]
        assert ids[-1] in encoder.stops and not encoder.stops & set(ids[:-1])


def test_an_agent_is_answered_by_its_messages_and_tools():
    task = {"question": "3+4", "answer": "7"}
    (shown,) = play(agent_factory(tool_loop, 4), [task], partial(agent_answer, add), tokenizer_of("qwen2_5"))
    assert shown.success and [step.response["content"] for step in shown.steps] == ["I add.", "7"]


def test_a_conversation_is_one_row_and_each_window_another():
    (talked,) = in_corridors(Corridor.expert, [3], history="conversation")
    (row,) = build_rows([talked])
    last = talked.steps[-1]
    assert row["input_ids"] == [*last.prompt_ids, *last.completion_ids] and row["actions"] == 3
    taught = [token for token in row["labels"] if token != -100]
    assert taught == [token for step in talked.steps for token in step.completion_ids]
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
    (seen,) = in_corridors(Corridor.expert, [3])
    assert build_rows([seen]) == [
        {
            "input_ids": [*step.prompt_ids, *step.completion_ids],
            "labels": [-100] * len(step.prompt_ids) + step.completion_ids,
            "actions": 1,
        }
        for step in seen.steps
    ]


def test_an_expert_draws_the_same_again_and_leaves_the_states_their_keys():
    first, again = (in_corridors(go, [2] * 12) for _ in range(2))
    assert [t.to_dict() for t in first] == [t.to_dict() for t in again]
    assert {t.outcome for t in first} == {"success", "failure"}
    assert {step.state_key for t in first for step in t.steps} <= {"key 0", "key 1"}


def test_an_expert_that_gives_up_or_raises_fails_alone():
    shown = in_corridors(sometimes, [1, 2, 3])
    assert [t.outcome for t in shown] == ["success", "error", "failure"] and "KeyError" in shown[1].error


def test_recorded_episodes_are_played_again():
    def again(length, recorded):
        return play(Corridor, [{"length": length}], partial(recorded_answer, [recorded]))[0]

    (right,) = in_corridors(Corridor.expert, [2])
    assert [step.action for step in again(2, right).steps] == ["go right"] * 2
    longer = again(3, right)
    assert longer.outcome == "failure" and len(longer.steps) == 2
    right.steps[1].valid = False
    stopped = again(2, right)
    assert stopped.outcome == "failure" and len(stopped.steps) == 1, "no completion without the format is taught"


def test_random_episodes():
    safe = played_as(Safe, EpisodeLimits(3))[0]
    played = play(safe, [{}] * 4, random_answer, tokenizer_of("qwen2_5"), max_turns=3)
    names = {call["function"]["name"] for t in played for step in t.steps for call in step.response["tool_calls"]}
    assert names == {"turn", "listen"}


@pytest.mark.parametrize(
    ("template", "arguments", "number"),
    [("gptoss", {"a": 3, "b": 4}, 2), ("llama3_1", {"a": 3, "b": 4}, 2), ("qwen3_5_nothink", {"a": 3, "b": "4"}, 1)],
)
def test_calls_that_are_read_otherwise_are_refused(template, arguments, number):
    """Two in one message that the template does not write; texts and numbers that it writes alike."""
    calls = [{"name": "add", "arguments": arguments}] * number
    with refused("expert"):
        play(agent_factory(tool_loop, 1), [{"question": "3+4"}], lambda *_: calls, tokenizer_of(template))


def test_what_is_spoken_after_a_prompt():
    for asked, answered, spoken in (
        ("ask: ", "ask: yes", "yes"),
        ("ask: <think>\n", "ask: yes", "</think>\n\nyes"),
        ("ask: <think>\n\n</think>\n\n", "ask: <think></think>yes", "yes"),
    ):
        assert spoken_after(asked, answered) == spoken
        with refused("chat_template"):
            spoken_after(f"Be brief. {asked}", answered)
