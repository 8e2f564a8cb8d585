"""Check numerically, before training, that engine, trainer and reference compute the same policy.

Log-probabilities of a short conversation are computed as the trainer does (layout, fused LM head), by the model's own
`forward`, and by the reference; those of the first rollout's completions also by the engine that sampled them. If they
differ by more than rounding, a slower path that agrees is used, or training is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ...trajectory import Step, Trajectory
from ...utils.forward_pass import evaluation_mode, without_cudnn_attention, without_randomness
from ...utils.images import Picture
from ...utils.options import require
from ...utils.trl_compat import forget_rotary_lengths, replaced
from ..batch import StepBatch
from ..update import Update

logger = logging.getLogger(__name__)
_CORRECTED_NATS = 2.0  # of an engine whose samples have importance weights: larger ones are bounded at 3
_ROWS = 4  # of the first rollout
_SAMPLE_TOKENS = 64  # of the conversation that is scored before training


def sample_conversation(encode: Any, messages: Sequence[dict[str, Any]], images: Sequence[Picture] = ()) -> StepBatch:
    """Return two step samples of equal length: the end of a conversation as the chat template writes it.

    They have the first half of the tokens in common, and the second half counts as the completion; with images, that
    is the answer. The other completion repeats the last token. `encode` is a `ChatEncoder`.
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
    completions, ones = [completion, np.full_like(completion, completion[-1])], np.ones(2, np.float32)
    return StepBatch([prompt] * 2, completions, ones, ones.astype(bool), images=[images] * 2)


