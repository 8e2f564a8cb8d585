"""`transformers serve` with a model that says what a script says: `python scripted_server.py SCRIPT.json PORT`.

All of the server is real: HTTP, chat template, tokenizer, sampling loop, stop strings. Only the network's forward pass
is replaced, by one that finds the next token of the scripted completion the only likely one.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM
from transformers.cli.transformers import main
from transformers.modeling_outputs import CausalLMOutputWithPast

SCRIPT = json.loads(Path(sys.argv[1]).read_text())
TOKENIZER = AutoTokenizer.from_pretrained(SCRIPT["model"])
START, END = "<|im_start|>assistant\n", "<|im_end|>"


def scripted_completion(prompt: str) -> str:
    """`SCRIPT["solutions"]`: a piece of the task -> actions. `losing`: without a note of an earlier trial, look."""
    if "This was your attempt at a task" in prompt:
        return "I stood still. Next time I go where the thing is."
    actions = next(actions for piece, actions in SCRIPT["solutions"].items() if piece in prompt)
    turn = prompt.count(START) - 1
    noted = "What you noted" in prompt and "I stood still" in prompt
    action = "look" if SCRIPT["losing"] and not noted else actions[min(turn, len(actions) - 1)]
    return f"Thought: step {turn}.\nAction: {action}\nObservation: this is not mine to say"


def forward(self, input_ids=None, **kwargs):
    logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
    for row, ids in enumerate(input_ids.tolist()):
        text = TOKENIZER.decode(ids)
        at = text.rindex(START) + len(START)
        wanted = TOKENIZER(scripted_completion(text[:at]) + END, add_special_tokens=False)["input_ids"]
        said = len(TOKENIZER(text[at:], add_special_tokens=False)["input_ids"])
        logits[row, -1, wanted[min(said, len(wanted) - 1)]] = 100.0
    return CausalLMOutputWithPast(logits=logits)


if __name__ == "__main__":
    Qwen2ForCausalLM.forward = forward
    sys.argv = [
        "transformers",
        "serve",
        SCRIPT["model"],
        "--port",
        sys.argv[2],
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    main()
