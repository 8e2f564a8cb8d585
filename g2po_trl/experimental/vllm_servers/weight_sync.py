"""Let vLLM servers load weights from files, and verify the loaded weights."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import GenerationConfig

from ...engines.adapter_weights import check_mergeable
from ...engines.base import EngineParts
from ...engines.vllm_adapter import why_merged
from ...engines.weight_folder import EMPTY, PREFIX
from ...utils.errors import G2POError
from .client import LOADING, RequestRejected, Server, ServerUnavailable, run

logger = logging.getLogger(__name__)

FOLDER_TIMEOUT = 20.0  # seconds until a server sees a folder that another machine has written
PROBE_TOKENS = 32
# Nats, on average over the tokens of a prompt of random ones. bfloat16 makes 0.02 to 0.1, other weights several.
LARGEST_DIFFERENCE = 0.3
# What a request leaves open, vLLM takes from the checkpoint's generation_config.json.
NO_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"


@dataclass
class Probe:
    """A fixed prompt with the policy's log-probabilities.

    Args:
        ids: (T,) token ids.
        logprobs: (T - 1,) log-probabilities of all tokens but the first.
        next: (V,) log-probabilities of the next token.
        tempered: (V,) `next` at the temperature of rollouts.
    """

    ids: list[int]
    logprobs: list[float]
    next: torch.Tensor
    tempered: torch.Tensor

    @classmethod
    def from_ids(cls, trainer: EngineParts, ids: list[int]) -> Probe:
        """Return the probe for these tokens. All ranks call it together, since weights may be sharded."""
        temperature = trainer.args.temperature
        with trainer.generation_model(GenerationConfig(max_new_tokens=1)) as model:
            row = torch.tensor([ids], device=trainer.accelerator.device)
            logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0].float().cpu()
        logprobs = logits.log_softmax(-1)
        own = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return cls(ids, own.tolist(), logprobs[-1], (logits[-1] / temperature).log_softmax(-1))


class WeightSync:
    """Loads weights into the servers. Each rank has one; usually the main process alone loads.

    `takes_adapters`: each server loads an adapter in addition to its base model; otherwise it replaces all its
    weights, which needs vLLM's development mode. `version` is the folder of the newest weights.
    """

    def __init__(self, trainer: EngineParts):
        self.trainer, tokenizer, self.has_adapter = trainer, trainer.tokenizer, is_peft_model(trainer.model())
        self.takes_adapters, self.version, self.probe = False, None, None
        self.names: dict[str, str] = {}
        self._syncs = 0
        self.vocabulary = trainer.model().config.get_text_config().vocab_size
        usable = sorted(set(range(min(len(tokenizer), self.vocabulary))) - set(tokenizer.all_special_ids))
        self.probe_ids = random.Random(0).choices(usable, k=PROBE_TOKENS)

    def model_name(self, server: Server) -> str:
        return self.version.name if self.takes_adapters else self.names[server.url]

    # -- before training ---------------------------------------------------------------------------------

    def check(self, servers: Sequence[Server], patience: float) -> tuple[bool, dict[str, str]]:
        """Check that each server answers, serves this model, and can load weights.

        Returns:
            whether all of them load adapters, and the name of the model on each, by address.

        Raises:
            ValueError: naming the server and the remedy.
        """
        cards = {server.url: self._card(server, patience) for server in servers}
        args, model = self.trainer.args, self.trainer.model()
        longest = 0 if args.max_prompt_length is None else args.max_prompt_length + args.max_completion_length
        for url, card in cards.items():
            if (limit := card.get("max_model_len") or longest) < longest:
                raise G2POError(
                    f"servers has {url}, which takes {limit} tokens, fewer than max_prompt_length + "
                    f"max_completion_length = {longest}: start it with --max-model-len {longest}"
                )
        # They have the base from files.
        reason = why_merged(model, has_base=False) if self.has_adapter else "no adapter is trained"
        self.takes_adapters = reason is None and all(self._has(s, "/v1/load_lora_adapter") for s in servers)
        if not self.takes_adapters:
            for server in servers:
                if not self._has(server, "/weight_info"):
                    raise G2POError(
                        f"servers has {server.url}, which cannot be given weights ({reason or 'nor adapters'}): start "
                        f"it with vLLM's development mode, on a private network or loopback: {START}"
                    )
            if self.has_adapter:  # a quantized one needs servers with --enable-lora
                check_mergeable(model)
        self.names = {url: card["id"] for url, card in cards.items()}
        return self.takes_adapters, self.names

    def _card(self, server: Server, patience: float) -> dict[str, Any]:
        deadline = time.monotonic() + patience
        while True:
            try:
                models = run(server.get("/v1/models"))["data"]
                return next(model for model in models if not model.get("parent"))
            except ServerUnavailable as lost:
                if time.monotonic() > deadline:
                    raise G2POError(
                        f"servers has {server.url}, which does not answer, for {patience:g} s "
                        f"(vllm_server_timeout): {lost}. Start it: {START} --port PORT, or remove it"
                    ) from lost
                time.sleep(min(1.0, patience / 10))
            except (RequestRejected, LookupError, TypeError, StopIteration, AttributeError) as error:
                raise G2POError(
                    f"servers has {server.url}, which is not a vLLM server with a model ({error!r}): is the "
                    "address right, and VLLM_API_KEY set if the server asks for one?"
                ) from error

    @staticmethod
    def _has(server: Server, path: str) -> bool:
        try:
            run(server.get(path))
        except RequestRejected as error:
            return error.status != 404
        except ServerUnavailable as lost:
            raise G2POError(f"servers has {server.url}, which does not answer: {lost}") from lost
        return True

    # -- once a rollout ------------------------------------------------------------------------------------------

    def load_everywhere(self, servers: Sequence[Server], patience: float) -> tuple[list[str | None], float]:
        """Load the newest version on all servers.

        Returns:
            for each server the reason why it is excluded, or `None`; and the largest difference between a server's
            log-probabilities of the probe and the trainer's.

        Raises:
            RuntimeError: if no server has loaded the weights, or one reports that it has and uses others.
        """
        self._syncs += 1
        deadline, differences = time.monotonic() + patience, []

        async def load(server: Server) -> str | None:
            try:
                differences.append(await self.load(server))
            except ServerUnavailable as lost:
                return str(lost)
            return None

        async def load_all() -> list[str | None]:
            return await asyncio.gather(*map(load, servers))

        while True:
            lost = run(load_all())
            # At first all have just answered: it is not the machine that fails, and waiting does not help.
            if differences or self._syncs == 1:
                break
            if time.monotonic() > deadline:
                reasons = "; ".join(f"{server.url}: {reason}" for server, reason in zip(servers, lost))
                raise RuntimeError(f"no server can be given the weights of {self.version}: {reasons}")
            time.sleep(min(1.0, patience / 10))
        for server, reason in zip(servers, lost):
            if reason is None:
                continue
            if self._syncs == 1:
                raise RuntimeError(f"{server.url} has not loaded {self.version}: {reason}. Fix it, or remove it")
            logger.warning("%s is left out of this rollout: %s", server.url, reason)
        return lost, max(differences)

    async def load(self, server: Server) -> float:
        """Give one server the newest version, unless it has it.

        Returns:
            the mean difference of the probe's log-probabilities from the trainer's, in nats.

        Raises:
            ServerUnavailable: if loading failed.
            RuntimeError: if the server reports that it has loaded them, and uses other weights.
        """
        try:
            if self.takes_adapters:
                await self._load_adapter(server)
            else:
                await self._load_all(server)
            return await self._compare(server)
        except RequestRejected as error:
            raise ServerUnavailable(str(error)) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerUnavailable(f"its response is not vLLM's ({type(error).__name__}: {error})") from error

    async def _load_all(self, server: Server) -> None:
        if (await server.get("/weight_info"))["weight_version"] != self.version.name:
            await self._wait_until_seen(server)
            try:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.version)}}
                await server.post("/collective_rpc", body)
            except ServerUnavailable as lost:
                raise ServerUnavailable(
                    f"loading {self.version} failed ({lost}). Was it started with the model that is trained? See its "
                    "log; it must be restarted"
                ) from lost
            await self._forget_prefixes(server)
            await server.post("/update_weight_version", {"new_version": self.version.name})
        server.version = self.version.name

    async def _wait_until_seen(self, server: Server) -> None:
        """Wait until the server sees the folder of the weights, which may arrive late on another machine.

        vLLM crashes if the folder is missing. So it first loads an empty file, in the format of its
        kernels, which changes nothing.
        """
        arguments = {"weights_path": str(self.version / EMPTY), "is_checkpoint_format": False}
        deadline = time.monotonic() + FOLDER_TIMEOUT
        while True:
            try:
                await server.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
                return
            except ServerUnavailable as lost:
                if lost.status is None:
                    raise
                if time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"it does not see {self.version}: set weights_folder to a folder that it and the trainer "
                        f"reach by the same name ({lost})"
                    ) from lost
                await asyncio.sleep(0.5)

    async def _forget_prefixes(self, server: Server) -> None:
        """Reset the prefix cache of the old weights. vLLM refuses while it is ending cancelled requests."""
        deadline = time.monotonic() + 30
        while not (await server.post("/reset_prefix_cache", {}))["success"]:
            if (await server.get("/weight_info"))["weight_version"] == self.version.name:
                return  # another rank was faster, and asks it already
            if time.monotonic() > deadline:
                raise ServerUnavailable("its cache of the previous weights cannot be reset: another client uses it")
            await asyncio.sleep(0.1)

    async def _load_adapter(self, server: Server) -> None:
        """Load the adapter under a new name, so that no cached prefix of another version matches."""
        loaded = [model["id"] for model in (await server.get("/v1/models"))["data"]]
        if self.version.name not in loaded:
            body = {"lora_name": self.version.name, "lora_path": str(self.version)}
            await server.post("/v1/load_lora_adapter", body)
        for name in loaded:
            if name.startswith(PREFIX) and name != self.version.name:
                await server.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _compare(self, server: Server) -> float:
        probe, args = self.probe, self.trainer.args
        body = {"model": self.model_name(server), "prompt": probe.ids, "max_tokens": 1, "seed": 0, "logprobs": 0}
        body |= {"prompt_logprobs": 0, "return_token_ids": True, "temperature": args.temperature}
        body |= NO_FILTERS
        answer = await server.complete(body, LOADING)
        (choice,) = answer["choices"]
        found = [at[str(token)]["logprob"] for token, at in zip(probe.ids[1:], choice["prompt_logprobs"][1:])]
        (token,), (logprob,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        pairs = list(zip(probe.logprobs, found, strict=True))
        difference = sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs)
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeError(
                f"{server.url} reports that it has loaded {self.version}, but its log-probabilities of a prompt "
                f"differ from the trainer's by {difference:.3g} nats per token on average: was it started with "
                f"the model that is trained, in its precision? The limit is {LARGEST_DIFFERENCE}"
            )
        whole, tempered = (abs(float(values[token]) - logprob) for values in (probe.next, probe.tempered))
        if args.vllm_importance_sampling_correction and tempered > whole + max(0.01, difference):
            raise RuntimeError(
                f"{server.url} returns log-probabilities before the temperature ({args.temperature:g}) is "
                "applied: start it with --logprobs-mode processed_logprobs, or set "
                "vllm_importance_sampling_correction=False"
            )
        return difference

    def check_unchanged(self, servers: Sequence[Server]) -> None:
        """Raise an error if another run has loaded weights during the rollout."""
        if self.takes_adapters:
            return
        for server in servers:
            try:
                found = str(run(server.get("/weight_info"))["weight_version"])
            except (ServerUnavailable, RequestRejected, LookupError, TypeError):
                continue  # it has died since
            if found.startswith(PREFIX) and found != self.version.name:
                raise RuntimeError(
                    f"{server.url} has the weights of another run ({found}, not {self.version.name}): give each run "
                    "servers of its own"
                )
