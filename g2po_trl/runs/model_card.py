"""The model card: training, results, and how to load the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData

from ..agents.agent import is_agent
from ..engines.sampling import Sampling
from ..environments.several import environments_of
from ..environments.tools.trl_tools import is_tool_environment
from ..utils.trl_compat import get_config_model_id
from .run_json import installed_versions
from .summary import before_and_after_by_panel, format_table, is_reported

_SETTINGS = (
    *("learning_rate", "beta", "gamma", "step_advantage_weight", "invalid_action_penalty"),
    *("num_generations", "generation_batch_size", "max_turns", "history_length", "max_prompt_length"),
    *("max_completion_length", "temperature", "loss_type", "seed", "mini_batch_size", "estimator_kwargs"),
)
_PACKAGES = ("g2po-trl", "trl", "transformers", "peft", "torch", "vllm")
_TEMPLATE = """# {name}

{base}, trained as an agent in {environment} with g2po-trl, a [TRL](https://github.com/huggingface/trl) trainer for
G2PO ([Group-Graph Policy Optimization](https://arxiv.org/abs/2606.22995)).
Advantages: `{estimator}`; optimizer steps: {steps}.

## Results

{results}

## Data

| | |
|---|---|
{facts}

## Use

```python
{loading}
tokenizer = AutoTokenizer.from_pretrained("{where}")
```

The model expects prompts as in its training. {program}
`g2po play --model {where}` and `g2po evaluate --model {where}` do the same in its environment.

## Settings

| field | value |
|---|---|
{settings}

Versions: {versions}.

## Citation

```bibtex
@article{{wang2026g2po,
    title  = {{Group-Graph Policy Optimization for Long-Horizon Agentic Reinforcement Learning}},
    author = {{Wang, Yunan and Song, Minghui and Zhang, Zihan and Huang, Shaohan and Huang, Haizhen and Wei, Furu and
              Deng, Weiwei and Sun, Feng and Zhang, Qi}},
    year   = {{2026}},
    eprint = {{2606.22995}},
    archivePrefix = {{arXiv}},
}}
```
"""


def card_of(
    trainer: Any, tags: Sequence[str] = (), model_name: str | None = None, dataset_name: str | None = None
) -> ModelCard:
    """Return the model card of a `G2POTrainer`, whose base model is linked unless it is a path."""
    args, model = trainer.args, trainer.model
    base = get_config_model_id(model.config) or "?"
    on_hub = base != "?" and not Path(base).exists()
    where, name = (
        trainer.hub_model_id or args.hub_model_id or args.output_dir,
        model_name or Path(args.output_dir).name,
    )
    adapter = model.active_adapter if is_peft_model(model) else None
    facts = {"Training tasks": f"{len(trainer.train_dataset)} (`{trainer.tasks_hash}`)", **trainer.card_facts}
    if adapter is not None:
        facts[f"Adapter `{adapter}`"] = _describe_adapter(model.active_peft_config)
    settings = {name: getattr(args, name) for name in _SETTINGS}
    results = results_of(trainer.folder.evaluations, args.load_best_model_at_end)
    content = _TEMPLATE.format(
        name=name,
        base=f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{Path(base).name}`",
        environment=f"`{trainer.player.pool.name}`" + (f" ({dataset_name})" if dataset_name else ""),
        estimator=trainer.estimator_name,
        steps=trainer.state.global_step + trainer.iteration.inner_steps,
        results="\n\n".join([results, *([trainer.verdict.text] if trainer.verdict.text else [])]),
        facts=table_of(facts),
        loading=loading_code(where, base if on_hub else Path(base).name, model.config.architectures, adapter),
        where=where,
        program=program_of(trainer, where),
        settings=table_of(settings),
        versions=", ".join(
            f"{package} {number}" for package, number in installed_versions().items() if package in _PACKAGES
        ),
    )
    library = "transformers" if adapter is None else "peft"
    data = ModelCardData(base_model=base if on_hub else None, library_name=library, model_name=name, tags=list(tags))
    return ModelCard(f"---\n{data}\n---\n\n{content}")


def table_of(values: Mapping[str, Any]) -> str:
    """Return the rows of a table; `|`, as in regular expressions of LoRA's modules, is escaped."""
    cells = {name: str(value).replace("|", "\\|") for name, value in values.items()}
    return "\n".join(f"| {name} | {cell} |" for name, cell in cells.items())


def results_of(evaluations: Sequence[dict[str, Any]], best_was_chosen: bool) -> str:
    """Return tables of the first and the last evaluation, oldest first, of each panel or of the panel "report"."""
    tables = []
    for panel, (before, after) in before_and_after_by_panel(evaluations).items():
        chosen = ""
        if best_was_chosen:
            chosen = " The checkpoint was chosen on another evaluation set."
            if not is_reported(panel):
                chosen = " The checkpoint was chosen on this evaluation set, so its success is too high on average."
        columns = {"before": before, "after": after} if before is not after else {f"step {after['step']}": after}
        tables.append(
            f"{after['episodes']} episodes of a fixed evaluation set (`{panel}`, tasks `{after['panel']}`), "
            f"temperature {after['temperature']}.{chosen}\n\n```text\n{format_table(columns)}\n```"
        )
    return "\n\n".join(tables) or "This run made no evaluation."


def loading_code(where: str, base: str, architectures: Sequence[str] | None, adapter: str | None) -> str:
    """Return the lines of Python that load the model, or `adapter` on its base, from `where`.

    `architectures` are those of the model's configuration. An adapter that is not called "default" is in a subfolder.
    """
    architecture = (architectures or ["CausalLM"])[0]
    is_text = architecture.endswith("CausalLM")
    kind = "AutoModelForCausalLM" if is_text else architecture
    imports = f"from transformers import {', '.join(sorted(['AutoTokenizer', kind], key=str.lower))}"
    if adapter is None:
        return f'{imports}\n\nmodel = {kind}.from_pretrained("{where}")'
    if is_text and adapter == "default":
        imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
        return f'{imports}\n\nmodel = AutoPeftModelForCausalLM.from_pretrained("{where}")'
    # Of some multimodal models peft's class would load the text part, where the adapter finds no place; and it would
    # look for the base in the subfolder, too.
    subfolder = "" if adapter == "default" else f', subfolder="{adapter}"'
    model = f'PeftModel.from_pretrained({kind}.from_pretrained("{base}"), "{where}"{subfolder})'
    return f"from peft import PeftModel\n{imports}\n\nmodel = {model}"


_SHARED = """import torch

from g2po_trl.engines.stop_tokens import get_stop_token_ids
{imports}
encode, stops = ChatEncoder(tokenizer, {template_kwargs}), get_stop_token_ids(tokenizer, model)
"""
_GENERATE = "model.generate(torch.tensor([{ids}], device=model.device), eos_token_id=sorted(stops), {sampling})"
_WINDOW = (
    _SHARED
    + """
prompt, history = load_prompt(read_run({folder})["prompt"]), []  # clear the history before an episode


def act(observation, task="", actions=None):
    shown = last_steps(history, {history_length})
    ids, text = encode(prompt.messages(observation, task, actions, shown, len(history)))
    written = {generate}[0, len(ids) :]
    action, is_valid = prompt.read(encode.decode(written.tolist(), stops), text[-64:], actions)
    history.append((observation, action))
    return action
"""
)
_CONVERSATION = (
    _SHARED
    + """
encoder, transcript = ConversationEncoder(encode, stops), Transcript()  # a new transcript for each conversation


def answer(messages, tools=None):
    prompt = encoder.prompt(ChatRequest(messages, tools), transcript, None)
    written = {generate}[0, len(prompt.ids) :].tolist()
    message, is_valid = encoder.tools.parse(encoder.decode(written), written, prompt.ids, tools)
    encoder.answered(prompt, tools, message, written, transcript)
    return message
"""
)


def program_of(trainer: Any, where: str) -> str:
    """Return a program that asks the model as in training, without a trainer, for use after `loading_code`."""
    args, environment = trainer.args, trainer.environment_factory
    if environments_of(environment):
        return ""
    is_window = trainer.setup.history == "window" and not is_agent(environment)
    names = (
        ["from g2po_trl.prompts.template import last_steps"]
        if is_window
        else [
            "from g2po_trl.prompts.conversation import ChatRequest",
            "from g2po_trl.prompts.conversation_encoder import ConversationEncoder, Transcript",
        ]
    )
    names.append("from g2po_trl.prompts.tokenization import ChatEncoder")
    names += ["from g2po_trl.runs.run_json import load_prompt, read_run"] if is_window else []
    folder = repr(str(where))
    if is_window and not Path(where).is_dir():  # on the Hub
        names.append("from huggingface_hub import snapshot_download")
        folder = f"snapshot_download({folder}, allow_patterns='run.json')"
    generate = _GENERATE.format(
        ids="ids" if is_window else "prompt.ids", sampling=_sampling_code(args.evaluation_sampling())
    )
    program = (_WINDOW if is_window else _CONVERSATION).format(
        imports="\n".join(names) + "\n",
        template_kwargs=args.chat_template_kwargs,
        folder=folder,
        history_length=args.history_length,
        generate=generate,
    )
    what = "an observation" if is_window else "chat messages"
    about = f"This program, after the lines above, answers {what}:"
    if not is_window and not is_agent(environment) and not is_tool_environment(environment):
        about = (
            "This program, after the lines above, answers chat messages; `messages` and `turn_message` of the "
            "prompt template write an observation as such, and its `read` the action in an answer:"
        )
    return f"{about}\n\n```python\n{program}```\n"


def _sampling_code(sampling: Sampling) -> str:
    """Return how completions are sampled as arguments of `generate`."""
    options: dict[str, Any] = {"max_new_tokens": sampling.max_completion_length, "do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": 0, **sampling.filters()}
    if sampling.stop_sequences:
        options["stop_strings"] = list(sampling.stop_sequences)
    code = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return code + (", tokenizer=tokenizer" if sampling.stop_sequences else "")


def _describe_adapter(config: Any) -> str:
    """Return a PEFT configuration as a line: kind, rank, alpha and modules, as far as it has them."""
    modules = getattr(config, "target_modules", None)
    modules = ", ".join(sorted(modules)) if isinstance(modules, (set, list)) else modules
    parts = {"r": getattr(config, "r", None), "alpha": getattr(config, "lora_alpha", None), "modules": modules}
    kind = getattr(config.peft_type, "value", config.peft_type)
    return ", ".join([str(kind), *(f"{name} {value}" for name, value in parts.items() if value is not None)])
