"""A real pretrained model, SmolLM2-135M, where it is in the cache: `make test-pretrained`, which fetches it."""

import numpy as np
import pytest
import torch
from families import alone, gradient, in_layout
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, ALFWORLD_PROMPT, AlfworldEnvironment, generate_games
from g2po_envs.alfworld.demonstrations import demonstrate
from g2po_envs.tiny.training import Course
from g2po_recipes.smollm2 import smollm2_in_cache
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.teach.demonstrations import state_rows

FOLDER = smollm2_in_cache()
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(FOLDER is None, reason="SmolLM2 is not in the cache; `make test-pretrained` fetches it"),
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    games = generate_games(tmp_path_factory.mktemp("games"), "train", 60, seed=5, size="tiny")
    return demonstrate(AlfworldEnvironment(games, intro=False), games.rows(), 2, seed=5)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_prompts_are_encoded_as_the_tokenizer_does(shown, tokenizer):
    """1,000 prompts of real games have the ids that the tokenizer makes of the rendered chat template."""
    texts = {}
    for template, history in ((ALFWORLD_COMPACT_PROMPT, 2), (ALFWORLD_PROMPT, 5)):
        course = Course(template, history, None)
        rows = state_rows(shown[:600], template, history, ChatEncoder(tokenizer), {tokenizer.eos_token_id})
        for state, row in zip(shown, rows):
            text, length = course.prompt(state, tokenizer), row["labels"].count(-100)
            assert row["input_ids"][:length] == tokenizer(text, add_special_tokens=False)["input_ids"]
            texts[text] = length
    assert len(texts) >= 1000 and max(texts.values()) > 400, "prompts of two wordings, few of them twice"


@pytest.fixture(scope="module")
def sequences(shown, tokenizer):
    """Prompts and completions of two episodes; the tokens of a completion are scored."""
    stops = {tokenizer.eos_token_id}
    rows = [*state_rows(shown[:14], ALFWORLD_COMPACT_PROMPT, 2, ChatEncoder(tokenizer), stops)]
    found = [np.array(row["input_ids"], dtype=np.int32) for row in rows]
    scored = [len(row["labels"]) - row["labels"].count(-100) for row in rows]
    return found, scored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_exact(sequences, dtype):
    """In float32 to its last digits; in bfloat16 none is much further off than padding, which is rounding alone."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    wanted = alone(model, *sequences)
    length = gradient(model, wanted)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    found = {}
    for layout in ("padded", "shared"):
        log_probs = in_layout(model, *sequences, layout)
        nats = (log_probs - wanted)[wanted != 0].abs()
        by_gradient = ((gradient(model, log_probs) - length).norm() / length.norm()).item()
        found[layout] = nats.max().item(), nats.mean().item(), by_gradient
    for layout, (largest, mean, by_gradient) in found.items():
        if dtype is torch.float32:
            assert largest < 1e-4 and by_gradient < 1e-4, (layout, found)
        else:
            assert mean < 1.5 * found["padded"][1] and by_gradient < 1.5 * found["padded"][2], (layout, found)
