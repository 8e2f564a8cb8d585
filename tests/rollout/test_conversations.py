"""Conversations in a rollout: every environment can be played so, and requests of environments are answered."""

import asyncio
import functools
import json
from threading import Thread
from types import SimpleNamespace

import pytest
from metrics_by_hand import call_metrics
from scripted_actors import WITH_ACTIONS, ScriptedEngine, ScriptedStream, play_scripted
from shipped_templates import NATIVE, stop_ids, tokenizer_of
from tools_by_hand import Safe
from toy_environments import Countdown
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from g2po_trl import EpisodeLimits, Observation, PromptTemplate, StepResult, TextEnvironment
from g2po_trl.engines.base import Completion
from g2po_trl.environments.setup import played_as
from g2po_trl.prompts.conversation import ChatRequest, ChatResponse
from g2po_trl.prompts.conversation_encoder import ConversationEncoder
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.prompts.tool_calls import TOOL_PROMPT
from g2po_trl.rollout.conversations import Conversations, request_of
from g2po_trl.rollout.episode import Episode, sent
from g2po_trl.rollout.stats import RolloutStats
from g2po_trl.runs.metrics import summarize


@pytest.fixture(params=[ScriptedEngine, ScriptedStream], ids=["turns", "streams"])
def play(request, encode):
    return functools.partial(play_scripted, request.param, encode)


def go(prompt):
    return "go<|im_end|>"


def user(text):
    return {"role": "user", "content": text}


def test_environment_without_requests_is_played_as_a_conversation(play, encode):
    (windowed,), _, _ = play([{"turns": 3}], Countdown, go)
    (trajectory,), stats, calls = play([{"turns": 3}], Countdown, go, history="conversation")
    steps, ((first,), (second,), (third,)) = trajectory.steps, calls
    assert trajectory.outcome == "success" and [s.action for s in steps] == ["go"] * 3
    assert [s.observation for s in steps] == [s.observation for s in windowed.steps]
    assert second[: len(first) + len(steps[0].completion_ids)] == first + steps[0].completion_ids
    assert third[: len(second) + len(steps[1].completion_ids)] == second + steps[1].completion_ids
    text = encode.tokenizer.decode(third)
    assert all(step.observation in text for step in steps) and text.count("assistant\ngo<|im_end|>") == 2
    assert stats.metrics()["rollout/continued_prompt_fraction"] == 1.0
    assert all(step.messages is None for step in steps), "observations and completions are the conversation"


class Asks(TextEnvironment):
    """Sends requests with their own stops and limits, and records what comes back."""

    def reset(self, stop=(), max_tokens=None):
        self.options, self.answers = {"stop": tuple(stop), "max_tokens": max_tokens}, []
        self.messages = [user("one")]
        return self._ask()

    def _ask(self):
        return Observation(self.messages[-1]["content"], request=ChatRequest(list(self.messages), **self.options))

    def step(self, action):
        response = ChatResponse.read(action)
        self.answers.append(response)
        self.messages += [response.message(), user("more")]
        done = len(self.answers) == 2
        facts = [[a.content, a.finish_reason, a.prompt_tokens, a.completion_tokens] for a in self.answers]
        return StepResult(self._ask().text if done else self._ask(), 1.0, done, info={"answers": facts})


def test_requests_end_completions_where_they_ask(play, encode):
    """Each by its own stop or limit, also where the engine answers all of them in one call."""
    tasks = [{}, {"stop": ["STOP"]}, {"max_tokens": 2}]
    trajectories, _, _ = play(tasks, Asks, lambda prompt: "a b STOP and more<|im_end|>")
    free, stopped, short = trajectories
    whole = encode.tokenizer("a b STOP and more<|im_end|>")["input_ids"]
    for step in free.steps:
        assert step.completion_ids == whole and json.loads(step.action) == {"content": "a b STOP and more"}
    for step in stopped.steps:
        assert json.loads(step.action)["content"].strip() == "a b" and not step.completion_truncated
        assert "STOP" in encode.decode(step.completion_ids), "what was sampled is trained"
        assert step.completion_ids == whole[: len(step.completion_ids)]
    for step in short.steps:
        assert step.completion_ids == whole[:2] and step.completion_truncated
    assert [t.info["answers"][0][1] for t in trajectories] == ["stop", "stop", "length"]
    for trajectory in trajectories:
        lengths = [[len(s.prompt_ids), len(s.completion_ids)] for s in trajectory.steps]
        assert [answer[2:] for answer in trajectory.info["answers"]] == lengths


def test_request_that_is_too_long_ends_the_episode_by_name(play):
    (trajectory,), _, _ = play([{}], Asks, go, max_prompt_length=3)
    assert (trajectory.outcome, trajectory.steps) == ("failure", [])
    assert trajectory.failure_reason.startswith("prompt too long: the conversation")


TOOLS = played_as(Safe, EpisodeLimits(4))[0]


