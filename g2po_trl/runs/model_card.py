"""The model card: training, results, and how to load the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData

from ..utils.trl_compat import get_config_model_id
from .run_json import installed_versions
from .summary import before_and_after_by_panel, format_table, is_reported

if TYPE_CHECKING:
    from trl import GRPOConfig

PAPER = "https://arxiv.org/abs/2606.22995"
CITATION = """@article{wang2026g2po,
    title  = {Group-Graph Policy Optimization for Long-Horizon Agentic Reinforcement Learning},
    author = {Wang, Yunan and Song, Minghui and Zhang, Zihan and Huang, Shaohan and Huang, Haizhen and Wei, Furu and
              Deng, Weiwei and Sun, Feng and Zhang, Qi},
    year   = {2026},
    eprint = {2606.22995},
    archivePrefix = {arXiv},
}"""
_SETTINGS = (
    *("learning_rate", "beta", "gamma", "step_advantage_weight", "invalid_action_penalty"),
    *("num_generations", "generation_batch_size", "max_turns", "history_length", "max_prompt_length"),
    *("max_completion_length", "temperature", "loss_type", "seed"),
)
_PACKAGES = ("g2po-trl", "trl", "transformers", "peft", "accelerate", "torch", "datasets")


def card_of(
    trainer: Any, tags: Sequence[str] = (), model_name: str | None = None, dataset_name: str | None = None
) -> ModelCard:
    """Return the model card of a `G2POTrainer`."""
    args, model, tasks = trainer.args, trainer.model, trainer.train_dataset
    facts = {"Training tasks": f"{len(tasks)} (`{trainer.tasks_hash}`)", **trainer.card_facts}
    adapter = model.active_adapter if is_peft_model(model) else None
    if adapter is not None:
        facts[f"Adapter `{adapter}`"] = _describe_adapter(model.active_peft_config)
    return build_model_card(
        args,
        base_model=get_config_model_id(model.config),
        environment=trainer.player.pool.name,
        facts=facts,
        is_adapter=adapter is not None,
        estimator=trainer.estimator_name,
        optimizer_steps=trainer.state.global_step + trainer.iteration.inner_steps,
        evaluations=trainer.folder.evaluations,
        tags=tags,
        model_name=model_name,
        dataset_name=dataset_name,
        repo_id=trainer.hub_model_id,
        architecture=(model.config.architectures or [None])[0],
        verdict=trainer.verdict.text,
        subfolder=None if adapter == "default" else adapter,
    )


def build_model_card(
    args: GRPOConfig,
    base_model: str | None,
    environment: str,
    facts: Mapping[str, str],
    is_adapter: bool,
    estimator: str,
    optimizer_steps: int,
    evaluations: Sequence[dict[str, Any]],
    tags: Sequence[str],
    model_name: str | None = None,
    dataset_name: str | None = None,
    repo_id: str | None = None,
    architecture: str | None = None,
    verdict: str | None = None,
    subfolder: str | None = None,
) -> ModelCard:
    """Return the model card of a trained agent.

    `base_model`, an id or a path, is linked unless it is a path. Of `evaluations`, oldest first, the first and the
    last of each panel are shown, or of the panel "report". `architecture` is the class of the model, as its
    configuration names it; `None`: a language model. `verdict` says why there was nothing to learn from, if so.
    `subfolder` holds the adapter, if it has a name of its own.
    """
    on_hub = bool(base_model) and not Path(base_model).exists()
    name = model_name or Path(args.output_dir).name
    trained = f"[{base_model}](https://huggingface.co/{base_model})" if on_hub else f"`{Path(base_model or '?').name}`"
    optional = ("mini_batch_size", "estimator_kwargs")
    names = [*_SETTINGS, *(name for name in optional if getattr(args, name) is not None)]
    settings = "\n".join(f"| {field} | {getattr(args, field)} |" for field in names)
    tables = []
    for panel, (before, after) in before_and_after_by_panel(evaluations).items():
        chosen = ""
        if args.load_best_model_at_end:
            chosen = " The checkpoint was chosen on another panel."
            if not is_reported(after["name"]):
                chosen = " The checkpoint was chosen on this panel, so its success is too high on average."
        columns = {"before": before, "after": after} if before is not after else {f"step {after['step']}": after}
        tables.append(
            f"{after['episodes']} episodes of a fixed panel (`{panel}`, tasks `{after['panel']}`), temperature "
            f"{after['temperature']}.{chosen}\n\n```text\n{format_table(columns)}\n```"
        )
    results = "\n\n".join(tables) or "This run made no evaluation."
    results += f"\n\n{verdict}" if verdict else ""
    data_rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    where = repo_id or args.hub_model_id or args.output_dir
    of_text = architecture is None or architecture.endswith("CausalLM")
    model_class = "AutoModelForCausalLM" if of_text else architecture
    imports = f"from transformers import {', '.join(sorted(['AutoTokenizer', model_class], key=str.lower))}"
    loading = f'{model_class}.from_pretrained("{where}")'
    if is_adapter and of_text and subfolder is None:
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
        loading = f'AutoPeftModelForCausalLM.from_pretrained("{where}")'
    elif is_adapter:
        base = base_model if on_hub else Path(base_model or "?").name
        # Of some multimodal models peft's class would load the text part, where the adapter finds no place; and it
        # would look for the base in the subfolder, too.
        part = f', subfolder="{subfolder}"' if subfolder else ""
        imports = f"from peft import PeftModel\n{imports}"
        loading = f'PeftModel.from_pretrained({model_class}.from_pretrained("{base}"), "{where}"{part})'
    # A checkout on PYTHONPATH has no version, and a run that is at its end must not fail for it.
    versions = ", ".join(f"{package} {number}" for package, number in installed_versions(_PACKAGES).items())
    content = f"""# {name}

{trained}, trained as an agent in `{environment}`{f" ({dataset_name})" if dataset_name else ""} with
g2po-trl, a [TRL](https://github.com/huggingface/trl) trainer for G2PO
([Group-Graph Policy Optimization]({PAPER})). Advantages: `{estimator}`; optimizer steps: {optimizer_steps}.

## Results

{results}

## Data

| | |
|---|---|
{data_rows}

## Use

```python
{imports}

model = {loading}
tokenizer = AutoTokenizer.from_pretrained("{where}")
```

The model expects prompts as in its training; `g2po evaluate --model {where}` writes them.

## Settings

| field | value |
|---|---|
{settings}

Versions: {versions}.

## Citation

```bibtex
{CITATION}
```
"""
    data = ModelCardData(
        base_model=base_model if on_hub else None,
        library_name="peft" if is_adapter else "transformers",
        model_name=name,
        tags=list(tags),
    )
    return ModelCard(f"---\n{data}\n---\n\n{content}")


def _describe_adapter(config) -> str:
    """Return a PEFT configuration as a line: kind, rank, alpha and modules, as far as it has them."""
    modules = config.target_modules if hasattr(config, "target_modules") else None
    modules = ", ".join(sorted(modules)) if isinstance(modules, (set, list)) else modules
    parts = {"r": getattr(config, "r", None), "alpha": getattr(config, "lora_alpha", None), "modules": modules}
    kind = getattr(config.peft_type, "value", config.peft_type)
    return ", ".join([str(kind), *(f"{name} {value}" for name, value in parts.items() if value is not None)])
