"""Chat templates as they are: nothing is lost on the way to the model, ids are the tokenizer's, completions read."""

import re
from datetime import date

import pytest
import vision_models
from refusals import refused
from shipped_templates import tokenizer_of
from tokenizers import normalizers, processors
from trained_tokenizers import trained, words_of
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from g2po_trl.prompts.template import DEFAULT_PROMPT, PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder, ChatTemplate

# In the manner of families, in words of these tests; TRL's templates are in test_conversation_encoder.py.
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
SWITCHED = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns: user, assistant, user, …') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + ASK
DEMANDING = "{% if messages[0].role != 'system' %}{{ raise_exception('who am I?') }}{% endif %}" + CHATML
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for block in m.content %}"
    "{% if block.type == 'image' %}<image>{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
) + ASK
# name -> template, its variables, how the prompt ends, what is done to a system message
FAMILIES = {
    "thinking left to the model": (SWITCHED, {"enable_thinking": True}, "assistant\n", "kept"),
    "thinking switched off": (SWITCHED, {"enable_thinking": False}, "<think>\n\n</think>\n\n", "kept"),
    "no system role, strict turns": (STRICT, {}, "model\n", "joined"),
    "the system message left out": (DEAF, {}, "assistant\n", "joined"),
    "a system message demanded": (DEMANDING, {}, "assistant\n", "kept"),
    "lists of blocks": (BLOCKS, {}, "assistant\n", "kept"),
}
MARKS = ["<s>", "<|turn|>", "<think>", "</think>"]


def with_bos(tokenizer):
    """A tokenizer that puts <s> in front of every text by itself, as Llama's and Gemma's do."""
    tokenizer.add_tokens(MARKS)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "words": with_bos(trained(words_of())),
        "sentencepiece": with_bos(trained(None, normalizers.Replace(" ", "▁"))),
    }


@pytest.fixture(params=["words", "sentencepiece"])
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


def encoder_of(tokenizer, family):
    template, kwargs, end, system = FAMILIES[family]
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer, kwargs), end, system


PROMPT = PromptTemplate(first="Look: {observation}", later="Done:\n{history}\nLook: {observation}", system="You shop.")
CONVERSATION = [
    {"role": "system", "content": "You shop."},
    {"role": "user", "content": "Look: a desk 1"},
    {"role": "assistant", "content": "Action: look"},
    {"role": "user", "content": "Look: a  drawer 2\n- one"},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_and_ids_are_the_tokenizers_own(tokenizer, family):
    encode, end, system = encoder_of(tokenizer, family)
    for messages in (
        DEFAULT_PROMPT.messages("a desk 1", "shop", ["go to desk 1", "look"]),
        PROMPT.messages("a drawer 2", history=[("a desk", "look")], steps_taken=1),
        CONVERSATION,
    ):
        ids, text = encode(messages)
        assert all(message["content"] in text for message in messages) and text.endswith(end)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = tokenizer.bos_token_id
        assert ids.count(bos) == text.count("<s>") == ("bos_token" in tokenizer.chat_template)
        if system == "kept" and family not in ("a system message demanded", "lists of blocks"):
            own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **FAMILIES[family][1])
            assert ids == own["input_ids"], "as by the tokenizer alone"
        if system == "joined" and messages[0]["role"] == "system":
            assert f"You shop.\n\n{messages[1]['content']}" in text, "the user says it first"


def test_neighbours_are_joined_where_roles_must_take_turns(tokenizers):
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    strict, _, _ = encoder_of(tokenizers["words"], "no system role, strict turns")
    assert strict.text(messages) == "<s><|turn|>user\none\n\ntwo<|im_end|>\n<|turn|>model\n"
    free, _, _ = encoder_of(tokenizers["words"], "thinking left to the model")
    assert free.text(messages).count("<|im_start|>user") == 2


def test_what_a_template_cannot_do_is_said_before_any_work(tokenizers):
    tokenizer = tokenizers["words"]
    tokenizer.chat_template = SWITCHED
    with refused("chat_template_kwargs"):
        ChatTemplate(tokenizer, {"enable_thinkin": False})
    for tokenizer.chat_template in ("{{ raise_exception('closed on Sundays') }}", "Hello!"):
        with refused("chat_template"):
            ChatTemplate(tokenizer)(CONVERSATION)


# -- processors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, BLOCKS, STRICT])
def test_a_processor_is_used_by_its_tokenizer(tmp_path, template):
    """Called with texts as a tokenizer is, a processor takes them for images."""
    made = vision_models.gemma3()[0]
    made.chat_template = template.replace("{{ bos_token }}", "")
    made.save_pretrained(tmp_path)
    processor, tokenizer = AutoProcessor.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    encode = ChatEncoder(processor)
    ids, text = encode(CONVERSATION)
    assert all(message["content"] in text for message in CONVERSATION)
    assert ids == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode.decode(ids[:-1] + [tokenizer.eos_token_id]).endswith("model" if template is STRICT else "assistant")
    assert ChatEncoder(tokenizer)(CONVERSATION) == (ids, text), "the same checkpoint by its tokenizer"


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
