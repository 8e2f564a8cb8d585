"""A tokenizer and a model small enough to be trained in a test, made from nothing."""

import gc
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import cloudpickle
import pytest
from devices import hide_gpus
from imported_files import forget

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a shell; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = (
    "task you are in the room hall cellar attic garden kitchen go to north south east west take key open door "
    "observation possible actions step steps taken so far last one of inside give then think action done reach wait"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_configure(config):
    hide_gpus(config)


def pytest_collection_finish(session):
    """Save CPU time.

    A test's own environment is pickled by value, or its worker would import the test module, and with it torch and
    TRL. What was imported is frozen: collecting it took longer than the rest of a small training.
    """
    for module in {item.module for item in session.items}:
        cloudpickle.register_pickle_by_value(module)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_files():
    yield
    forget()


def build_tokenizer():
    from tokenizers.decoders import ByteLevel
    from trained_tokenizers import trained, words_of

    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "padding_side": "left"}
    first = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fast = trained(words_of(), corpus=[WORDS] * 4, size=400, first=first, **named)
    fast.backend_tokenizer.decoder = ByteLevel()
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def encode():
    """The chat encoder of the tests' tokenizer."""
    from g2po_trl.prompts.tokenization import ChatEncoder

    return ChatEncoder(build_tokenizer())


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Folder with a random Qwen2 model of 0.1 M parameters and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def make_trainer(tmp_path, tiny_model_dir):
    """`make_letter_trainer` with the tiny model, its tokenizer, and output in tmp_path/out; closes what it made."""
    from letter_trainer import make_letter_trainer
    from transformers import AutoTokenizer

    made = []

    def make(*args, model=None, output="out", **kwargs):
        if model is not None and not isinstance(model, (str, Path)) and kwargs.get("processing_class") is None:
            kwargs["processing_class"] = AutoTokenizer.from_pretrained(tiny_model_dir)
        model = tiny_model_dir if model is None else model
        made.append(make_letter_trainer(model, tmp_path / output, *args, **kwargs))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_family_trainer(make_trainer, tmp_path, tiny_model_dir):
    """`make_trainer` with a small model of a family, see `families`, and the tests' tokenizer."""
    from families import FAMILIES
    from letter_environment import LongLetterEnvironment
    from transformers import AutoTokenizer

    def make(name, **options):
        FAMILIES[name].build().save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
        tokenizer.save_pretrained(tmp_path / name)
        options = {"max_completion_length": 4, "max_prompt_length": 500, "processing_class": tokenizer, **options}
        return make_trainer(LongLetterEnvironment, model=tmp_path / name, **options)

    return make


@pytest.fixture
def make_ppo(make_trainer):
    """`make_trainer` of a PPO trainer."""
    from g2po_trl import PPOConfig, PPOTrainer

    return partial(make_trainer, trainer_class=PPOTrainer, config_class=PPOConfig)


@pytest.fixture(scope="module")
def chromium():
    """One browser for the tests of a file: its processes are gone before another file counts its own."""
    program, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver_program):
        pytest.skip("no chromium and chromedriver here")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (
            *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
            *("disable-background-networking", "disable-component-update", "window-size=1366,1000"),
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=options, service=Service(driver_program))
        yield driver
        driver.quit()


@pytest.fixture
def browser(chromium):
    """The browser; what a page complained about during the test fails it."""
    chromium.get("about:blank")
    chromium.get_log("browser")
    yield chromium
    assert [entry for entry in chromium.get_log("browser") if "favicon" not in entry["message"]] == []
