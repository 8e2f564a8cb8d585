"""Chat templates as they are: nothing is lost on the way to the model, ids are the tokenizer's, completions read."""

import pytest
from conftest import build_tokenizer
from refusals import refused
from tokenizers import normalizers, processors
from trained_tokenizers import trained, words_of
from transformers import AutoProcessor, AutoTokenizer, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

from g2po_trl.prompts.chat_template import ChatTemplate
from g2po_trl.prompts.template import DEFAULT_PROMPT, PromptTemplate
from g2po_trl.prompts.tokenization import ChatEncoder

# Templates in the manner of the families that they are named after; the wording and the tokens are these tests' own.
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + ASK
DEFAULTED = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe of help.<|im_end|>\n{% endif %}" + CHATML
SWITCHED = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}<|completion|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|completion|><think>\n{% endif %}"
)
ALTERNATE = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns: user, assistant, user, …') }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{% set rest = messages %}" + ALTERNATE + "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% set rest = messages %}" + ALTERNATE + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + ASK
DEMANDING = "{% if messages[0].role != 'system' %}{{ raise_exception('who am I?') }}{% endif %}" + CHATML
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for block in m.content %}"
    "{% if block.type == 'image' %}<image>{% elif block.type == 'text' %}{{ block.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
) + ASK
TOOLS = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|turn|>{{ role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}{{ '<|turn|>assistant\n\n' }}"
)
# name -> template, its variables, how the prompt ends, what is done to a system message
FAMILIES = {
    "chatml": (CHATML, {}, "assistant\n", "kept"),
    "a default system message": (DEFAULTED, {}, "assistant\n", "kept"),
    "thinking left to the model": (SWITCHED, {"enable_thinking": True}, "assistant\n", "kept"),
    "thinking switched off": (SWITCHED, {"enable_thinking": False}, "<think>\n\n</think>\n\n", "kept"),
    "thinking opened": (OPENED, {}, "<think>\n", "kept"),
    "no system role, strict turns": (STRICT, {}, "model\n", "joined"),
    "turns without a system role": (INST, {}, "[/INST]", "joined"),
    "the system message left out": (DEAF, {}, "assistant\n", "joined"),
    "a system message demanded": (DEMANDING, {}, "assistant\n", "kept"),
    "lists of blocks": (BLOCKS, {}, "assistant\n", "kept"),
    "a role for tools": (TOOLS, {}, "assistant\n\n", "kept"),
}
MARKS = ["<s>", "<|user|>", "<|completion|>", "<|turn|>", "<think>", "</think>"]


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


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_understood(tokenizer, family):
    """What a model of the family writes: a whole thought, the rest of an opened one, or none where it is closed."""
    encode, end, _ = encoder_of(tokenizer, family)
    _, text = encode(DEFAULT_PROMPT.messages("a desk 1", "shop", ["Go East"]))
    whole, rest, none = "<think>a</think>", "a <action>look</action></think>\n", ""

    def valid(thought):
        return DEFAULT_PROMPT.read(f"{thought}<action>go east</action>", text[-64:], ["Go East"])

    assert valid(whole) == ("Go East", True)
    assert valid(rest).valid is ("<think>" in end) and valid(rest).action == "Go East"
    assert valid(none).valid is end.endswith("</think>\n\n") and valid(none).action == "Go East"


def test_neighbours_are_joined_where_roles_must_take_turns(tokenizers):
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    strict, _, _ = encoder_of(tokenizers["words"], "no system role, strict turns")
    assert strict.text(messages) == "<s><|turn|>user\none\n\ntwo<|im_end|>\n<|turn|>model\n"
    free, _, _ = encoder_of(tokenizers["words"], "chatml")
    assert free.text(messages).count("<|im_start|>user") == 2


def test_a_role_for_tools_is_passed_on(tokenizers):
    encode, _, _ = encoder_of(tokenizers["words"], "a role for tools")
    messages = [*CONVERSATION, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "answer"}]
    assert "<|turn|>ipython\n\nanswer" in encode.text(messages)


def test_what_a_template_cannot_do_is_said_before_any_work(tokenizers):
    tokenizer = tokenizers["words"]
    tokenizer.chat_template = SWITCHED
    with refused("chat_template_kwargs"):
        ChatTemplate(tokenizer, {"enable_thinkin": False})
    for tokenizer.chat_template in ("{{ raise_exception('closed on Sundays') }}", "Hello!"):
        with refused("chat_template"):
            ChatTemplate(tokenizer)(CONVERSATION)


# -- processors -------------------------------------------------------------------------------------------------------


def build_processor(chat_template):
    """A multimodal checkpoint's processor, made from nothing: a tiny tokenizer and an image processor."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    images = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    return Gemma3Processor(images, tokenizer, chat_template=chat_template, image_seq_length=4)


@pytest.mark.parametrize("template", [CHATML, BLOCKS, STRICT])
def test_a_processor_is_used_by_its_tokenizer(tmp_path, template):
    """Called with texts as a tokenizer is, a processor takes them for images."""
    build_processor(template.replace("{{ bos_token }}", "")).save_pretrained(tmp_path)
    processor, tokenizer = AutoProcessor.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    encode = ChatEncoder(processor)
    ids, text = encode(CONVERSATION)
    assert all(message["content"] in text for message in CONVERSATION)
    assert ids == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode.decode(ids[:-1] + [tokenizer.eos_token_id]).endswith("model" if template is STRICT else "assistant")
    assert ChatEncoder(tokenizer)(CONVERSATION) == (ids, text), "the same checkpoint by its tokenizer"


def test_a_multimodal_checkpoint_trains_and_is_saved_with_its_processor(tmp_path):
    """Gemma 3 made from nothing. With stop sequences, which are looked for in the text of a completion."""
    import torch
    from letter_trainer import TASKS, make_letter_trainer
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    processor = build_processor(STRICT.replace("{{ bos_token }}", ""))
    tokenizer = processor.tokenizer
    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        **{f"{name}_token_index": tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
           for name in ("boi", "eoi", "image")},
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    trainer = make_letter_trainer(
        tmp_path / "model", tmp_path / "out", eval_dataset=TASKS.select(range(2)), max_steps=1, stop_sequences=["zz"]
    )
    assert isinstance(trainer.processing_class, Gemma3Processor)
    trainer.train()
    (entry,) = (e for e in trainer.state.log_history if "episode/turns" in e)
    assert entry["episode/turns"] == 2 and entry["update/step_samples"] == 16 and entry["grad_norm"] > 0
    assert trainer.evaluate()["eval_turns"] == 2
    trainer.save_model()
    trainer.close()
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "out"), Gemma3Processor)
