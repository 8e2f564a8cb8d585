"""Non-public parts of TRL, transformers and accelerate that training depends on, each behind one name.

Written for TRL 1.16, transformers 5.23 and accelerate 1.15; `tests/contract` checks each against the installed
versions. Others depend on TRL's overridden methods (`trainer`), its vLLM wrapper (`engines/trl_vllm` and
`engines/vllm_adapter`), its options (`config_validation`) and how each loss averages (`update/batch`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from accelerate.utils import is_peft_model
from transformers import GenerationConfig, PretrainedConfig, Trainer, TrainingArguments
from transformers.utils.chat_parsing.content_parsers import parse_content as parse_content
from trl.chat_template_utils import add_response_schema as add_response_schema
from trl.chat_template_utils import get_training_chat_template as get_training_chat_template
from trl.chat_template_utils import parse_response as parse_response
from trl.chat_template_utils import supports_tool_calling as supports_tool_calling
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing as disable_gradient_checkpointing
from trl.trainer.utils import RepeatSampler, create_model_from_path, get_config_model_id  # noqa: F401

from .forward_pass import evaluation_mode, without_cudnn_attention
from .options import require

_DEPRECATED = "`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated"  # TRL and PEFT read them, not the user
warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)


def replaced(owner: Any, **values: Any) -> AbstractContextManager[Any]:
    """Replace attributes of a module or object inside."""
    return patch.multiple(owner, **values) if values else nullcontext()


def gather_params_of(owner: Any) -> Callable[[Sequence[torch.nn.Parameter]], AbstractContextManager]:
    """Return the context in which weights that ZeRO-3 shards are whole: `_dist` of a trainer or `VLLMGeneration`."""
    return owner._dist.gather_params


@contextmanager
def trained_model_for_generation(trainer: Trainer, config: GenerationConfig) -> Iterator[torch.nn.Module]:
    """Provide the bare model in evaluation mode (training mode has dropout), gathered if ZeRO-3 shards it."""
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        generation_kwargs=config.to_diff_dict(),
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    with without_cudnn_attention(), unwrapped as model, torch.no_grad(), evaluation_mode(model):
        yield model


def fused_log_probs(
    model: torch.nn.Module, body: torch.nn.Module, inputs: dict[str, Any], places: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies, (M,) each, from TRL's fused LM head, only at chosen places.

    Depends on `trl.trainer.utils.add_fused_lm_head`: with `fused_lm_head=True` the model scores `shift_labels` against
    `last_hidden_state` of its `base_model`, which a hook on `body`, the same inside all wrappers, reduces to the (M,)
    `places` in the flattened rows. `labels` are the (M,) token ids there; -100 is not scored.
    """
    with _at_places(body, places):
        outputs = model(**inputs, shift_labels=labels[None], fused_lm_head=True)
    return outputs.log_probs[0], None if outputs.entropy is None else outputs.entropy[0]


