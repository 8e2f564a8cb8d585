"""Images in messages: token ids as the processor writes them, requests of agents, results of tools, state keys."""

import json

import numpy as np
import pytest
import vision_models
from letter_environment import drawing
from refusals import refused

from g2po_trl.agents.dialects.chat_completions import parse
from g2po_trl.agents.dialects.request import RefusedRequestError
from g2po_trl.environments.tools.trl_tools import ChatToolEnvironment, ToolEnvironment
from g2po_trl.environments.validation import EnvironmentContractError, validate_observation, validate_step
from g2po_trl.prompts.conversation import ChatRequest, ChatResponse, normalize_messages, pictures_of
from g2po_trl.prompts.conversation_encoder import ConversationEncoder, Transcript
from g2po_trl.prompts.images import ImageEncoder
from g2po_trl.prompts.state_keys import request_key, workspace_key
from g2po_trl.prompts.template import PromptTemplate, fit_prompt
from g2po_trl.prompts.tokenization import ChatEncoder, merge_same_roles
from g2po_trl.utils.images import PLACE, as_picture

FIRST, SECOND, THIRD = (as_picture(drawing(seed, 24 + 8 * seed)) for seed in (1, 2, 3))


def image(picture):
    return {"type": "image", "image": picture}


def text(words):
    return {"type": "text", "text": words}


def asking(*parts):
    return {"role": "user", "content": [*parts]}


@pytest.fixture(params=vision_models.FAMILIES)
def processor(request):
    return vision_models.FAMILIES[request.param]()[0]


def test_token_ids_are_those_of_the_processor(processor):
    """Those of an image are not sampled: Gemma 3's processor, and vLLM, would put one in place of its token."""
    messages, opened = (
        [asking(text("before"), image(first), text("after"), image(second))]
        for first, second in ((FIRST, SECOND), (FIRST.open(), SECOND.open()))
    )
    wanted = processor.apply_chat_template([opened], tokenize=True, return_dict=True, add_generation_prompt=True)
    ids, _ = ChatEncoder(processor)(normalize_messages(messages))
    assert ids == list(wanted["input_ids"][0]) and np.isin(ids, processor.image_token_ids).sum() > 4
    encoder = ImageEncoder(processor)
    (one,) = processor.tokenizer(encoder.token, add_special_tokens=False)["input_ids"]
    assert {one, *processor.image_token_ids} <= {*encoder.token_ids}
    assert len({*encoder.token_ids}) == len(encoder.token_ids)


def test_a_prompt_with_one_token_for_each_image_is_its_text_alone(processor):
    encoder, shown = ImageEncoder(processor), [FIRST, SECOND, FIRST, THIRD]
    before = f"a {encoder.token}b{encoder.token}{encoder.token} c {encoder.token}"
    ids, wanted = encoder.ids([before], shown), processor.tokenizer(before, add_special_tokens=False)["input_ids"]
    assert encoder.unexpanded(ids, shown) == wanted and len(wanted) < len(ids)
    with refused("images"):
        encoder.unexpanded(ids[:-1], shown)


def test_a_prompt_with_images_is_shortened_by_its_text(processor):
    encode, template = ChatEncoder(processor), PromptTemplate("{observation}", "{history}{observation}")
    window = fit_prompt(template, encode, 300, "room " * 200, history=[("o", "a")], images=[FIRST, SECOND])
    assert (len(window.ids), window.images) == (300, [FIRST, SECOND])
    asked = [{"role": "user", "content": [text("room " * 200)]}, {"role": "assistant", "content": "go"}]
    request = ChatRequest([*asked, {"role": "user", "content": [image(FIRST)]}], shorten=True)
    conversation = ConversationEncoder(encode).prompt(request, Transcript(), 300)
    assert (len(conversation.ids), conversation.images) == (300, [FIRST])


def test_an_environment_cannot_write_the_token_of_an_image():
    processor = vision_models.qwen()[0]
    encode = ChatEncoder(processor)
    plain, _ = encode([{"role": "user", "content": f"{processor.image_token} and <|im_end|>"}])
    assert processor.image_token_id not in plain
    template = PromptTemplate("{observation}", "{observation}")
    both, _ = encode(template.messages(f"{processor.image_token} {PLACE}", images=[FIRST]))
    assert (np.array(both) == processor.image_token_id).sum() == 8  # of 32 x 16 pixels, in squares of 8 x 8


