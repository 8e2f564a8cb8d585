"""Demonstrations are the rollout's own steps: its prompts, and what an expert answers as a completion."""

import contextlib
from functools import partial

import pytest
from conftest import CHAT_TEMPLATE, build_tokenizer
from corridor import Corridor, add, always_left, go, number, open_safe, sometimes, two_texts
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
from g2po_trl.teach.experts import (
    ExpertEnvironment,
    agent_answer,
    carried_answer,
    find_expert,
    random_answer,
    recorded_answer,
)


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
    assert shown.success and len(shown.steps) == 2
    assert shown.steps[0].response["content"] == "I add."
    assert shown.steps[1].completion == "7"


def test_a_conversation_is_one_row_and_each_window_another():
    (talked,) = in_corridors(Corridor.expert, [3], history="conversation")
    (row,) = build_rows([talked])
    last = talked.steps[-1]
    assert row["input_ids"] == [*last.prompt_ids, *last.completion_ids] and row["actions"] == 3
    taught = [token for token in row["labels"] if token != -100]
    assert taught == [token for step in talked.steps for token in step.completion_ids]
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))
    (seen,) = in_corridors(Corridor.expert, [3])
    rows = build_rows([seen])
    assert [row["input_ids"] for row in rows] == [[*s.prompt_ids, *s.completion_ids] for s in seen.steps]
    assert [row["labels"] for row in rows] == [[-100] * len(s.prompt_ids) + s.completion_ids for s in seen.steps]


def test_an_expert_draws_the_same_again_and_leaves_the_states_their_keys():
    first, again = (in_corridors(go, [2] * 12) for _ in range(2))
    assert [t.to_dict() for t in first] == [t.to_dict() for t in again]
    assert {t.outcome for t in first} == {"success", "failure"}
    assert {step.state_key for t in first for step in t.steps} <= {"key 0", "key 1"}


def test_an_expert_that_gives_up_or_raises_fails_alone():
    shown = in_corridors(sometimes, [1, 2, 3])
    assert [t.outcome for t in shown] == ["success", "error", "failure"]
    assert "KeyError" in shown[1].error and shown[2].failure_reason == "no answer: the expert gave up"


def test_recorded_episodes_are_played_again():
    def again(lengths, *recorded):
        return play(Corridor, [{"length": n} for n in lengths], partial(recorded_answer, recorded))

    right, left = (in_corridors(expert, [2])[0] for expert in (Corridor.expert, always_left))
    played = again([2, 2], right, left)
    assert [[step.action for step in t.steps] for t in played] == [["go right"] * 2, ["go left"]]
    (longer,) = again([3], right)
    assert longer.outcome == "failure" and len(longer.steps) == 2
    right.steps[1].valid = False
    (stopped,) = again([2], right)
    assert stopped.outcome == "failure" and len(stopped.steps) == 1, "no completion without the format is taught"


def test_random_episodes():
    safe = played_as(Safe, EpisodeLimits(3))[0]
    played = play(safe, [{}] * 4, random_answer, tokenizer_of("qwen2_5"), max_turns=3)
    names = {call["function"]["name"] for t in played for step in t.steps for call in step.response["tool_calls"]}
    assert names == {"turn", "listen"}


PICKY = PromptTemplate("{observation}", "{observation}", parse_completion=lambda text, end: (text, False))
ENDLESS = CHAT_TEMPLATE.replace("{{ message['content'] }}<|im_end|>", "{{ message['content'] }}")


@pytest.mark.parametrize(
    ("field", "expert", "template", "chat_template"),
    [
        ("expert", number, DEFAULT_PROMPT, CHAT_TEMPLATE),
        ("messages", two_texts, DEFAULT_PROMPT, CHAT_TEMPLATE),
        ("parse_completion", Corridor.expert, PICKY, CHAT_TEMPLATE),
        ("chat_template", Corridor.expert, DEFAULT_PROMPT, ENDLESS),
    ],
)
def test_an_answer_that_cannot_be_written_is_refused(field, expert, template, chat_template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template
    with refused(field):
        in_corridors(expert, [1], tokenizer=tokenizer, template=template)


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "qwen2_5"])
def test_calls_that_a_template_does_not_write_are_refused(name):
    """Two in one message."""
    calls = [{"name": "add", "arguments": {"a": 3, "b": 4}}] * 2
    with contextlib.nullcontext() if name == "qwen2_5" else refused("expert"):
        (shown,) = play(agent_factory(tool_loop, 1), [{"question": "3+4"}], lambda *_: calls, tokenizer_of(name))
        assert shown.steps[0].tool_calls == 2


def test_an_argument_that_is_read_as_another_is_refused():
    """Qwen 3.5 writes texts and numbers alike, and the schema tells them apart."""
    calls = [{"name": "add", "arguments": {"a": 3, "b": "4"}}]
    with refused("expert"):
        play(agent_factory(tool_loop, 1), [{"question": "3+4"}], lambda *_: calls, tokenizer_of("qwen3_5_nothink"))


def test_what_is_spoken_after_a_prompt():
    for asked, answered, spoken in (
        ("ask: ", "ask: yes", "yes"),
        ("ask: <think>\n", "ask: yes", "</think>\n\nyes"),
        ("ask: <think>\n\n</think>\n\n", "ask: <think></think>yes", "yes"),
    ):
        assert spoken_after(asked, answered) == spoken
        with refused("chat_template"):
            spoken_after(f"Be brief. {asked}", answered)


def test_where_an_expert_is_found(tmp_path):
    game = "from g2po_trl import TextEnvironment\nclass Game(TextEnvironment):\n    def step(self, action): ...\n"
    method = game + "    def expert(self): return 'method'\n"
    tool = "class Game:\n    def reset(self): ...\n    def get_reward(self): ...\n    def expert(self): ...\n"
    function = method + "def expert(game): return 'function'\n"
    for name, source in {"none": game, "method": method, "function": function, "tool": tool}.items():
        (tmp_path / f"found_{name}.py").write_text(source)
        expert = find_expert(f"{tmp_path}/found_{name}.py:Game")
        assert (None if expert is None else expert(None)) == (name if name in ("method", "function") else None)
