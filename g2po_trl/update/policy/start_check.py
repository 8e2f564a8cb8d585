"""Check numerically, before training, that engine, trainer and reference compute the same policy.

Log-probabilities of a short conversation are computed as the trainer does (layout, fused LM head), by the model's own
`forward`, and by the reference; those of the first rollout's completions also by the engine that sampled them. If they
differ by more than rounding, a slower path that agrees is used, or training is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ...trajectory import Trajectory
from ...utils.errors import G2POError
from ...utils.forward_pass import evaluation_mode, without_cudnn_attention, without_randomness
from ...utils.images import Picture
from ...utils.options import require
from ..batch import StepBatch
from ..update import Update

logger = logging.getLogger(__name__)
# Prompt, completion, log-probabilities of the latter, images of the former.
Sample = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[Picture]]

# Mean difference in nats that two computations of the same log-probabilities may have: the dtype's rounding of each
# token's largest logit, and so much besides. TRL's fused LM head sums the exponentials of 262,144 logits in tiles, in
# float32, and is off by 7e-5 there.
_NATS = 5e-4
_CORRECTED_NATS = 2.0  # of an engine whose samples have importance weights: larger ones are bounded at 3
_ROWS = 4  # of the first rollout
_SAMPLE_TOKENS = 64  # of the conversation that is scored before training
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def sample_conversation(encode: Any, messages: Sequence[dict[str, Any]], images: Sequence[Picture] = ()) -> StepBatch:
    """Return two step samples of equal length: the end of a conversation as the chat template writes it.

    They have the first half of the tokens in common, and the second half counts as the completion. With images, that
    is the answer. `encode` is a `ChatEncoder`.
    """
    asked = list(messages)
    try:
        text = encode.text([*asked, {"role": "assistant", "content": "go to the hall"}], add_generation_prompt=False)
    except Exception:  # templates raise errors of any class
        text = encode.text(asked)
    ids = np.array(encode.ids([text], [images])[0], dtype=np.int32)
    if images:  # the tokens after the last one of an image
        at = int(np.isin(ids, encode.images.token_ids).nonzero()[0].max()) + 2
    else:
        ids = ids[-_SAMPLE_TOKENS:]
        at = max(1, len(ids) // 2)
    prompt, completion = np.split(ids, [at])
    ones, shown = np.ones(2, np.float32), [images] * 2 if images else None
    return StepBatch([prompt] * 2, [completion, np.roll(completion, 1)], ones, np.ones(2, bool), images=shown)


class StartCheck(TrainerCallback):
    """Comparison of the policies of a run before its first optimizer step; all ranks make it together.

    Args:
        update: scores step samples as in training.
        reference: the reference model; `None` if it is the model without its adapter, or if there is none.
        sample: a short conversation, as step samples.
        temperature: temperature of log-probabilities.
        comparable: whether the engine samples from the whole distribution.
    """

    def __init__(
        self,
        update: Update,
        reference: torch.nn.Module | None,
        sample: StepBatch,
        temperature: float,
        comparable: bool = True,
    ):
        self.update, self.reference, self.sample, self.temperature = update, reference, sample, temperature
        self.comparable = comparable
        self.accelerator, self.layout = update.accelerator, update.layout
        self._largest_logit: float | None = None  # mean over the conversation's tokens
        self._has_stepped = self._has_seen_engine = False
        self._watched_samples: list[Sample] | None = None
        self._before: list[int] | None = None

    # -- before training -----------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compare trainer, model and, unless the run is resumed, the reference."""
        begins = state.global_step == 0 and not self._has_stepped
        self.compare(model, with_reference=begins and self.update.log_probs.beta != 0.0)

    @torch.no_grad()
    def compare(self, model: torch.nn.Module, with_reference: bool = True) -> None:
        """Choose the path of log-probabilities that agrees with `model`, and compare the reference.

        Raises:
            G2POError: if no path agrees with the model's own forward pass, if that is not causal, or if the reference,
                or the model in training mode, differs.
        """
        with evaluation_mode(model):
            scored = self._choose_path(model)
            if with_reference:
                self._compare_reference(model, scored)
            model.train()
            without_randomness(self.accelerator.unwrap_model(model))
            off = self._difference(self._score(model, self.sample), scored)
        remedy = (
            f"in training mode its log-probabilities differ by {off:.2g} nats on average: set dropout and noise to 0 "
            "in its configuration, or gradient_checkpointing=False"
        )
        require(off <= self._tolerance(model), "model", type(self.layout.language_model(model)).__name__, remedy)

    def _choose_path(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the trainer's log-probabilities (rows, C), by the first path that agrees with `forward`."""
        try:
            wanted = self._forward(model)
        except RuntimeError as error:
            raise G2POError(
                f"the model's own forward pass fails ({error}): with an adapter on quantized weights, use LoRA, and "
                "load a model whose lm_head is in modules_to_save with the dtype that it computes in"
            ) from error
        layout, tried = self.layout, []
        configured = layout.kind
        for kind, fused in product(dict.fromkeys((configured, "padded")), (True, False)[not layout.fused :]):
            layout.kind, layout.fused = kind, fused
            error = None
            try:
                scored = self._score(model, self.sample)
                off = self._difference(scored, wanted)
            except Exception as raised:  # models that have no such head raise errors of any class
                error, off = raised, float("inf")
            if off <= self._tolerance(model):
                if tried:
                    self._warn_of_path(configured, tried[0])
                return scored
            tried.append(f"{off:.2g} nats on average" if error is None else f"{type(error).__name__}: {error}")
        layout.kind, layout.fused = configured, True
        raise G2POError(
            f"the model is a {type(layout.language_model(model)).__name__}, and no log-probabilities of training "
            f"agree with its own forward pass: they differ by {'; '.join(tried)}, where rounding explains "
            f"{self._tolerance(model):.2g}. The gradient would be that of another model: train one of another family"
        )

    def _warn_of_path(self, configured: str, difference: str) -> None:
        if self.accelerator.is_main_process:
            instead = [] if self.layout.kind == configured else [f"token_layout {self.layout.kind!r}"]
            instead += [] if self.layout.fused else ["the model's own LM head, which needs memory for all logits"]
            logger.warning(
                f"log-probabilities by token_layout {configured!r} and TRL's fused LM head differ from those of the "
                f"model's own forward pass ({difference}): training uses {' and '.join(instead)}"
            )

    def _compare_reference(self, model: torch.nn.Module, scored: torch.Tensor) -> None:
        unwrapped, log_probs = self.accelerator.unwrap_model(model), self.update.log_probs
        with log_probs.as_reference(model, self.reference, unwrapped) as reference:
            wanted = self._score(reference, self.sample)
        off, tolerance = self._difference(scored, wanted), self._tolerance(model)
        if off <= tolerance:
            return
        whose = "the adapter as it was when the trainer was made"
        if self.reference is not None:
            origin = self.accelerator.unwrap_model(self.reference).config.name_or_path
            whose = f"{origin!r} as it was when the trainer was made"
        raise G2POError(
            f"beta is {log_probs.beta} and the reference is not the model that begins: their log-probabilities differ "
            f"by {off:.2g} nats on average before the first step, where rounding explains {tolerance:.2g}. The "
            f"reference is {whose}: change the model before, or save it with save_pretrained and pass the folder; or "
            "set beta=0"
        )

    # -- the first rollout ---------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, engine: Any) -> Iterator[None]:
        """Let an engine that computes with the model record its samples of the first rollout inside."""
        self._watched_samples = None
        if self._has_seen_engine or not getattr(engine, "is_the_model", False):
            yield
            return
        engine.watched = self._watched_samples = []
        try:
            yield
        finally:
            engine.watched = None

    def compare_engine(self, model: torch.nn.Module, trajectories: Sequence[Trajectory]) -> None:
        """Compare the engine's log-probabilities of the first rollout with the trainer's.

        Args:
            model: the model.
            trajectories: trajectories of this rank.

        Raises:
            G2POError: if they differ by more than rounding.
        """
        if self._has_seen_engine:
            return
        steps = [step for trajectory in trajectories if trajectory.counted for step in trajectory.steps]
        played = self.accelerator.reduce(torch.tensor(len(steps), device=self.accelerator.device), reduction="sum")
        self._has_seen_engine = bool(played)  # the next rollout, if all episodes of this one are errors
        samples, dtype = self._watched_samples, torch.float32
        if samples is None:  # an engine that computes in a precision of its own, and may report
            reported = [step for step in steps if step.logprobs]
            samples = [(one.prompt_ids, one.completion_ids, one.logprobs, one.shown_images) for one in reported]
            dtype = torch.bfloat16
        batch = self._some_samples(samples) if samples and self.comparable else None
        with evaluation_mode(model), torch.no_grad():  # on every rank: a sharded model computes on all of them
            # Padded: the layout is compared with samples alone later, with the whole rollout.
            scored = self.update.score(model, self.update.micro_batch(batch or self.sample, "padded"))
        sampled = torch.full_like(scored, torch.nan)
        for row, values in enumerate(batch.logprobs if batch else []):
            sampled[row, : len(values)] = torch.from_numpy(values)
        known = ~sampled.isnan()
        off, tolerance = self._difference(scored, sampled, known), self._tolerance(model, dtype)
        if off <= tolerance:
            return
        differs = (
            "the engine does not play the policy that is trained: its log-probabilities of the first rollout differ "
            f"from the trainer's by {off:.2g} nats on average, where rounding explains {tolerance:.2g}. Compare its "
            "weights, dtype, quantization and context length with the model's, or generate without it"
        )
        if self.update.log_probs.correction is None or not off <= _CORRECTED_NATS:
            raise G2POError(differs)
        if self.accelerator.is_main_process:
            logger.warning(f"{differs}. Importance weights correct for it, at the cost of noise")

    # -- the first optimizer step --------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self._has_stepped:
            self._before = _checksums(model)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Refuse to continue if a step with a gradient changes no weight."""
        if self._before is None or self._has_stepped:
            return
        moved, self._before = self._before != _checksums(model), None
        had_gradient = any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        # Adafactor with lr=None chooses its own.
        rate = max((1.0 if group["lr"] is None else group["lr"] for group in optimizer.param_groups), default=0.0)
        flags = torch.tensor([moved, had_gradient], device=self.accelerator.device).float()
        moved, had_gradient = (self.accelerator.reduce(flags, reduction="sum") > 0).tolist()
        if moved:
            self._has_stepped = True
        elif had_gradient and rate > 0 and not getattr(optimizer, "step_was_skipped", False):
            dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
            raise G2POError(
                f"learning_rate is {rate:.2g}, the gradient is not zero, and the optimizer's step changed no weight "
                f"({', '.join(sorted(dtypes))}): raise the rate, load the weights in float32 (model_init_kwargs="
                "{'dtype': 'float32'}), or pass an optimizer of the model's own parameters"
            )

    # -- log-probabilities ---------------------------------------------------------------------------------------

    def _score(self, model: torch.nn.Module, batch: StepBatch) -> torch.Tensor:
        return self.update.score(model, self.update.micro_batch(batch))

    @without_cudnn_attention()
    def _forward(self, model: torch.nn.Module) -> torch.Tensor:
        """Return log-probabilities of the conversation by the model's own forward pass, (rows, C)."""
        device = self.accelerator.device
        ids = torch.from_numpy(np.stack(self.sample.sequences())).long().to(device)
        length = len(self.sample.completion_ids[0])
        more = {} if self.sample.images is None else self.layout.image_inputs(ids, self.sample.images)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits
        logits = logits[:, -length - 1 : -1].float() / self.temperature
        largest = logits.abs().amax(-1).mean().reshape(1).to(device)
        self._largest_logit = self.accelerator.reduce(largest, reduction="mean").item()  # one tolerance on all ranks
        logits = logits.log_softmax(-1)
        self._check_causal(model, logits[:, 0])
        return logits.gather(-1, ids[:, -length:, None].to(logits.device))[..., 0]

    def _check_causal(self, model: torch.nn.Module, first: torch.Tensor) -> None:
        """Refuse a model if tokens after a prompt change `first`, (rows, vocabulary) outputs after the same prompt."""
        off = self._difference(first[:1], first[1:])
        if off > self._tolerance(model):
            raise G2POError(
                f"the model is a {type(self.layout.language_model(model)).__name__}, whose tokens see later ones: "
                f"what follows a prompt changes the log-probabilities of its next token by {off:.2g} nats on average. "
                "Train a causal language model"
            )

    def _difference(self, found: torch.Tensor, wanted: torch.Tensor, known: torch.Tensor | None = None) -> float:
        """Return the mean absolute difference over all ranks, where `wanted` is known; infinity for NaN."""
        off = (found.to(wanted.device)[:, : wanted.shape[1]] - wanted).abs().double()
        off = (off if known is None else off[known]).nan_to_num(torch.inf)
        sums = torch.stack([off.sum(), off.new_tensor(off.numel())]).float().to(self.accelerator.device)
        total, number = self.accelerator.reduce(sums, reduction="sum").tolist()
        return total / max(number, 1)

    def _tolerance(self, model: torch.nn.Module, least: torch.dtype = torch.float32) -> float:
        eps = max(torch.finfo(dtype).eps for dtype in (self.layout.precision(model), least))
        return _NATS + eps * self._largest_logit

    def _some_samples(self, samples: Sequence[Sample]) -> StepBatch:
        """Return the longest sample and others spread over the rollout, as step samples of one forward pass."""
        lengths = [len(prompt) + len(completion) for prompt, completion, *_ in samples]
        longest = int(np.argmax(lengths))
        scales = self.layout.scale_of(lengths)
        fitting = [place for place, scale in enumerate(scales) if scale == scales[longest]]
        spread = np.linspace(0, len(fitting) - 1, _ROWS - 1).round().astype(int).tolist()
        places = list(dict.fromkeys([longest, *(fitting[place] for place in spread)]))
        chosen = [samples[place] for place in places[: max(1, self.update.config.max_tokens // lengths[longest])]]
        prompts, completions = ([np.array(sample[part], dtype=np.int32) for sample in chosen] for part in (0, 1))
        logprobs = [np.array(sample[2], dtype=np.float32) for sample in chosen]
        ones = np.ones(len(chosen))
        images = [sample[3] for sample in chosen] if any(sample[3] for sample in chosen) else None
        return StepBatch(prompts, completions, ones.astype(np.float32), ones.astype(bool), logprobs, images)


def _checksums(model: torch.nn.Module) -> list[int]:
    """Return a number of the bits of each parameter that trains, of this rank's shard."""
    sums = []
    for parameter in model.parameters():
        if parameter.requires_grad:  # under ZeRO-3 the parameter itself is empty
            weight = getattr(parameter, "ds_tensor", parameter).detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            sums.append(int(weight.contiguous().view(_INTEGERS[weight.element_size()]).sum()))
    return sums
