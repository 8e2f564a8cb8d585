"""Weights as files for engines in other processes: successive versions, each complete or absent."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "g2po-weights-"
EMPTY = "seen"  # beside the weights: a file without any, to be loaded without harm
SHARD_BYTES = 4 * 2**30


class WeightFolder:
    """Versions of a run's weights in a folder, which belongs to one run at a time.

    Args:
        path: folder that the engines see under the same name.
        writes: whether this process writes; other processes only take part in gathering weights.
        shard_bytes: size of a file, and of the buffer in this process.
    """

    def __init__(self, path: str | Path, writes: bool, shard_bytes: int = SHARD_BYTES):
        self.path, self.writes, self.shard_bytes = Path(path).absolute(), writes, shard_bytes
        self._run, self._number = secrets.token_hex(4), 0

    def open(self) -> None:
        """Make the folder and remove versions of other runs. Raises `OSError` if the disk fails."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove(PREFIX)

    def save(self, weights: Iterable[tuple[str, torch.Tensor]], adapter: Any = None) -> Path:
        """Write the next version and return its folder, which has its name only when it is complete.

        Args:
            weights: iterated to the end on every rank, even after an error, because gathering is collective.
            adapter: PEFT's configuration, if the weights are an adapter's.

        Raises:
            OSError: if the disk fails.
        """
        self._number += 1
        version = self.path / f"{PREFIX}{self._run}-{self._number}"
        staged = version.with_name(f".{version.name}")
        error, shard, shards = None, {}, 0
        try:
            if self.writes:
                staged.mkdir()
        except OSError as failure:
            error = failure
        for name, tensor in weights:
            if not self.writes or error is not None:
                continue
            try:
                full = sum(t.nbytes for t in shard.values()) + tensor.nbytes > self.shard_bytes
                if adapter is None and shard and full:
                    shards += 1
                    save_file(shard, staged / f"model-{shards:05d}.safetensors")
                    shard = {}
                shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            except Exception as failure:  # raised when the other ranks do not wait for this one
                error = failure
        if not self.writes:
            return version
        try:
            if error is not None:
                raise error
            name = f"model-{shards + 1:05d}" if adapter is None else "adapter_model"
            save_file(shard, staged / f"{name}.safetensors")
            if adapter is not None:
                adapter.save_pretrained(staged)
            (staged / EMPTY).mkdir()
            save_file({}, staged / EMPTY / "model.safetensors")
            staged.rename(version)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return version

    def keep_only(self, version: Path | None) -> None:
        """Remove this run's other versions, including incomplete ones."""
        self._remove(f"{PREFIX}{self._run}-", version)

    def _remove(self, prefix: str, but: Path | None = None) -> None:
        for found in self.path.glob(f"{prefix}*"), self.path.glob(f".{prefix}*"):
            for other in found:
                if but is None or other.name != but.name:
                    shutil.rmtree(other, ignore_errors=True)
