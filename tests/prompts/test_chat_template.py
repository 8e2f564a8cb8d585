"""Chat templates as they are: nothing is lost on the way to the model, and ids are the tokenizer's."""

import re
from datetime import date

import pytest
from refusals import refused
from shipped_templates import TEMPLATES, tokenizer_of

from g2po_trl.prompts.template import DEFAULT_PROMPT, PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder, ChatTemplate

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + ASK
DEMANDING = "{% if messages[0].role != 'system' %}{{ raise_exception('who am I?') }}{% endif %}" + CHATML
DEAF = CHATML.replace("in messages", "in messages if m.role != 'system'")
OWN = {"a system message demanded": DEMANDING, "the system message left out": DEAF}
PROMPT = PromptTemplate(first="Look: {observation}", later="Done:\n{history}\nLook: {observation}", system="You shop.")
CONVERSATION = [
    {"role": "system", "content": "You shop."},
    {"role": "user", "content": "Look: a desk 1"},
    {"role": "assistant", "content": "Action: look"},
    {"role": "user", "content": "Look: a  drawer 2\n- one"},
]


def made(name):
    tokenizer = tokenizer_of("qwen2_5" if name in OWN else name)
    tokenizer.chat_template = OWN.get(name, tokenizer.chat_template)
    return tokenizer


@pytest.mark.parametrize("name", [*TEMPLATES, *OWN])
def test_nothing_is_lost_and_ids_are_the_tokenizers_own(name):
    """Where a template shows all roles, the text is what the tokenizer alone writes."""
    tokenizer = made(name)
    encode = ChatEncoder(tokenizer)
    for messages in (
        DEFAULT_PROMPT.messages("a desk 1", "shop", ["go to desk 1", "look"]),
        PROMPT.messages("a drawer 2", history=[("a desk", "look")], steps_taken=1),
        CONVERSATION,
    ):
        ids, text = encode(messages)
        assert all(message["content"] in text for message in messages)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        if encode.text._form == (False, False) and encode.text._shows("system", "user") and not encode.text.kwargs:
            assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_messages_are_joined_where_roles_must_take_turns():
    messages = [{"role": role, "content": word} for role, word in (("system", "be"), ("user", "one"), ("user", "two"))]
    assert "be\n\none\n\ntwo" in ChatTemplate(made("gemma"))(messages)
    assert ChatTemplate(made("qwen2_5"))(messages).count("<|im_start|>user") == 2


def test_variables_of_a_template_are_known_or_refused_before_any_work():
    tokenizer = made("qwen3")
    assert ChatTemplate(tokenizer, {"enable_thinking": False})(CONVERSATION).endswith("<think>\n\n</think>\n\n")
    assert ChatTemplate(tokenizer)(CONVERSATION).endswith("assistant\n")
    with refused("chat_template_kwargs"):
        ChatTemplate(tokenizer, {"enable_thinkin": False})
    for tokenizer.chat_template in ("{{ raise_exception('closed on Sundays') }}", "Hello!"):
        with refused("chat_template"):
            ChatTemplate(tokenizer)(CONVERSATION)


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_a_template_that_writes_todays_date_gets_a_fixed_one(name):
    """It would change prompts at midnight, and those of a resumed run."""
    tokenizer = tokenizer_of(name)
    messages = [{"role": "user", "content": "go"}]
    encode = ChatTemplate(tokenizer, {"strftime_now": "2001-02-03"})
    assert re.search("03 Feb 2001|2001-02-03", encode(messages))
    today = ChatTemplate(tokenizer)
    assert date.fromisoformat(today.kwargs["strftime_now"]) <= date.today()
    assert "2001" not in today(messages), "as it was"