class StartCheck(TrainerCallback):
    """Comparison of the policies of a run before its first optimizer step; all ranks make it together.

    Args:
        update: scores step samples as in training.
        sample: a short conversation, as step samples.
        comparable: whether the engine samples from the whole distribution.
    """

    def __init__(self, update: Update, sample: StepBatch, comparable: bool = True):
        self.update, self.sample, self.comparable = update, sample, comparable
        self.accelerator, self.layout = update.accelerator, update.layout
        self._has_begun = self._has_seen_engine = False
        self._engine, self._is_the_model, self._asked = "", False, False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compare trainer, model and, unless the run is resumed, the reference."""
        begins = state.global_step == 0 and not self._has_begun
        self.compare(model, with_reference=begins and self.update.log_probs.beta != 0.0)
        self._has_begun = True

    @torch.no_grad()
    def compare(self, model: torch.nn.Module, with_reference: bool = True) -> None:
        """Choose the path of log-probabilities that agrees with `model`, and compare the reference.

        Raises:
            G2POError: if no path agrees with the model's own forward pass, if that is not causal, or if the reference,
                or the model in training mode, differs.
        """
        log_probs = self.update.log_probs
        with evaluation_mode(model):
            scored = self._choose_path(model)
            most = self.layout.tolerance(model)
            if with_reference:
                with log_probs.as_reference(model) as reference:
                    off = self.update.mean_difference(scored - self._score(reference))
                remedy = f"the reference differs from the first model ({off:.2g} nats): save that and pass its folder"
                require(off <= most, "beta", log_probs.beta, remedy)
            model.train()
            without_randomness(self.accelerator.unwrap_model(model))
            off = self.update.mean_difference(self._score(model) - scored)
        remedy = f"training mode changes it ({off:.2g} nats): set its dropout to 0, or gradient_checkpointing=False"
        require(off <= most, "model", self.layout.model_name, remedy)

    def _choose_path(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the trainer's log-probabilities (rows, C), by the first path that agrees with `forward`."""
        try:
            wanted = self._forward(model)
        except RuntimeError as error:
            remedy = "on quantized weights use LoRA, and the dtype of a trained lm_head that its layers compute in"
            require(False, "model", self.layout.model_name, f"its own forward pass fails ({error}): {remedy}")
        most, layout, tried = self.layout.tolerance(model), self.layout, []
        configured = layout.kind
        for kind, fused in product(dict.fromkeys((configured, "padded")), (True, False)[not layout.fused :]):
            layout.kind, layout.fused = kind, fused
            try:
                scored = self._score(model)
                off = self.update.mean_difference(scored.to(wanted.device)[:, : wanted.shape[1]] - wanted)
                difference = f"{off:.2g} nats on average"
            except Exception as error:  # models that have no such head raise errors of any class
                off, difference = float("inf"), f"{type(error).__name__}: {error}"
            if off <= most:
                if tried and self.accelerator.is_main_process:
                    head = "TRL's fused LM head" if fused else "the model's own LM head"
                    logger.warning(f"by its own forward pass {tried[0]}: training uses {head}, token_layout {kind!r}")
                return scored
            tried.append(difference)
        layout.kind, layout.fused = configured, True
        remedy = (
            f"no log-probabilities of training agree with its own forward pass ({'; '.join(tried)}, and rounding "
            f"explains {most:.2g}): train a model of another family"
        )
        require(False, "model", self.layout.model_name, remedy)

    # -- the first rollout ---------------------------------------------------------------------------------------

    def watching(self, engine: Any) -> AbstractContextManager[None]:
        """Return a context in which an engine that computes with the model records its first log-probabilities."""
        self._engine, self._is_the_model = type(engine).__name__, getattr(engine, "is_the_model", False)
        self._asked = self._is_the_model and not self._has_seen_engine and not getattr(engine, "logprobs", True)
        return replaced(engine, logprobs=True) if self._asked else nullcontext()

    def compare_engine(self, model: torch.nn.Module, trajectories: Sequence[Trajectory]) -> None:
        """Compare the engine's log-probabilities of the first rollout, this rank's trajectories, with the trainer's.

        Raises:
            G2POError: if they differ by more than rounding.
        """
        if self._has_seen_engine:
            return
        steps = [step for trajectory in trajectories if trajectory.counted for step in trajectory.steps]
        played = torch.tensor(len(steps), device=self.accelerator.device)
        # The next rollout, if all episodes of this one are errors.
        self._has_seen_engine = bool(self.accelerator.reduce(played, reduction="sum"))
        reported = [step for step in steps if step.logprobs and self.comparable]
        batch = self._some_of(reported) if reported else self.sample
        for step in (step for trajectory in trajectories for step in trajectory.steps if self._asked):
            step.logprobs = None
        # Padded: the layout is compared with samples alone later, with the whole rollout.
        micro_batch = self.update.micro_batch(batch, "padded")
        with evaluation_mode(model), torch.no_grad():  # on every rank: a sharded model computes on all of them
            scored = self.update.score(model, micro_batch)
        nothing = torch.full_like(scored, torch.nan)
        sampled = micro_batch.get("sampling_per_token_logps", nothing).to(scored.device)
        known = micro_batch["completion_mask"].to(scored.device).bool() & ~sampled.isnan()
        least = torch.float32 if self._is_the_model else torch.bfloat16  # others compute in a precision of their own
        off, most = self.update.mean_difference((scored - sampled)[known]), self.layout.tolerance(model, least)
        if off <= most:
            return
        remedy = (
            f"it does not play the policy that is trained: its first log-probabilities differ by {off:.2g} nats on "
            f"average ({most:.2g} would be rounding). Compare its weights, dtype and context length with the model's"
        )
        is_corrected = self.update.log_probs.correction is not None and off <= _CORRECTED_NATS
        require(is_corrected, "engine", self._engine, remedy)
        if self.accelerator.is_main_process:
            logger.warning(f"{self._engine}: {remedy}. Importance weights correct for it, at the cost of noise")

    def _some_of(self, steps: Sequence[Step]) -> StepBatch:
        """Return the longest step and others spread over the rollout, as step samples of one forward pass."""
        lengths = [len(step.prompt_ids) + len(step.completion_ids) for step in steps]
        longest, scales = int(np.argmax(lengths)), self.layout.scale_of(lengths)
        fitting = [place for place, scale in enumerate(scales) if scale == scales[longest]]
        spread = np.linspace(0, len(fitting) - 1, _ROWS - 1).round().astype(int).tolist()
        places = list(dict.fromkeys([longest, *(fitting[place] for place in spread)]))
        chosen = [steps[place] for place in places[: max(1, self.update.config.max_tokens // lengths[longest])]]
        return StepBatch.from_trajectories([Trajectory("", chosen, 0.0, "success")], np.ones(len(chosen)))

    # -- log-probabilities ---------------------------------------------------------------------------------------

    def _score(self, model: torch.nn.Module) -> torch.Tensor:
        return self.update.score(model, self.update.micro_batch(self.sample))

    @without_cudnn_attention()
    def _forward(self, model: torch.nn.Module) -> torch.Tensor:
        """Return log-probabilities of the conversation by the model's own forward pass, (rows, C)."""
        device = self.accelerator.device
        ids = torch.from_numpy(np.stack(self.sample.sequences())).long().to(device)
        length = len(self.sample.completion_ids[0])
        more = self.layout.image_inputs(ids, self.sample.images) if any(self.sample.images) else {}
        forget_rotary_lengths(model)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits
        logits = logits[:, -length - 1 : -1].float() / self.layout.temperature
        largest = logits.abs().amax(-1).mean().reshape(1).to(device)
        mean = self.accelerator.reduce(largest, reduction="mean")  # one tolerance on all ranks
        self.layout.largest_logit = mean.item()
        logits = logits.log_softmax(-1)
        off = self.update.mean_difference(logits[:1, 0] - logits[1:, 0])  # outputs after the same prompt
        remedy = f"its tokens see later ones (by {off:.2g} nats on average): train a causal language model"
        require(off <= self.layout.tolerance(model), "model", self.layout.model_name, remedy)
        return logits.gather(-1, ids[:, -length:, None].to(logits.device))[..., 0]