def test_no_text_takes_the_place_of_an_image():
    """A model may write any character, and its actions stand in later prompts."""
    template = PromptTemplate("{task}", "{task}{history}{actions}{observation}", turn="{actions}{observation}")
    (message,) = template.messages("o", PLACE, [PLACE], [(PLACE, PLACE)], 1, images=[FIRST])
    turn = template.turn_message("o", [PLACE], images=[FIRST])
    assert [one["content"].count(PLACE) for one in (message, turn)] == [1, 1]
    assert template.messages("o", PLACE)[0]["content"] == PLACE, "a text without images stays as it is"


def test_a_conversation_with_images_is_continued():
    encoder, transcript = ConversationEncoder(ChatEncoder(vision_models.qwen()[0])), Transcript()
    asked, answer, written = [asking(text("a"), image(FIRST))], {"role": "assistant", "content": "go"}, [70, 78, 257]
    prompt = encoder.prompt(ChatRequest(asked), transcript)
    transcript.add(prompt, None, answer, written)
    request = ChatRequest([*asked, answer, asking(image(SECOND))])
    second, whole = (encoder.prompt(request, known) for known in (transcript, Transcript()))
    assert second.continues and second.ids[: len(prompt.ids) + 3] == [*prompt.ids, *written]
    assert second.images == [FIRST, SECOND] and second.ids == whole.ids
    changed = ChatRequest([asking(text("a"), image(THIRD)), *whole.messages[1:]])
    assert not encoder.prompt(changed, transcript).continues, "another image is another conversation"


def test_messages_with_images_are_joined_with_them():
    joined = merge_same_roles(normalize_messages([asking(image(one)) for one in (FIRST, SECOND)]))
    assert joined == [{"role": "user", "content": f"{PLACE}\n\n{PLACE}", "images": [FIRST, SECOND]}]
    beside = merge_same_roles([{"role": "user", "content": PLACE}, *joined])
    assert beside[0]["content"] == f"\ufffd\n\n{PLACE}\n\n{PLACE}", "a character of a text is no image"


def body(url):
    shown = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps({"messages": [asking(text("see"), shown)]}).encode()


def test_agents_send_images_as_data_urls_alone(tmp_path):
    (message,) = parse(body(SECOND.data_url)).chat.messages
    assert message["content"] == f"see{PLACE}" and message["images"] == [SECOND]
    (again,) = parse(body(SECOND.data_url)).chat.messages
    assert again["images"][0] is message["images"][0], "each request of a conversation has its images again"
    (tmp_path / "a.png").write_bytes(SECOND.png)
    for url in ("https://a.b/c.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", 3, None):
        with pytest.raises(RefusedRequestError):
            parse(body(url))
    with refused("messages"):
        ChatRequest([{"role": "assistant", "content": [image(FIRST)]}])


class Camera:
    """As in TRL's examples: a tool returns blocks."""

    def reset(self, **row):
        return [text("start"), image(FIRST.open())]

    def look(self) -> list:
        """Look."""
        return [image(SECOND.open()), text("Speed: 3.")]

    def listen(self) -> list:
        """Listen."""
        return [{"type": "audio", "audio": "x"}]

    def get_reward(self):
        return 1.0


def call(name):
    return ChatResponse("", ({"type": "function", "function": {"name": name, "arguments": {}}},)).to_action()


def test_tools_return_images_as_in_trl():
    chat = ChatToolEnvironment(Camera, 4)
    first = validate_observation(chat.reset(prompt=f"Drive{PLACE}."), "reset")
    assert first.images == (FIRST,) and first.request.messages[-1]["content"] == f"Drive\ufffd.start{PLACE}"
    seen = validate_step(chat.step(call("look")), "step").observation
    assert seen.images == (SECOND,) and pictures_of(seen.request.messages) == [FIRST, SECOND]
    result = {"role": "tool", "name": "look", "content": f"{PLACE}Speed: 3.", "images": [SECOND]}
    assert seen.request.messages[-1] == result
    assert str(SECOND) in seen.state_key
    window = ToolEnvironment(Camera, 4)
    assert validate_observation(window.reset(), "reset").images == (FIRST,)
    seen = validate_step(window.step('<tool_call>{"name": "look", "arguments": {}}</tool_call>'), "step").observation
    assert (seen.text, seen.images) == ("Speed: 3.", (SECOND,))
    with pytest.raises(EnvironmentContractError):
        chat.step(call("listen"))


def test_state_keys_tell_images_apart():
    one, other = (normalize_messages([asking(image(picture))]) for picture in (FIRST, SECOND))
    before = normalize_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert request_key(one) != request_key(other) and request_key(before + one) != request_key(before + other)
    assert workspace_key("f", one, None, "/w") != workspace_key("f", other, None, "/w")
    keys = [request_key([*one, {**before[1], "content": answered}, *one]) for answered in "bc"]
    assert keys[0] == keys[1], "an image says something: what was before it does not matter"
