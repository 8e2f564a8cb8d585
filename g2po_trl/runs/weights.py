"""The weights of a checkpoint: loaded as `from_pretrained` loads them, and recognized by a digest of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel, TrainerCallback

from ..engines.adapter_weights import plain_name, whole
from ..utils.options import require
from .checkpoint import STATE


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Load a checkpoint's weights into a model, by the conversion from the Hub's names to the model's."""
    loaded = type(model).from_pretrained(str(folder), dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())


class WeightCheck(TrainerCallback):
    """Compares a model that was loaded with its checkpoint, parameter by parameter, before it trains or is used.

    Args:
        model: returns the model without accelerate's wrappers.
        gather: gathers parameters that ZeRO-3 shards.
        device: gathers FSDP2's weights, if they are offloaded to the host.
    """

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        gather: Callable[[Sequence], AbstractContextManager] = nullcontext,
        device: torch.device | None = None,
    ):
        self.model, self.gather, self.device = model, gather, device
        self._frozen: dict[str, str] = {}  # weights that do not train are read once
        self._wanted: Mapping[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """Return a digest of each parameter, the same however it is sharded. All ranks call it together."""
        found = {}
        for name, parameter in self.model().named_parameters():
            name = plain_name(name)
            if name not in self._frozen:
                with self.gather([parameter]):
                    bits = whole(parameter.data, self.device).cpu().contiguous().view(-1).view(torch.uint8)
                    found[name] = xxhash.xxh3_64_hexdigest(bits.numpy())
                self._frozen |= {} if parameter.requires_grad else {name: found[name]}
        return found | self._frozen

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Compare the model with these digests when training begins."""
        self._wanted = state

    def on_train_begin(self, args, state, control, **kwargs):
        wanted, self._wanted = self._wanted, {}
        self.compare(wanted, args.resume_from_checkpoint or args.output_dir)

    def check(self, folder: str | Path) -> None:
        """Compare the model with the digests in a checkpoint. All ranks call it together."""
        path = Path(folder, STATE)
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.compare(state.get("weights", {}), str(folder))

    def compare(self, wanted: Mapping[str, str], folder: str) -> None:
        """Refuse the model of a checkpoint unless its parameters have the digests `wanted`."""
        self._frozen = {}
        found = self.state_dict() if wanted else {}
        differing = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        remedy = (
            f"{len(differing)} of {len(wanted)} parameters of the model are not those that were saved there "
            f"({', '.join(differing[:3])}): its files, the base model or the version of transformers has changed; use "
            "the earlier ones, or start a new run from the model that you want"
        )
        require(not differing, "resume_from_checkpoint", folder, remedy)
