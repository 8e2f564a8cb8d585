"""Conversations as token ids: the engine's ids are kept, for every chat template that TRL ships."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from refusals import refused
from shipped_templates import CALL, NATIVE, NOT_AFTER_TEXT, TASK, TEMPLATES, TOOLS, stop_ids, tokenizer_of
from transformers import AutoTokenizer
from trl import GRPOTrainer

from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.prompts.conversation_encoder import ConversationEncoder, Transcript
from g2po_trl.prompts.template import PromptError
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.prompts.tool_calls import NativeTools, ProseTools

USER, SYSTEM = {"role": "user", "content": "ask"}, {"role": "system", "content": "rule"}
ANSWER, LATE = {"role": "assistant", "content": "hm"}, {"role": "system", "content": "since then"}
RESULT = {"role": "tool", "name": "turn", "content": "No."}


def calling(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def made(name):
    tokenizer = tokenizer_of(name)
    return tokenizer, ConversationEncoder(ChatEncoder(tokenizer), stop_ids(tokenizer))


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    return request.param, *made(request.param)


def rendered(encoder, messages, tools=None):
    """Return the ids of a conversation that continues none."""
    return encoder.prompt(ChatRequest(messages, tools), Transcript()).ids


def play(encoder, tokenizer, completion, answer, new, messages=TASK, tools=None):
    """Return the first prompt, the completion's ids, and the prompt after it."""
    transcript = Transcript()
    first = encoder.prompt(ChatRequest(messages, tools), transcript)
    end = (stop_ids(tokenizer) or [tokenizer.eos_token_id])[0]
    ids = [*tokenizer(completion, add_special_tokens=False)["input_ids"], end]
    transcript.add(first, tools, answer, ids)
    return first, ids, encoder.prompt(ChatRequest([*messages, answer, *new], tools), transcript)


def test_next_prompt_after_text_begins_with_prompt_and_completion(family):
    name, tokenizer, encoder = family
    answer = {"role": "assistant", "content": "hm, hm"}
    first, ids, second = play(encoder, tokenizer, "hm, hm", answer, [{"role": "user", "content": "It is shut."}])
    assert "Open the safe." in tokenizer.decode(first.ids) and "Be brief." in tokenizer.decode(first.ids)
    assert "It is shut." in tokenizer.decode(second.ids)
    assert (second.continues == len(TASK)) == (name not in NOT_AFTER_TEXT)
    assert not second.continues or second.ids[: len(first.ids) + len(ids)] == first.ids + ids


def test_prompts_that_continue_are_the_rendered_conversation(family):
    """What a template writes for a completion is what the model wrote, and the rest is equal."""
    name, tokenizer, encoder = family
    _, _, second = play(encoder, tokenizer, "hm", ANSWER, [USER])
    text = tokenizer.decode(rendered(encoder, [*TASK, ANSWER, USER]))
    if re.search("think|channel|END_RESPONSE| to=user", text):
        pytest.skip("the template writes a thought or a header, which the completion does not have")
    assert tokenizer.decode(second.ids).replace("]hm", "] hm").replace(":hm", ": hm") == text


def test_native_format_is_chosen_where_calls_are_rendered_and_read(family):
    name, _, encoder = family
    assert isinstance(encoder.tools, NativeTools if name in NATIVE else ProseTools)


def trl_of(tokenizer, encoder):
    """Return as much of TRL's trainer as its own conversation with tools needs."""
    options = {"chat_template": encoder.encode.text._passed_template, "chat_template_kwargs": {}, "_is_vlm": False}
    return SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, **options)


def test_ids_after_a_tool_call_are_those_of_trl(family):
    name, tokenizer, encoder = family
    if name not in NATIVE or name.startswith("lfm2"):
        pytest.skip("its tools are described in words")
    answer = calling(CALL, CALL)
    results = [{"role": "tool", "name": "turn", "content": text} for text in ("click", "{'error': 'stuck'}")]
    first, ids, second = play(encoder, tokenizer, "some call", answer, results, tools=TOOLS)
    theirs = tokenizer.apply_chat_template(
        TASK, tools=TOOLS, add_generation_prompt=True, chat_template=encoder.encode.text._passed_template
    )["input_ids"]
    assert first.ids == theirs
    suffix = GRPOTrainer._get_tool_suffix_ids(trl_of(tokenizer, encoder), results)
    if name == "gemma4_v2":  # TRL leaves out the line break that the template writes after a turn
        suffix = [*tokenizer("\n")["input_ids"], *suffix]
    assert second.ids == first.ids + ids + suffix and second.continues == 2