def own_log_probs(
    model: torch.nn.Module,
    body: torch.nn.Module,
    inputs: dict[str, Any],
    places: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same from the model's own LM head and its further changes of logits: (M, V), kept in float32."""
    with _at_places(body, places):
        logits = model(**inputs, use_cache=False).logits[0]
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    labels = labels.to(log_probs.device)
    return -F.nll_loss(log_probs, labels, reduction="none"), entropies.masked_fill(labels == -100, 0)


@contextmanager
def _at_places(body: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Reduce the last hidden states of `body` inside to those at `places`, as one row."""

    def choose(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        # With `device_map` the last layer may be on another device than the inputs. `embedding`, because the gradients
        # of a place that several sequences share are then added in a fixed order; those of `hidden[places]` on a CPU
        # and of `index_select` on CUDA are added as threads arrive.
        chosen = F.embedding(places.to(hidden.device), hidden.reshape(-1, hidden.shape[-1]))
        output.last_hidden_state = chosen[None]
        return output

    handle = body.register_forward_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def expose_body(model: torch.nn.Module) -> None:
    """Make `base_model`, which TRL's fused LM head calls, the model without its LM head, if it is the model itself."""
    if model.base_model is model:
        remedy = "TRL finds no part of it without LM head: pass its text model"
        require(hasattr(model, "model"), "model", type(model).__name__, remedy)
        model.base_model_prefix = "model"  # Llama4ForCausalLM names a part that it does not have


@contextmanager
def reference_copied_from(
    model: torch.nn.Module | str, args: TrainingArguments, loaded: bool = False
) -> Iterator[None]:
    """Let a `GRPOTrainer` created inside copy its reference from a model object, and of adapters make no copy "ref".

    The file in `name_or_path` may hold other weights than the object (a merged adapter, added tokens), or not exist.
    Under ZeRO-3 the object holds a shard of each weight, and the reference is loaded. If the model was `loaded` with
    `model_init_kwargs`, it does not warn that it ignores them. Files that lack a weight, which would be random, are
    refused. Depends on `trl.trainer.grpo_trainer` calling `create_model_from_path` by its global name, and for a model
    object only to load the reference; and on the constructor reading `args.beta` for the reference and as
    `trainer.beta`, which the caller sets, and nothing else.
    """
    from trl.trainer import grpo_trainer

    def copied(*args: Any, **kwargs: Any) -> torch.nn.Module:
        reference = copy.deepcopy(model).eval()  # as one that is loaded: an object may be in training mode
        # A fused LM head of an earlier trainer; its forward pass is bound to the model that was copied.
        reference.__dict__.pop("forward", None)
        return reference

    def whole(*args: Any, **kwargs: Any) -> torch.nn.Module:
        made, found = create(*args, **kwargs, output_loading_info=True)
        missing = sorted(found["missing_keys"])[:3]
        require(not missing, "model", args[0], f"its files lack {', '.join(missing)}")
        return made

    create, is_object = grpo_trainer.create_model_from_path, not isinstance(model, str)
    copies = {"create_model_from_path": copied if is_object and not _has_shards(model) else whole}
    unread = {"beta": 0.0} if is_object and is_peft_model(model) else {}
    unread |= {"model_init_kwargs": None} if loaded else {}
    with replaced(grpo_trainer, **copies), replaced(args, **unread):
        yield


def vllm_generation_class(replacement: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let a `GRPOTrainer` created inside start its vLLM by `replacement`, in place of `VLLMGeneration`."""
    from trl.trainer import grpo_trainer

    return replaced(grpo_trainer, VLLMGeneration=replacement)


def vllm_engine_options(**options: Any) -> AbstractContextManager[None]:
    """Add arguments to the `vllm.LLM` that TRL's `VLLMGeneration` creates inside, by its global name `LLM`."""
    from trl.generation import vllm_generation

    return replaced(vllm_generation, LLM=partial(vllm_generation.LLM, **options))


def without_trls_intervals(args: TrainingArguments) -> AbstractContextManager[None]:
    """Keep transformers from choosing and comparing intervals that are `None` in a configuration made inside."""
    numbers = {"logging_steps": 1, "save_steps": 1, "eval_steps": None}
    missing = {name: number for name, number in numbers.items() if getattr(args, name) is None}
    return replaced(args, load_best_model_at_end=False, **missing)


def attention_of(config: PretrainedConfig) -> str:
    """Return the attention implementation a model uses, after transformers has chosen one (`_attn_implementation`)."""
    return config._attn_implementation


def is_stateful(model: torch.nn.Module) -> bool:
    """Return whether the model carries a recurrent state from token to token (`_is_stateful`)."""
    return getattr(model, "_is_stateful", False)


def forget_rotary_lengths(model: torch.nn.Module) -> None:
    """Let the next pass choose its `dynamic` rotary scale, not the longest so far (`max_seq_len_cached` by layers)."""
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(module, name, 0)


def is_sharded(trainer: Trainer) -> bool:
    """Return whether each process has only a part of each weight: FSDP, or ZeRO-3."""
    models = (trainer.model, getattr(trainer, "ref_model", None))
    return trainer.is_fsdp_enabled or any(_has_shards(model) for model in models if model is not None)


def _has_shards(model: torch.nn.Module) -> bool:
    return any(hasattr(weight, "ds_id") for weight in model.parameters())  # set by ZeRO-3
