"""A real pretrained model, SmolLM2-135M, where it is in the cache: `make test-pretrained`, which fetches it."""

import numpy as np
import pytest
import torch
from families import alone, gradient, in_layout
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from g2po_envs.alfworld import ALFWORLD_COMPACT_PROMPT, AlfworldEnvironment, generate_games
from g2po_envs.alfworld.demonstrations import demonstrate
from g2po_recipes.smollm2 import smollm2_in_cache
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.teach.demonstrations import state_rows

FOLDER = smollm2_in_cache()


@pytest.mark.pretrained
@pytest.mark.skipif(FOLDER is None, reason="SmolLM2 is not in the cache; `make test-pretrained` fetches it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_exact(dtype, tmp_path):
    """In float32 to its last digits; in bfloat16 `shared` is hardly further off than padding, which only rounds."""
    games, tokenizer = generate_games(tmp_path, "train", 4, seed=5, size="tiny"), AutoTokenizer.from_pretrained(FOLDER)
    shown = demonstrate(AlfworldEnvironment(games, intro=False), games.rows(), 2, seed=5)[:14]
    rows = [*state_rows(shown, ALFWORLD_COMPACT_PROMPT, 2, ChatEncoder(tokenizer), {tokenizer.eos_token_id})]
    found = [np.array(row["input_ids"], dtype=np.int32) for row in rows]
    scored = [len(row["labels"]) - row["labels"].count(-100) for row in rows]
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    wanted = alone(model, found, scored)
    length = gradient(model, wanted)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    off = {}
    for layout in ("padded", "shared"):
        log_probs = in_layout(model, found, scored, layout)
        nats = (log_probs - wanted)[wanted != 0].abs()
        off[layout] = nats.max(), nats.mean(), (gradient(model, log_probs) - length).norm() / length.norm()
        if dtype is torch.float32:
            assert off[layout][0] < 1e-4 and off[layout][2] < 1e-4, (layout, off)
    if dtype is torch.bfloat16:
        assert all(theirs < 1.5 * ours for theirs, ours in zip(off["shared"][1:], off["padded"][1:])), off