@pytest.mark.parametrize(
    ("environment", "task", "valid", "steps"),
    [(Asks, {}, True, 2), (TOOLS, {}, False, 1), (Countdown, {"turns": 4}, False, 4)],
)
def test_empty_completion_is_a_message_of_an_agent_and_no_action(play, environment, task, valid, steps):
    """A class with tools ends its episode without a call, as with a text."""
    (trajectory,), _, _ = play([task], environment, lambda prompt: "<|im_end|>", history="conversation")
    assert (trajectory.steps[0].valid, len(trajectory.steps)) == (valid, steps)
    if environment is TOOLS:
        assert json.loads(trajectory.steps[0].action) == {"content": ""} and trajectory.outcome == "failure"


@pytest.fixture
def conversation(encode):
    """Conversations of a rollout, and an episode of them."""
    return Conversations(ConversationEncoder(encode), WITH_ACTIONS, None, RolloutStats()), Episode("task")


def completed(conversation, request, completion):
    """Return the first step of an episode: its request, and this completion."""
    conversations, episode = conversation
    episode.observation = Observation("one", request=request)
    return conversations.step(episode, request, conversations.prompt(episode, request), completion)


@pytest.mark.parametrize("inside_of_a_token", [False, True])
def test_stop_of_a_request_is_trained_and_not_in_the_next_prompt(encode, conversation, inside_of_a_token):
    """What the client did not see is not in its conversation; after a stop inside of a token it is rendered afresh."""
    word = next(word for word in sorted(encode.tokenizer.get_vocab()) if word.isalpha() and len(word) > 3)
    stop = word[2:] if inside_of_a_token else word
    ids = [*encode.tokenizer("a ")["input_ids"], encode.tokenizer.get_vocab()[word]]
    step = completed(conversation, ChatRequest([user("one")], stop=(stop,)), Completion(ids))
    assert encode.decode(step.completion_ids) == f"a {word}"
    answer, (conversations, episode) = {"role": "assistant", **json.loads(step.action)}, conversation
    later = conversations.prompt(episode, ChatRequest([user("one"), answer, user("one")]))
    assert later.continues == (0 if inside_of_a_token else 1)
    assert stop not in encode.tokenizer.decode(later.ids)


