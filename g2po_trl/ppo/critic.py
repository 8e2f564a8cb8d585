"""The critic of PPO: a copy of a language model's body with one number for an answer, the value of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from ..update.balance import deal, plan_micro_batches
from ..update.guard import describe, non_finite
from ..utils.forward_pass import rotary_scales, without_cudnn_attention, without_randomness
from ..utils.options import require

_WEIGHTS, _OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"


class ValueModel(nn.Module):
    """V(prompt): the last hidden state of a model's body, through a linear head that begins at 0."""

    def __init__(self, name_or_path: str, **model_kwargs):
        super().__init__()
        self.body = AutoModel.from_pretrained(name_or_path, dtype=torch.float32, **model_kwargs)
        self.body.config.use_cache = False
        config = self.body.config.get_text_config()
        remedy = "its rotary scale would be that of the longest row beside a prompt: take another, or G2POTrainer"
        require(not rotary_scales(config, [0])[0], "critic_model_name_or_path", name_or_path, remedy)
        self.head = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(rows, P), padded on the right -> (rows,) values in units of reward."""
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(dim=1) - 1
        return self.head(hidden[torch.arange(len(hidden), device=hidden.device), last]).float().squeeze(-1)


class Critic:
    """A value model with its optimizer. Every process holds all of it; gradients are summed over processes."""

    def __init__(
        self,
        name_or_path: str,  # the model whose body it is; weights are kept in float32
        accelerator: Accelerator,
        learning_rate: float = 1e-5,
        max_tokens: int = 16384,  # padded tokens in one forward pass
        max_grad_norm: float = 1.0,  # 0 does not clip
        gradient_checkpointing: bool = False,
        adamw: dict[str, Any] | None = None,  # more arguments of the optimizer
        model_kwargs: dict[str, Any] | None = None,  # of `from_pretrained`
    ):
        self.accelerator, self.max_tokens, self.max_grad_norm = accelerator, max_tokens, max_grad_norm
        self.model = ValueModel(name_or_path, **(model_kwargs or {})).to(accelerator.device)
        if gradient_checkpointing:
            self.model.body.gradient_checkpointing_enable({"use_reentrant": False})
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, **(adamw or {}))

    @without_cudnn_attention()
    def values(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """(prompts,) values of token ids, float64. Makes no collective call."""
        values = np.zeros(len(prompts))
        self.model.eval()
        with torch.no_grad():
            for rows in self._micro_batches(prompts, range(len(prompts))):
                values[rows] = self._forward([prompts[row] for row in rows]).cpu().double().numpy()
        return values

    @without_cudnn_attention()
    def fit(
        self,
        prompts: Sequence[Sequence[int]],
        old_values: np.ndarray,
        returns: np.ndarray,
        clip_range: float | None,
        epochs: int,
        mini_batches: int,
        rng: np.random.Generator,
    ) -> dict[str, float]:
        """Regress values on returns, `epochs` times over all rows, with `mini_batches` updates each.

        `prompts` are token ids of the rows of *all* processes, in the same order on each, and `rng` is in the same
        state; `old_values` and `returns` are (rows,). For `clip_range` see `clipped_value_loss`.

        Returns:
            Means over updates: `loss`, `clip_fraction` (fraction of rows whose value left the range), `grad_norm`.

        Raises:
            FloatingPointError: for a gradient that is not finite, on every process. The weights are unchanged.
        """
        lengths = np.array(list(map(len, prompts)), dtype=np.int64)
        orders = (rng.permutation(len(lengths)) for _ in range(epochs))
        self.model.train()
        without_randomness(self.model)
        updates = []
        for part in (part for order in orders for part in np.array_split(order, mini_batches) if len(part)):
            self.optimizer.zero_grad()
            statistics = torch.zeros(2, device=self.accelerator.device)  # float32: MPS has no float64
            own = deal(part.tolist(), lengths[part], self.accelerator.num_processes)[self.accelerator.process_index]
            for rows in self._micro_batches(prompts, own):
                old, target = (torch.as_tensor(of[rows]).float().to(statistics.device) for of in (old_values, returns))
                values = self._forward([prompts[row] for row in rows])
                loss = clipped_value_loss(values, old, target, clip_range)
                (loss.sum() / len(part)).backward()
                outside = (values - old).abs() > (math.inf if clip_range is None else clip_range)
                statistics += torch.stack([loss.detach().sum(), outside.sum()]) / len(part)
            updates.append([*self.accelerator.reduce(statistics, reduction="sum").tolist(), self._step()])
        means = np.mean(updates, axis=0) if updates else np.zeros(3)
        return dict(zip(("loss", "clip_fraction", "grad_norm"), means))

    def _step(self) -> float:
        """Sum gradients over processes, clip and step; return the gradient's norm before clipping."""
        for parameter in self.parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(own, reduction="sum")
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        if not norm.isfinite():  # clipping would make every gradient NaN, and hide where that begins
            raise FloatingPointError(f"the critic: {describe(non_finite(self.model))}")
        nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm or math.inf, norm)
        self.optimizer.step()
        return norm.item()

    def _micro_batches(self, prompts, rows) -> list[list[int]]:
        rows = sorted(rows, key=lambda row: -len(prompts[row]))
        plan = plan_micro_batches([[self._width(len(prompts[row])) for row in rows]], self.max_tokens)
        return [rows[start:stop] for start, stop in plan if rows[start:stop]]

    def _forward(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        width = self._width(max(map(len, prompts)))
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        mask = torch.tensor([[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts])
        with self.accelerator.autocast():
            return self.model(ids.to(self.accelerator.device), mask.to(self.accelerator.device))

    def _width(self, tokens: int) -> int:
        return -(-tokens // 16) * 16 if self.accelerator.device.type == "cuda" else tokens

    def save(self, folder: str | Path) -> None:
        """Write weights and optimizer into a folder, as safetensors."""
        save_file(self.model.state_dict(), Path(folder, _WEIGHTS))
        state = self.optimizer.state_dict()["state"]
        save_file({f"{i}.{key}": value for i in state for key, value in state[i].items()}, Path(folder, _OPTIMIZER))

    def load(self, folder: str | Path) -> None:
        """Take up what `save` wrote."""
        self.model.load_state_dict(load_file(Path(folder, _WEIGHTS)))
        state = {i: {} for i in range(len(self.parameters))}
        for name, value in load_file(Path(folder, _OPTIMIZER)).items():
            i, key = name.split(".", 1)
            state[int(i)][key] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Return (rows,) half the larger of (V - R)^2 and (V_old + clip(V - V_old) - R)^2; `None`: half the former.

    A value that moved further than the range from its old one, away from its return, has no gradient.
    """
    loss = (values - returns) ** 2
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - returns) ** 2)
    return 0.5 * loss
