"""Generate with transformers: batches of similar length through `model.generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from ..utils.forward_pass import evaluation_mode, rotary_scales, without_cudnn_attention
from ..utils.options import require
from ..utils.trl_compat import forget_rotary_lengths, replaced
from .base import TEXT_ONLY, Completion, Engine, EngineParts
from .sampling import Sampling
from .stop_tokens import get_stop_token_ids

if TYPE_CHECKING:
    from ..utils.images import Picture
    from .base import GenerationModel

_SHARDED = (
    "the model is sharded (FSDP, DeepSpeed): a rank without images would not take part in others' forward passes. "
    "Train with DDP"
)
_MASK_PLACES = 2**28  # of the mask that a generate call may make: rows x prompt tokens x prompt tokens


class SampledLogProbs(LogitsProcessor):
    """Records log-probabilities of the tokens that one `generate` call samples, without keeping all logits.

    transformers calls it before each next token, ahead of temperature and filters, with the last token in `input_ids`.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._of_next: torch.Tensor | None = None  # (rows, vocabulary)
        self._of_sampled: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._of_next is not None:
            self.sampled(input_ids[:, -1])
        self._of_next = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        return scores

    def sampled(self, tokens: torch.Tensor) -> None:
        """Record the sampled tokens, one per row."""
        tokens = tokens.to(self._of_next.device)
        self._of_sampled.append(self._of_next.gather(-1, tokens[:, None])[:, 0])

    def values(self) -> list[list[float]]:
        """Return log-probabilities as `[row][new token]`."""
        return torch.stack(self._of_sampled, dim=1).tolist()


@contextmanager
def _no_defaults(model: torch.nn.Module) -> Iterator[None]:
    """Hide the model's own generation_config, from which `generate` would fill unset fields."""
    owners = [model, *([model.get_base_model()] if hasattr(model, "get_base_model") else [])]  # PEFT copies it down
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(replaced(owner, generation_config=GenerationConfig()))
        yield