@pytest.mark.parametrize("complete", [True, False])
def test_a_completion_that_the_limit_cut_makes_no_call(encode, conversation, complete):
    """Half of its arguments may be read as all of them."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "remove", "description": "", "parameters": schema}}]
    ids = encode.tokenizer('<tool_call>{"name": "remove", "arguments": {"text": "x"}}</tool_call>')["input_ids"]
    step = completed(conversation, ChatRequest([user("one")], tools), Completion(ids, complete=complete))
    assert step.valid is complete and ("tool_calls" in json.loads(step.action)) is complete


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def written(encoder, calls, content=""):
    """Return what the family's template writes for an assistant's message, after the generation prompt."""
    answer = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    before, whole = encoder.encode.text([user("x")]), encoder.encode.text([user("x"), answer], None, False)
    common = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
    return whole[common:]


def rollout_of_trl(tokenizer, encoder, prompt, script, max_completions):
    """Return the messages and the prompts' ids of TRL's own loop, with these completions."""
    environment, prompts = Safe(), []
    prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + environment.reset()}]
    tools = [environment.listen, environment.turn]
    template = encoder.encode.text._passed_template
    loop, reader = asyncio.new_event_loop(), encoder.tools.own

    def generate(prompt_ids, *args, **kwargs):
        prompts.append(list(prompt_ids[0]))
        return [script[len(prompts) - 1]], None

    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=reader, chat_template=template, chat_template_kwargs={}, _is_vlm=False,
        tools=tools, environment_factories=None, max_tool_calling_iterations=max_completions - 1, use_vllm=False,
        _sync_tool_dicts=[{"turn": environment.turn}], _async_tool_dicts=[{"listen": environment.listen}],
        max_completion_length=10**6, model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        async_loop=loop, _generate_single_turn=generate,
    )  # fmt: skip
    trainer._get_tool_suffix_ids = functools.partial(GRPOTrainer._get_tool_suffix_ids, trainer)
    first = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, chat_template=template)
    Thread(target=loop.run_forever, daemon=True).start()
    (completion,), _ = generate([first["input_ids"]])
    messages = [[parse_response(reader, completion, prefix=first["input_ids"], tools=tools)]]
    _, messages, *_ = GRPOTrainer._tool_call_loop(
        trainer, [list(prompt)], [first["input_ids"]], [completion], messages, None, None, {}
    )
    loop.call_soon_threadsafe(loop.stop)
    return [*prompt, *messages[0]], prompts, environment.get_reward()


def rollout_of_ours(encoder, prompt, script, max_completions):
    factory = played_as(Safe, EpisodeLimits(max_completions))[0]
    environment, episode = factory(), Episode("safe")
    conversations = Conversations(encoder, PromptTemplate("", ""), None, RolloutStats())
    episode.open(environment.reset(prompt=prompt))
    prompts = []
    for completion in script:
        request = request_of(episode, conversations.template)
        built = conversations.prompt(episode, request)
        prompts.append(built.ids)
        episode.steps.append(conversations.step(episode, request, built, Completion(completion)))
        episode.advance(environment.step(sent(episode.steps[-1])))
        if episode.outcome is not None:
            break
    environment.close()
    said = [[*step.messages, {"role": "assistant", **json.loads(step.action)}] for step in episode.steps]
    return sum(said, []), prompts, episode.reward


@pytest.mark.parametrize("max_completions", [9, 3])
@pytest.mark.parametrize("name", sorted(name for name in NATIVE if not name.startswith(("gptoss", "lfm2"))))
def test_rollout_of_a_tool_class_is_that_of_trl(name, max_completions):
    """Message by message and id by id: several calls, errors, unknown tools, async tools, the end."""
    tokenizer = tokenizer_of(name)
    encoder = ConversationEncoder(ChatEncoder(tokenizer), stop_ids(tokenizer))
    prompt = [user("Open the safe. ")]
    texts = [
        written(encoder, [call("turn", digit=1)]),
        written(encoder, [call("listen"), *([] if name.startswith("llama") else [call("turn", digit=1)])]),
        written(encoder, [call("turn", digit=2, hard=True)]),  # which raises
        written(encoder, [call("close")]),
        written(encoder, [], "That is all."),
    ]
    script = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [i for i, token in enumerate(ids) if token in encoder.stops]
        script.append(ids[: ends[0] + 1] if ends else ids)
    their_messages, theirs, their_reward = rollout_of_trl(tokenizer, encoder, prompt, script, max_completions)
    messages, ours, reward = rollout_of_ours(encoder, prompt, script, max_completions)
    if name == "gemma4_v2":  # TRL leaves out the line break that the template writes after a turn
        theirs = [tokenizer.decode(ids).replace("<turn|><|turn>", "<turn|>\n<|turn>") for ids in theirs]
        ours = [tokenizer.decode(ids) for ids in ours]
    assert ours == theirs and len(ours) == min(5, max_completions) and reward == their_reward
    fields = ("role", "content", "tool_calls", "name")
    assert messages == [{name: m[name] for name in fields if name in m} for m in their_messages]


SAID = {
    "known": '<tool_call>{"name": "turn", "arguments": {"digit": 1}}</tool_call>',
    "unknown": '<tool_call>{"name": "burn", "arguments": {}}</tool_call>',
    "unreadable": '<tool_call>{"name": "turn"</tool_call>',
    "none": "I turn the dial",
}


@pytest.mark.parametrize("history", ["conversation", "window"])
def test_tool_calls_are_counted_as_called_readable_and_known(play, history):
    """Of a class with tools, as a conversation and in the window; there the names of tools are not known."""
    tasks = [{"prompt": f"It is {kind} {number}"} for kind in SAID for number in range(1 + (kind == "none"))]

    def write(prompt):
        return SAID[max(SAID, key=lambda kind: prompt.rfind(f" {kind} "))] + "<|im_end|>"

    factory = played_as(Safe, EpisodeLimits(1), None, history)[0]
    wording = {"template": TOOL_PROMPT} if history == "window" else {}
    trajectories, _, _ = play(tasks, factory, write, max_turns=1, history=history, **wording)
    kinds = [t.steps[0].call for t in trajectories]
    summary, by_hand = summarize(trajectories), call_metrics([t.to_dict() for t in trajectories], {"turn", "listen"})
    if history == "window":
        assert kinds == ["readable", "readable", "unreadable", "none", "none"]
        assert "known_call_ratio" not in summary
        del by_hand["known_call_ratio"]
    else:
        assert kinds == ["known", "unknown", "unreadable", "none", "none"]
        assert by_hand["known_call_ratio"] == 1 / 2
    assert {name: summary[name] for name in by_hand} == pytest.approx(by_hand)
    assert (by_hand["tool_call_ratio"], by_hand["readable_call_ratio"]) == pytest.approx((3 / 5, 2 / 3))
    assert summary["valid_action_ratio"] == 4 / 5, "a text without a call is well-formed"


@pytest.mark.parametrize("history", ["window", "conversation"])
@pytest.mark.parametrize(("room", "outcome", "kind"), [(512, "truncated", None), (511, "failure", "context overflow")])
def test_episode_whose_completion_has_no_room_ends_as_a_failure(play, encode, history, room, outcome, kind):
    length = len(encode(WITH_ACTIONS.messages("left 3", "TASK", ["go"]))[0])
    options = {"max_turns": 1, "history": history, "context_length": length + room}
    (trajectory,), _, calls = play([{"turns": 3}], Countdown, go, **options)
    assert trajectory.outcome == outcome and len(calls) == (kind is None)
    assert (trajectory.failure_reason or "None").partition(":")[0] == f"{kind}"
