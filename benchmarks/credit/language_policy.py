"""A language model's policy in a text house, exactly: the probability of each admissible action in each state.

The environment plays the action that a completion names, whatever follows. So an action is as probable as its
completion up to `</action>`: the product of the tokens' probabilities, each at the sampling temperature. Everything
else that the model may write changes nothing in the house; it is the last action of the tables, and gets the rest.

The one thing left out: an action can be written in other ways (a thought, spaces, other tokens for the same text).
`language.py` plays episodes and counts how often that happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.credit.exact import Policy
from benchmarks.credit.language_house import HOUSE_PROMPT, TextHouse
from benchmarks.trees import make_trees
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.update.attention import attention_by_branches
from g2po_trl.update.tree import lay_out

COMPLETION = "<think></think><action>{action}</action>"
_MAX_TOKENS = 2048  # of a forward pass


def action_probabilities(
    model: torch.nn.Module, tokenizer, text: TextHouse, temperatures: Sequence[float]
) -> np.ndarray:
    """Return the model's policy as tables.

    Args:
        model: a causal language model.
        tokenizer: the model's, with a chat template.
        text: a house of S states and A actions.
        temperatures: K sampling temperatures.

    Returns:
        (K, S, A) float64; rows add up to 1. Column A - 1 holds everything that names no admissible action.
    """
    encode, numbers = ChatEncoder(tokenizer), prompt_numbers(text)
    names = sorted({name for state in range(text.num_states) for name in text.actions(state)})
    completions = dict(
        zip(names, tokenizer([COMPLETION.format(action=n) for n in names], add_special_tokens=False)["input_ids"])
    )
    sequences, lengths, cells = [], [], []
    for number, state in enumerate(np.unique(numbers, return_index=True)[1]):
        seen = text.observation(state)
        prompt = encode(HOUSE_PROMPT.messages(seen.text, text.task, seen.admissible_actions))[0]
        for name, action in text.actions(state).items():
            sequences.append(np.array(prompt + completions[name]))
            lengths.append(len(completions[name]))
            cells.append((number, action))
    found = np.zeros((len(temperatures), numbers.max() + 1, text.house.admissible.shape[1]))
    found[:, *np.transpose(cells)] = np.exp(completion_log_probs(model, sequences, lengths, temperatures))
    found[:, :, -1] = np.maximum(1 - found.sum(axis=2), 0)
    found /= found.sum(axis=2, keepdims=True)
    return found[:, numbers]


def prompt_numbers(text: TextHouse) -> np.ndarray:
    """Return (S,) the number of each state's prompt: equal where the agent reads the same."""
    numbers: dict[str, int] = {}
    keys = (text.observation(state).state_key for state in range(text.num_states))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


@torch.inference_mode()
def completion_log_probs(
    model: torch.nn.Module, sequences: Sequence[np.ndarray], lengths: Sequence[int], temperatures: Sequence[float]
) -> np.ndarray:
    """Return the log-probability of each sequence's end, given its beginning.

    Tokens that sequences have in common pass through the model once.

    Args:
        model: a causal language model; it is put into evaluation mode.
        sequences: token ids of N sequences.
        lengths: how many tokens at the end of each are scored.
        temperatures: K temperatures by which logits are divided.

    Returns:
        (K, N) float64.
    """
    model.eval()
    body, head = model.base_model, model.get_output_embeddings()
    found = np.zeros((len(temperatures), len(sequences)))
    for tree in make_trees(sequences, _MAX_TOKENS):
        row = lay_out([tree], sequences, lengths, pad_token_id=0)
        with attention_by_branches(model, row.get("branches"), row.get("paths")):
            hidden = body(row["row_ids"], position_ids=row.get("row_positions"), use_cache=False)[0]
        places, of_token = row["scored_from"].unique(return_inverse=True)
        logits = head(hidden.flatten(0, 1)[places]).float()
        sequence_of_token = np.repeat(tree.rows, np.take(lengths, tree.rows))
        for k, temperature in enumerate(temperatures):
            scored = torch.log_softmax(logits / temperature, dim=-1)[of_token, row["scored_ids"]]
            np.add.at(found[k], sequence_of_token, scored.double().numpy())
    return found


def policy_of(text: TextHouse, probabilities: np.ndarray, turns: int) -> Policy:
    """Return the policy of a table (S, A), to be analysed by `exact`; each prompt has logits of its own."""
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    return Policy(text.house, logits, prompt_numbers(text), turns, slip=0.0)