class TransformersEngine(Engine):
    """Generates by `model.generate`, in batches of similar length.

    For a model that is not being trained, use `TransformersEngine.from_model`.

    Args:
        tokenizer: the model's tokenizer.
        stop_token_ids: tokens that end a completion.
        generation_model: provides the model for calls of `generate`.
        batch_tokens: maximum tokens of one `generate` call, padding and completions included.
        is_collective: the weights are sharded, so all ranks must make the same calls.
        device: device of the inputs, if it differs from that of the weights.
        options: further fields of transformers' `GenerationConfig`.
        logprobs: return log-probabilities of completions, at the sampling's temperature.
    """

    is_the_model = returns_logprobs = True
    reads_text_because = TEXT_ONLY

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Iterable[int],
        generation_model: GenerationModel,
        batch_tokens: int = 65536,
        is_collective: bool = False,
        device: torch.device | None = None,
        options: dict[str, Any] | None = None,
        logprobs: bool = False,
    ):
        super().__init__(tokenizer, stop_token_ids, options)
        unknown = [name for name in self.options if not hasattr(GenerationConfig(), name)]
        remedy = "transformers' generate does not take all of them: remove them, or use the engine that they belong to"
        require(not unknown, "generation_kwargs", unknown, remedy)
        self.generation_model, self.batch_tokens, self.logprobs = generation_model, batch_tokens, logprobs
        self.is_collective, self.device = is_collective, device

    @classmethod
    def of_trainer(cls, parts: EngineParts) -> TransformersEngine:
        args = parts.args
        engine = cls(
            parts.tokenizer,
            parts.stop_token_ids,
            parts.generation_model,
            args.generation_batch_tokens,
            # With sharded weights every rank must run the same generate calls, with as many forward passes in each.
            is_collective=parts.is_sharded,
            device=parts.accelerator.device,
            options={"cache_implementation": args.cache_implementation, **(args.generation_kwargs or {})},
            logprobs=args.old_log_probs == "auto",
        )
        engine.read_images(parts.image_inputs)
        return engine

    @classmethod
    def from_model(
        cls, model: Any, tokenizer: PreTrainedTokenizerBase, autocast: torch.dtype | None = None, **options: Any
    ) -> TransformersEngine:
        """Return an engine for a model that is not being trained; `options` are further arguments of the class.

        `autocast`: compute in this precision, as training in mixed precision does. `None`: in that of the weights.
        """
        return cls(tokenizer, get_stop_token_ids(tokenizer, model), model_for_generation(model, autocast), **options)

    def read_images(self, images: Any) -> None:
        super().read_images(images)
        self.reads_text_because = _SHARDED if self.is_collective else self.reads_text_because

    def to_engine(self, sampling: Sampling) -> GenerationConfig:
        """Return the `GenerationConfig` of a sampling."""
        samples = sampling.temperature > 0
        filters = ("temperature", "top_p", "top_k", "min_p") if samples else ()
        return GenerationConfig(
            **{
                "max_new_tokens": sampling.max_completion_length,
                "repetition_penalty": sampling.repetition_penalty,
                "pad_token_id": self.tokenizer.pad_token_id,
                "bos_token_id": self.tokenizer.bos_token_id,
                "eos_token_id": sorted(self.stop_token_ids),
                "disable_compile": True,
                "do_sample": samples,
                **{name: getattr(sampling, name) for name in filters},
                "stop_strings": list(sampling.stop_sequences or ()) or None,
                **self.options,
            }
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: Sequence[Sequence[Picture]] | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order, drawn from torch's random state. `seeds` are not supported.

        With sharded weights, ranks without prompts generate dummies. `images`: those of each prompt.
        """
        images = images or [()] * len(prompts)
        records = self.logprobs and sampling.temperature > 0
        completions: list[Completion] = [None] * len(prompts)
        if not prompts and not self.is_collective:
            return completions
        config = self.to_engine(sampling)
        with self.generation_model(config) as model:
            for rows in self._batches(prompts, sampling.max_completion_length, model):
                record = SampledLogProbs(sampling.temperature) if records else None
                asked, shown = [prompts[row] for row in rows], [images[row] for row in rows]
                new = self._generate(model, config, asked, shown, record)
                logprobs = [None] * len(rows) if record is None else record.values()[: len(rows)]
                for row, ids, of_ids in zip(rows, new, logprobs):
                    completions[row] = self._completion(sampling, ids, of_ids)
        return completions

    def _generate(
        self,
        model: torch.nn.Module,
        config: GenerationConfig,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[Picture]] = (),
        record: SampledLogProbs | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, in order, padded to the longest, from one call of `generate`.

        Fields that `config` leaves open are neutral: the checkpoint's own generation_config (a repetition penalty, …)
        is not used, because the trained probabilities do not include it. Without prompts, a dummy is generated, since
        with sharded weights every rank must make the call. Tokens that stand for images are not sampled.
        """
        rows, device, pad = list(prompts) or [[config.pad_token_id]], self.device or model.device, config.pad_token_id
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad] * (width - len(ids)) + [*ids] for ids in rows], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows], device=device)
        processors = [] if record is None else [record]  # before others: it records the model's own distribution
        if self.images is not None:
            processors.append(SuppressTokensLogitsProcessor(self.images.token_ids, device))
        forget_rotary_lengths(model)
        with _no_defaults(model):
            output = model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=config,
                synced_gpus=self.is_collective,
                tokenizer=self.tokenizer if config.stop_strings else None,
                logits_processor=LogitsProcessorList(processors) if processors else None,
                **(self.images(input_ids, images) if any(images) else {}),
            )
        if record is not None:
            record.sampled(output[:, -1])
        return output[: len(prompts), width:].tolist()

    def _batches(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, model: torch.nn.Module
    ) -> list[list[int]]:
        """Return the row numbers of each generate call: sorted by length, bounded in padded tokens.

        Prompts of different lengths need a mask, whose size is bounded too, on a CPU to half, since attention makes
        floats of it there; those of one length need none. A call's longest row decides the rotary scale of some
        models, so that it has rows of one scale.
        """
        rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        ends = [[len(prompts[row]) + more for row in rows] for more in (0, max_new_tokens)]
        scales = dict(zip(rows, zip(*(rotary_scales(model.config.get_text_config(), one) for one in ends))))
        batches, places = [], _MASK_PLACES // (2 if (self.device or model.device).type == "cpu" else 1)
        while rows:
            width = len(prompts[rows[0]])
            equal = sum(len(prompts[row]) == width for row in rows)
            alike = sum(scales[row] == scales[rows[0]] for row in rows)
            size = min(alike, self.batch_tokens // (width + max_new_tokens), max(equal, places // width**2))
            batches.append(rows[: max(1, size)])
            rows = rows[max(1, size) :]
        if self.is_collective:
            batches += [[]] * (max(gather_object([len(batches)])) - len(batches))
        return batches


def model_for_generation(model: torch.nn.Module, autocast: torch.dtype | None = None) -> GenerationModel:
    """Return a `GenerationModel` of a model that is not being trained; `autocast` as in `TransformersEngine`."""

    @contextmanager
    def generation_model(config: GenerationConfig) -> Iterator[torch.nn.Module]:
        mixed = nullcontext() if autocast is None else torch.autocast(model.device.type, autocast)
        with evaluation_mode(model), torch.no_grad(), mixed, without_cudnn_attention():
            yield model

    return generation_model