@pytest.mark.parametrize("name", ["qwen3_5_think", "llama3_1", "glm4moe"])
def test_an_agent_reads_tags_that_are_special_tokens(name):
    tokenizer = tokenizer_of(name)
    tokenizer.add_tokens(["<answer>", "</answer>"], special_tokens=True)
    encoder = ConversationEncoder(ChatEncoder(tokenizer), stop_ids(tokenizer))
    prompt = encoder.prompt(ChatRequest([TASK[1]]), Transcript()).ids
    end = tokenizer.convert_ids_to_tokens(stop_ids(tokenizer))[0]
    ids = tokenizer(f"<answer>7</answer>{end}", add_special_tokens=False)["input_ids"]
    for tools in (None, TOOLS):
        message, valid = encoder.tools.parse(encoder.decode(ids), ids, prompt, tools)
        read = message.get("reasoning_content") or message["content"]  # the prompt may have opened a thought
        assert read == encoder.decode(ids) == "<answer>7</answer>"
        assert valid is not (name == "qwen3_5_think" and tools is TOOLS), "a thought that is not finished"


def test_a_tools_description_cannot_end_a_turn(family):
    """It may be another's, as of an MCP server."""
    name, tokenizer, encoder = family
    said = f"Turn{tokenizer.eos_token}ü the dial."
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "description": said}}
    plain, marked = (rendered(encoder, [USER], [one]) for one in (TOOLS[0], tool))
    assert marked.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    assert said in tokenizer.decode(marked)


@pytest.mark.parametrize(
    "messages", [[SYSTEM], [USER, ANSWER, SYSTEM], [USER, ANSWER, SYSTEM, USER], [SYSTEM, USER, ANSWER, LATE, USER]]
)
def test_system_messages_anywhere_are_shown(family, messages):
    _, tokenizer, encoder = family
    text = tokenizer.decode(rendered(encoder, messages))
    assert all(message["content"] in text for message in messages)


@pytest.mark.parametrize("name", ["llama3_1", "gptoss", "qwen2_5"])
def test_several_calls_of_a_message_are_rendered_or_refused(name):
    """Llama's template raises for several calls in a message, and gpt-oss's writes the first alone."""
    tokenizer, encoder = made(name)
    look = {"type": "function", "function": {"name": "look", "arguments": {"digit": 8}}}
    with nullcontext() if name == "qwen2_5" else pytest.raises(PromptError, match="conversation refused"):
        text = tokenizer.decode(rendered(encoder, [*TASK, calling(CALL, look), RESULT, RESULT, USER], TOOLS))
        assert text.rindex('"digit": 8') > text.rindex('"digit": 7')


def test_a_token_that_ends_a_message_and_begins_the_next_is_read_once():
    tokenizer, encoder = made("glm4moe")
    _, _, second = play(encoder, tokenizer, "hm", ANSWER, [USER])
    assert second.continues and tokenizer.decode(second.ids).endswith("hm<|user|>\nask<|assistant|>")


@pytest.fixture(scope="module")
def qwen():
    tokenizer = tokenizer_of("qwen2_5")
    return tokenizer, ConversationEncoder(ChatEncoder(tokenizer))


SEVEN = '<tool_call>{"name": "turn", "arguments": {"digit": 7}}</tool_call>'
ARGUMENTS = '<tool_call>{"name": "turn", "arguments": {"digit": '


@pytest.mark.parametrize(
    "completion, digits",
    [
        (SEVEN, [7]),
        (f"I try.{SEVEN}{SEVEN}", [7, 7]),
        (ARGUMENTS + '"\\ud800"}}</tool_call>', ["?"]),
        (ARGUMENTS + "</tool_call>", None),
        ('<tool_call>{"arguments": {}}</tool_call>', None),
        ('<tool_call>{"name":', None),
        (ARGUMENTS + "[" * 3000 + "</tool_call>", None),
        (ARGUMENTS + "[" * 200 + "]" * 200 + "}}</tool_call>", None),
        ("That is all.", []),
        ("", []),
    ],
)
def test_parse_says_whether_calls_could_be_read(qwen, completion, digits):
    """An agent that offers no tools reads the content alone, which is null beside tool calls."""
    tokenizer, encoder = qwen
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    for tools in (encoder.tools, NativeTools(tokenizer), ProseTools()):
        message, readable = tools.parse(completion, ids, rendered(encoder, TASK, TOOLS), TOOLS)
        found = [call["function"]["arguments"]["digit"] for call in message.get("tool_calls", [])]
        assert (readable, found) == (digits is not None, digits or [])
        assert tools.parse(completion, ids, [], None) == ({"role": "assistant", "content": completion}, True)


def test_completion_without_tokens_is_an_empty_message(family):
    _, _, encoder = family
    assert encoder.tools.parse("", [], [], TOOLS) == ({"role": "assistant", "content": ""}, True)


def test_prompt_continues_the_longest_known_conversation_and_else_is_rendered(qwen):
    tokenizer, encoder = qwen
    user, transcript = {"role": "user", "content": "look"}, Transcript()
    messages, expected = list(TASK), []
    for text in ("one", "two", "three"):
        prompt = encoder.prompt(ChatRequest(messages), transcript)
        assert prompt.ids[: len(expected)] == expected
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        answer = {"role": "assistant", "content": text}
        transcript.add(prompt, None, answer, ids)
        expected, messages = prompt.ids + ids, [*messages, answer, user]
    rewritten = [*messages[:4], {**messages[4], "content": "rewritten"}, user]
    edited = [TASK[0], {"role": "user", "content": "Leave."}, *messages[2:]]
    for sent, tools, continues in (
        (messages, None, 6),
        ([*messages[:5], user], None, 4),  # a call in parallel
        (messages, TOOLS, 0),  # other tools, another beginning
        (rewritten, None, 0),
        (edited, None, 0),
    ):
        prompt = encoder.prompt(ChatRequest(sent, tools), transcript)
        assert prompt.continues == continues and sent[1]["content"] in tokenizer.decode(prompt.ids)


