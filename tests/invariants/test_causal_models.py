"""The start check on every causal language model of transformers: equal, slower, refused, or not to be built.

`python docs/make_architectures.py` tries all of them and writes what is found.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from causal_models import MODEL_TYPES, random_model, tiny_model
from conftest import build_tokenizer
from families import alone, gradient, samples
from letter_environment import LongLetterEnvironment
from letter_trainer import make_letter_trainer
from refusals import refused

from g2po_trl.update.batch import StepBatch

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LIST = DOCS / "architectures.md", DOCS / "causal_models.json"
MARK = "<!-- causal language models -->\n"
OUTCOMES = {
    "equal": "Equal",
    "own head": "Equal by the model's own LM head",
    "padded": "Equal in `padded`",
    "length": "A token's log-probability depends on the length of its row",
    "refused": "Refused",
    "not built": "Cannot be built from transformers' default configuration",
}


def make_trainer(model, folder, tokenizer):
    options = {"beta": 0.0, "router_aux_loss_coef": 0.0, "processing_class": tokenizer}
    return make_letter_trainer(model, folder, LongLetterEnvironment, **options)


def outcome(model_type: str, folder: Path, tokenizer) -> tuple[str, str]:
    """Return a key of `OUTCOMES`, and the reason of a model that is not trained."""
    try:
        model = tiny_model(model_type, len(tokenizer))
    except Exception as error:  # of any class
        return "not built", _reason(error)
    trainer = None
    try:
        trainer = make_trainer(model, folder, tokenizer)
        layout = trainer.update.layout
        trainer.start_check.compare(trainer.model, with_reference=False)
        if off_at_other_lengths(trainer) > 1e-3:
            return "length", ""
        return "own head" if not layout.fused else "padded" if layout.kind == "padded" else "equal", ""
    except Exception as error:
        return "refused", _reason(error)
    finally:
        if trainer is not None:
            trainer.close()


def off_at_other_lengths(trainer) -> float:
    """Return the largest difference in nats from each text alone, in the layout that a first rollout would leave.

    Texts of 6 to 125 tokens: windows, chunks and indexers of tiny models keep fewer.
    """
    sequences, scored = samples()
    vocabulary = trainer.model.config.get_text_config().vocab_size
    sequences = [3 + sequence % (vocabulary - 3) for sequence in sequences]
    prompts, completions = zip(*(np.split(tokens, [-last]) for tokens, last in zip(sequences, scored)))
    ones = np.ones(len(scored), np.float32)
    batch, update = StepBatch(list(prompts), list(completions), ones, ones.astype(bool)), trainer.update
    with torch.no_grad():
        wanted = alone(trainer.model.eval(), sequences, scored)
        while not update.verify_layout(trainer.model, [[update.micro_batch(batch)]], [batch]):
            pass
        return (update.score(trainer.model, update.micro_batch(batch)) - wanted).abs().max().item()


def _reason(error: Exception) -> str:
    """Return the part of a message that tells models apart."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ImportError):
        return lines[0].partition(" but it was not found")[0]
    if "see later ones" in lines[-1]:
        return "tokens see later ones"
    return "no path agrees" if "agree with its own forward pass" in lines[-1] else lines[-1].rstrip(".")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "inkling_text"])
def test_a_model_that_changes_its_logits_otherwise_takes_its_own_head(model_type, tmp_path, tokenizer, caplog):
    """A cap and a multiplier, of which TRL's fused LM head knows nothing."""
    trainer = make_trainer(tiny_model(model_type, len(tokenizer)), tmp_path, tokenizer)
    model, batch = trainer.model.eval(), trainer.start_check.sample
    sequences, scored = batch.sequences(), list(map(len, batch.completion_ids))

    def score():
        return trainer.update.score(model, trainer.update.micro_batch(batch))

    wanted = alone(model, sequences, scored)
    length = gradient(model, wanted)
    assert (score() - wanted).abs().mean() > 0.05, "nats"
    assert (gradient(model, score()) - length).norm() / length.norm() > 0.05
    trainer.start_check.compare(model, with_reference=False)
    assert "training uses the model's own LM head" in caplog.text and not trainer.update.layout.fused
    assert (score() - wanted).abs().max() < 1e-4
    assert (gradient(model, score()) - length).norm() / length.norm() < 1e-4
    trainer.close()


@pytest.mark.parametrize(
    ("model_type", "of", "why"),
    [("mamba", "padded", ""), ("bart", "padded", ""), ("cpmant", "refused", "tokens see later ones")],
)
def test_what_no_branches_and_no_forks_take_is_padded_or_refused(model_type, of, why, tmp_path, tokenizer):
    """Mamba's cache does not start continuations with a gradient, and Bart takes no position ids."""
    assert outcome(model_type, tmp_path, tokenizer) == (of, why)


def test_an_encoder_is_refused(tmp_path, tokenizer):
    options = {"is_decoder": False, "initializer_range": 0.02}  # another order of later tokens changes little
    model = random_model(transformers.AutoModelForCausalLM, "roformer", len(tokenizer), **options)
    with closing(make_trainer(model, tmp_path, tokenizer)) as trainer, refused("model"):
        trainer.start_check.compare(trainer.model, with_reference=False)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_list_says_what_the_start_check_finds(model_type, tmp_path, tokenizer):
    assert outcome(model_type, tmp_path, tokenizer)[0] == recorded()[model_type][0]


def test_the_page_has_the_table_of_the_list():
    assert f"\n{table(recorded())}\n" in PAGE.read_text(encoding="utf-8"), "python docs/make_architectures.py"


def test_the_list_has_every_causal_language_model():
    if f"transformers {transformers.__version__}," not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the list is of another version of transformers")
    assert list(recorded()) == sorted(MODEL_TYPES), "python docs/make_architectures.py"


def recorded() -> dict[str, tuple[str, str]]:
    """Return what `listed` wrote."""
    found = json.loads(LIST.read_text(encoding="utf-8"))
    return {name: (entry["outcome"], entry.get("reason", "")) for name, entry in found.items()}


def listed(found: dict[str, tuple[str, str]]) -> str:
    """Return JSON, a line for each model type: its outcome, and the reason if it is not trained."""
    entries = {
        name: {"outcome": of, **({"reason": reason} if reason else {})} for name, (of, reason) in sorted(found.items())
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(found: dict[str, tuple[str, str]]) -> str:
    """Return a Markdown table: number by outcome that any has, names of those that are not trained, and why not."""
    lines = ["| Outcome | Number | Models |", "|---|---|---|"]
    for key, title in OUTCOMES.items():
        of_key = {name: reason for name, (of, reason) in sorted(found.items()) if of == key}
        names = [f"`{name}`{f' ({reason})' if key == 'refused' else ''}" for name, reason in of_key.items()]
        models = f"[list]({LIST.name})" if key in ("equal", "own head", "padded") else ", ".join(names)
        lines += [f"| {title} | {len(of_key)} | {models} |"] if of_key else []
    return "\n".join(lines)


def versions() -> str:
    return f"Found with transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}:"


def outcomes(model_types: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return `outcome` of each."""
    found, tokenizer = {}, build_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        for model_type in model_types:
            found[model_type] = outcome(model_type, Path(folder, model_type), tokenizer)
            print(model_type, *found[model_type], flush=True)
    return found
