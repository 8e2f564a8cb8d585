"""What the model wrote is what the tool gets: thoughts, markers inside arguments, odd names, headers in any order."""

import functools
import json

import pytest
from shipped_templates import NATIVE, TASK, stop_ids, tokenizer_of

from g2po_trl.prompts.conversation import ChatRequest
from g2po_trl.prompts.conversation_encoder import ConversationEncoder, Transcript
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.prompts.tool_calls import TOOL_PROMPT, ProseTools, parse_tool_calls, split_thought


def tool(name, argument="text", schema=None):
    described = {"type": "string", "description": "x"} if schema is None else schema
    properties = {argument: described, "digit": {"type": "integer", "description": "y"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "Write.", "parameters": parameters}}


def call(text, name="write"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': text}})}</tool_call>"


def arguments(message):
    return [one["function"]["arguments"]["text"] for one in message.get("tool_calls", ())]


MARKERS = ["</think>", "<think>", "a </tool_call b", "a </tool_call> b", '"</tool_call>"', "\n x \n", "", "ü {} null"]


@pytest.mark.parametrize("text", MARKERS)
@pytest.mark.parametrize(
    "before", ["", "<think>I write.</think>", "<think>as </think> <think> says</think>", "So:</think>"]
)
def test_markers_inside_arguments_are_text(before, text):
    completion = before + call(text)
    message, valid = ProseTools().parse(completion, [], [], [tool("write")])
    action, in_window = TOOL_PROMPT.read(completion)
    assert valid and in_window and arguments(message) == [text] and action == call(text)


@pytest.mark.parametrize("completion", [f"<think>I could {call('x')}, but", f"{call('x')} <think>", "<think>"])
def test_an_unfinished_thought_makes_no_call(completion):
    begun, opened = completion.startswith("<think>"), "<think>\n"
    for text, prompt_end in ((completion, "" if begun else opened), (completion.removeprefix("<think>"), opened)):
        assert split_thought(text, prompt_end)[1] is None
        action, valid = parse_tool_calls(text, prompt_end)
        assert not valid and "<tool_call>" not in action


@pytest.fixture(scope="module")
def encoders():
    @functools.cache
    def encoder(name):
        tokenizer = tokenizer_of(name)
        return tokenizer, ConversationEncoder(ChatEncoder(tokenizer), stop_ids(tokenizer))

    return encoder


def shown(tokenizer, encoder, function, tools=None):
    """Return a function that reads the first tokens of a call that the chat template writes, and their number."""
    tools, made = tools or [tool(function["name"])], {"type": "function", "function": function}
    whole = encoder._text([*TASK, {"role": "assistant", "content": "", "tool_calls": [made]}], tools, False)
    starts = (encoder._text(TASK, tools), encoder._text(TASK, tools, False))
    start = next(one for one in starts if whole.startswith(one))
    written, prompt = tokenizer([whole[len(start) :], start], add_special_tokens=False)["input_ids"]

    def read(length):
        message, valid = encoder.tools.parse(encoder.decode(written[:length]), written[:length], prompt, tools)
        return [one["function"] for one in message.get("tool_calls", ())], valid

    return read, len(written)


NAMES = [*((name, "text") for name in ("write", "get-text", "docs.create", "a:b")), ("write", "a-b"), ("write", "$a")]


@pytest.mark.parametrize("template", sorted(NATIVE))
def test_a_call_is_read_as_it_is_shown_whatever_tool_and_argument_are_called(encoders, template):
    """In prose, if the template's own form does not come back."""
    for name, argument in NAMES:
        function = {"name": name, "arguments": {argument: "x y", "digit": 7}}
        read, length = shown(*encoders(template), function, [tool(name, argument)])
        assert read(length) == ([function], True)


TEXTS = ["    return 1", "\n x\n", "</think>", 'say "hi"', "a\\b", "null", "7", "true", "", "ü漢😀", '{"k": 1}']
PARTED = ["    return 1", "</think>", '{"k": 1}']


@pytest.mark.parametrize("template", sorted(NATIVE))
def test_arguments_come_back_and_a_part_of_a_call_is_none(encoders, template):
    for text in TEXTS:
        function = {"name": "write", "arguments": {"text": text, "digit": 7}}
        read, length = shown(*encoders(template), function)
        assert read(length) == ([function], True)
        if text in PARTED:
            assert all(read(part)[0] in ([], [function]) for part in range(1, length)), text


@pytest.mark.parametrize("template", sorted(NATIVE))
def test_a_call_with_a_marker_inside_is_read_whole_or_not_at_all(encoders, template):
    function = {"name": "write", "arguments": {"text": "a </tool_call> b", "digit": 7}}
    read, length = shown(*encoders(template), function)
    in_json = template.startswith(("qwen2", "qwen3")) and not template.startswith(("qwen3_5", "qwen3_6", "qwen3_8"))
    assert read(length) in (([function], True), ([], False))[: 1 if in_json else 2]


REF = {"$ref": "#/$defs/Point"}
OPTIONAL = {"anyOf": [REF, {"type": "null"}]}
VALUES = [
    (True, 7),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12"),
    ({"enum": [1, 2]}, 2),
    ({}, None),
    ({}, 7),
    (REF, {"k": [7]}),
    (OPTIONAL, {"k": 7}),
    ({"type": ["string", "null"]}, None),
    ({"type": "object"}, {"None": [None, "a: None, b"], "k": None}),
]


@pytest.mark.parametrize("template", sorted(NATIVE))
def test_values_that_are_no_texts_do_not_become_texts(encoders, template):
    """In XML `null` and `7` are told from texts by the types of a schema; tools without are described in words."""
    for schema, value in VALUES:
        function = {"name": "write", "arguments": {"text": value}}
        read, length = shown(*encoders(template), function, [tool("write", "text", schema)])
        assert read(length) == ([function], True)


@pytest.mark.parametrize("template", sorted(name for name in NATIVE if name.startswith("gemma4")))
def test_none_is_null_outside_of_texts_in_either_quotes(encoders, template):
    """Arguments are plain JSON data, as in other forms: no NaN, and no half of a surrogate."""
    tokenizer, encoder = encoders(template)
    body = '{a:"say \\"None\\", \\ud800",b:<|"|>say "None<|"|>,"None":[None,NaN],c:"None"}'
    ids = tokenizer(f"<|tool_call>call:write{body}<tool_call|>", add_special_tokens=False)["input_ids"]
    message, valid = encoder.tools.parse(encoder.decode(ids), ids, [], [tool("write")])
    wanted = {"a": 'say "None", ?', "b": 'say "None', "None": [None, None], "c": "None"}
    assert valid and message["tool_calls"][0]["function"]["arguments"] == wanted


HALF = "<tool_call>\n<function=write>\n<parameter=text>\n/d\n</parameter>\n"
IN_XML = ("qwen3_5_nothink", "nemotron_3_nano", "nemotron_3_super", "qwen3_8")
BROKEN = [
    *((one, f"{HALF}<parameter=digit>\n7\n</function>\n</tool_call>") for one in IN_XML),
    *((one, HALF.replace("=text", " text") + "</function>\n</tool_call>") for one in IN_XML),
    ("glm4moe", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>/d\n</tool_call>"),
    ("glm4moe", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value> b</arg_value>\n</tool_call>"),
    ("qwen3", '<tool_call>\n{"name": "write", "parameters": {"text": "x"}}\n</tool_call>'),
    ("qwen3", '<tool_call>\n{"name": "write", "text": "x"}\n</tool_call>'),
    ("qwen3", '<tool_call>\n{"name": "write", "arguments": []}\n</tool_call>'),
    ("lfm2_v2", "<|tool_call_start|>[write(text='x')]<|tool_call_end|>"),
    *(
        ("llama3_1", f'{{"name": "write", "parameters": {{"text": "x"}}}}{end}')
        for end in (" done", '; {"name": "write"')
    ),
    ("llama3_1", '{"name": "write", "arguments": {"text": "x"}}'),
    ("qwen3", "<think>I wonder whether the answer is 4"),
    ("gptoss", "<|channel|>analysis<|message|>I wonder<|end|>"),
    *((one, f"{call('x')}<tool_call>") for one in ("qwen3", "words")),
]


@pytest.mark.parametrize(("template", "written"), BROKEN)
def test_a_call_of_which_a_part_would_be_dropped_is_invalid(encoders, template, written):
    if template == "words":
        read = ProseTools().parse(written, [], [], [tool("write")])
    else:
        tokenizer, encoder = encoders(template)
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        read = encoder.tools.parse(encoder.decode(ids), ids, [], [tool("write")])
    assert not read[1] and not arguments(read[0])


def test_a_call_in_an_unfinished_thought_of_a_native_format_is_none(encoders):
    tokenizer, encoder = encoders("qwen3_5_think")
    for thought, calls in (("I could {} but", []), ("Yes.</think>\n\n{}", ["/d"])):
        text = thought.format(f"{HALF}</function>\n</tool_call>")
        prompt, ids = tokenizer([encoder._text(TASK, [tool("write")]), text], add_special_tokens=False)["input_ids"]
        message, _ = encoder.tools.parse(encoder.decode(ids), ids, prompt, [tool("write")])
        assert arguments(message) == calls


NEXT, JSON = "<|end|><|start|>assistant", '<|message|>{"text": "x"}<|call|>'
HARMONY = [  # as the template writes it; as OpenAI's models do; a call in the analysis channel; after a preamble
    (f"<|channel|>analysis<|message|>Hm.{NEXT} to=functions.write<|channel|>commentary json{JSON}", ""),
    (f"<|channel|>commentary to=functions.write <|constrain|>json{JSON}", ""),
    (f"<|channel|>analysis to=functions.write <|constrain|>json{JSON}", ""),
    (f"<|channel|>commentary<|message|>So:{NEXT}<|channel|>commentary to=functions.write{JSON}", "So:"),
]


@pytest.mark.parametrize(("written", "content"), HARMONY)
def test_harmonys_headers_in_any_order(encoders, written, content):
    tokenizer, encoder = encoders("gptoss")
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    message, valid = encoder.tools.parse(encoder.decode(ids), ids, [], [tool("write")])
    assert valid and arguments(message) == ["x"] and message["content"] == content
    for length in range(1, len(ids) - 2):  # every beginning of it
        message, _ = encoder.tools.parse(encoder.decode(ids[:length]), ids[:length], [], [tool("write")])
        assert not arguments(message)


@pytest.mark.parametrize("template", sorted(NATIVE))
def test_a_prompt_that_is_rendered_again_ends_in_an_open_turn_of_the_model(encoders, template):
    """Also after a text beside a call, and where the model's own turn was left open by the call."""
    tokenizer, encoder = encoders(template)
    made = {"type": "function", "function": {"name": "write", "arguments": {"text": "x"}}}
    for content in ("", "I write it."):
        said = {"role": "assistant", "content": content, "tool_calls": [made]}
        messages = [*TASK, said, {"role": "tool", "name": "write", "content": "Done."}]
        text = tokenizer.decode(encoder.prompt(ChatRequest(messages, [tool("write")]), Transcript()).ids)
        assert not text.rstrip().endswith(tuple(map(tokenizer.decode, encoder.stops))), text[-80:]
        assert "Done." in text