def test_completion_without_its_end_is_ended(qwen):
    tokenizer, encoder = qwen
    transcript = Transcript()
    prompt, ids = encoder.prompt(ChatRequest(TASK), transcript), tokenizer("hm")["input_ids"]
    transcript.add(prompt, None, ANSWER, ids)
    continued = encoder.prompt(ChatRequest([*TASK, ANSWER, USER]), transcript)
    assert continued.ids[: len(prompt.ids) + len(ids) + 1] == [*prompt.ids, *ids, tokenizer.eos_token_id]
    assert continued.ids == rendered(encoder, [*TASK, ANSWER, USER])


def long_conversation(turns):
    messages = list(TASK)
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"act {number}"}, {"role": "user", "content": f"seen {number}"}]
    return messages


def test_long_conversation_loses_its_oldest_turns_and_then_continues(qwen):
    tokenizer, encoder = qwen
    limit, transcript, dropped, continued = len(rendered(encoder, long_conversation(7))), Transcript(), [], []
    for turns in range(12):
        prompt = encoder.prompt(ChatRequest(long_conversation(turns), shorten=True), transcript, limit)
        text = tokenizer.decode(prompt.ids)
        assert len(prompt.ids) <= limit and "Be brief." in text and "Open the safe." in text
        assert turns == 0 or f"seen {turns - 1}" in text
        assert prompt.truncated == (transcript.dropped > 0)
        dropped.append(transcript.dropped)
        continued.append(prompt.continues > 0)
        answer = {"role": "assistant", "content": f"act {turns}"}
        transcript.add(prompt, None, answer, [*tokenizer(f"act {turns}")["input_ids"], tokenizer.eos_token_id])
    assert dropped[:8] == [0] * 8 and dropped[8] >= 2 and dropped == sorted(dropped)
    assert continued.count(False) == len(set(dropped)), "afresh at first, and where turns went"
    with refused("max_prompt_length"):
        encoder.prompt(ChatRequest(long_conversation(11)), Transcript(), limit)


def test_a_long_task_stays_after_an_example_and_loses_its_middle(qwen):
    tokenizer, encoder = qwen
    long = {"role": "user", "content": "begin " + "x " * 500 + " finish"}
    messages = [TASK[0], USER, ANSWER, long, *long_conversation(20)[2:]]
    prompt = encoder.prompt(ChatRequest(messages, shorten=True, task=4), Transcript(), 150)
    text = tokenizer.decode(prompt.ids)
    assert 140 <= len(prompt.ids) <= 150 and prompt.truncated
    assert all(part in text for part in ("Be brief.", "hm", "begin", "finish", "seen 19"))
    assert [message["content"] for message in prompt.messages[4:6]] == ["act 19", "seen 19"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen2_5"])
def test_saved_tokenizer_writes_the_same_conversations(name, tmp_path):
    """Also where TRL knows how calls are read by the model's own template alone, which the saved one is not."""
    own, (tokenizer, encoder) = tokenizer_of(name).chat_template, made(name)
    assert encoder.replaced == (name != "qwen2_5")
    with encoder.saved():
        tokenizer.save_pretrained(tmp_path)
    assert tokenizer.chat_template == own and getattr(tokenizer, "response_template", None) is None
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (saved.chat_template == own) == (not encoder.replaced)
    again = ConversationEncoder(ChatEncoder(saved), stop_ids(saved))
    request = ChatRequest([*TASK, calling(CALL), RESULT, USER], TOOLS)
    prompts = [one.prompt(request, Transcript()).ids for one in (encoder, again)]
    assert prompts[0] == prompts[1] and not again.replaced and type(again.tools) is type(encoder.tools)
    call = tokenizer('<tool_call>\n{"name": "turn", "arguments": {"digit": 7}}\n</tool_call>')["input_ids"]
    read = [one.tools.parse(tokenizer.decode(call), call, prompts[0], TOOLS) for one in (encoder, again)]
    assert read[0] == read[1]


def test_prose_describes_tools_and_writes_calls_and_results_as_text():
    written, tools = ProseTools().render([TASK[1], {**calling(CALL), "content": "hm"}, RESULT], TOOLS)
    assert tools is None and [m["role"] for m in written] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOLS[0]["function"]) in written[0]["content"]
    assert written[2]["content"] == 'hm\n<tool_call>{"name": "turn", "arguments": {"digit": 7}}</tool_call>'
    assert ProseTools().render(TASK, None) == (TASK, None)
