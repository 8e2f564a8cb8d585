"""Completions by vLLM servers on any machine, started by vLLM's own command, which load weights from files."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engines.adapter_weights import adapter_parameters, whole_parameters
from ...engines.base import Completion, Engine, EngineParts
from ...engines.sampling import Sampling
from ...engines.vllm_requests import vllm_options
from ...engines.weight_folder import WeightFolder
from ...utils.errors import G2POError
from ...utils.options import require
from ...utils.ranks import on_main
from .client import RequestRejected, Server, Servers, ServerUnavailable, run, start
from .weight_sync import Probe, WeightSync

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")

FINISHED = ("stop", "length", "repetition")
MOST_AT_ONCE = 512  # requests of a rank that are under way; the others wait here
MOST_REPEATS = 8  # of one request: one that ends every server it meets must not go on


@dataclass
class PendingRequest:
    """A request, with the number of times it was repeated."""

    key: Any
    sampling: Sampling
    body: dict[str, Any]
    repeats: int = 0


class ServedVLLMEngine(Engine):
    """Generates on vLLM servers through OpenAI's protocol, with token ids in and out.

    Each rank sends its requests itself, always to the server with the fewest of them. A failed server is excluded
    until the next rollout, and its requests are repeated on other servers, with the same seeds. At the beginning of a
    rollout the main process writes the weights to a folder, and all servers load them.

    Args:
        trainer: the trainer's parts.
        urls: addresses of the servers.
        folder: folder for weights, which the servers see under the same name.
        patience: seconds to wait for a server if none answers.
        request_timeout: seconds a completion may take.
        options: see `Engine`.
    """

    takes_seeds = True
    streams = True

    def __init__(
        self,
        trainer: EngineParts,
        urls: Sequence[str],
        folder: str | Path,
        patience: float = 240.0,
        request_timeout: float = 600.0,
        options: dict[str, Any] | None = None,
    ):
        super().__init__(trainer.tokenizer, trainer.stop_token_ids, options)
        self.trainer, self.patience, self.request_timeout = trainer, patience, request_timeout
        self.accelerator = trainer.accelerator
        self.servers = Servers(urls, first=self.accelerator.process_index)
        self.weight_sync = WeightSync(trainer)
        facts = on_main(self.accelerator, lambda: self.weight_sync.check(self.servers.all, patience))
        self.weight_sync.takes_adapters, self.weight_sync.names = facts
        self.files = WeightFolder(folder, self.accelerator.is_main_process)
        on_main(self.accelerator, self._open_folder)
        self.sync_seconds = self.sync_difference = 0.0  # of log-probabilities after the last transfer
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._requests: set[Future[None]] = set()
        self._answers: queue.SimpleQueue[tuple[PendingRequest, Completion | Exception | None]] = queue.SimpleQueue()
        self._unanswered = 0

    @classmethod
    def of_trainer(
        cls,
        parts: EngineParts,
        *,
        servers: list[str],
        weights_folder: str | None = None,
        request_timeout: float = 600.0,
    ) -> ServedVLLMEngine:
        """Return the engine over servers that are running.

        Args:
            parts: parts of the trainer.
            servers: addresses, e.g. `["http://10.0.0.2:8000"]`. A server that fails is left out until the next
                rollout. If none is left, the run waits `vllm_server_timeout` seconds for one, then stops.
            weights_folder: folder with the same path on the training machine and the servers, for the weights of each
                rollout. It belongs to one run. `None`: `_vllm_weights` in `output_dir`.
            request_timeout: seconds a completion may take before its server counts as failed.
        """
        args, options = parts.args, dict(parts.args.generation_kwargs or {})
        if args.vllm_structured_outputs_regex is not None:
            options = {"structured_outputs": {"regex": args.vllm_structured_outputs_regex}, **options}
        # What begins with an underscore is not pushed to the Hub.
        folder = weights_folder or Path(args.output_dir, "_vllm_weights")
        return cls(parts, servers, folder, args.vllm_server_timeout, request_timeout, options)

    @classmethod
    def check(
        cls,
        args: Any,
        servers: list[str] = (),
        weights_folder: str | None = None,
        request_timeout: float = 600.0,
    ) -> None:
        are_addresses = isinstance(servers, (list, tuple)) and all(_ADDRESS.fullmatch(str(one)) for one in servers)
        different = {str(one).rstrip("/").lower() for one in servers if are_addresses}
        remedy = "pass a list of different addresses, e.g. ['http://10.0.0.2:8000']"
        require(0 < len(different) == len(servers), "servers", servers, remedy)
        for name, value in (("request_timeout", request_timeout), ("vllm_server_timeout", args.vllm_server_timeout)):
            require(value > 0, name, value, "set it above 0")

    # -- completions --------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        completions: dict[int, Completion] = {}
        with self.rollout():
            for row, (prompt, seed) in enumerate(zip(prompts, seeds or [None] * len(prompts), strict=True)):
                self.submit(row, prompt, sampling, seed)
            while len(completions) < len(prompts):
                completions.update(self.poll(self.request_timeout))
        return [completions[row] for row in range(len(prompts))]

    def submit(self, key: int, prompt: Sequence[int], sampling: Sampling, seed: int | None = None) -> None:
        self._unanswered += 1
        body = {"prompt": list(prompt), "seed": seed, **self.to_engine(sampling)}
        self._start(PendingRequest(key, sampling, body))

    def to_engine(self, sampling: Sampling) -> dict[str, Any]:
        """Return the fields of a completion request to vLLM."""
        fixed = {"logprobs": 0, "return_token_ids": True}
        return vllm_options(sampling, self.stop_token_ids) | fixed | self.options

    def poll(self, timeout: float) -> dict[int, Completion]:
        completions, stranded, deadline = {}, [], time.monotonic() + timeout
        while self._unanswered and not completions:
            try:
                answers = [self._answers.get(timeout=max(0.0, deadline - time.monotonic()))]
            except queue.Empty:
                break
            while not self._answers.empty():
                answers.append(self._answers.get())
            for asked, result in answers:
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    stranded.append(asked)
                else:
                    self._unanswered -= 1
                    completions[asked.key] = result
            if stranded:
                self._wait_for_one()
                while stranded:
                    self._start(stranded.pop())
        return completions

    def _start(self, asked: PendingRequest) -> None:
        request = start(self._ask(asked, self._answers))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _ask(self, asked: PendingRequest, answers: queue.SimpleQueue) -> None:
        """Put the completion, an error, or `None` if no server is left, among the answers."""
        try:
            async with self._slots:
                result = await self._complete(asked)
        except Exception as error:
            result = error
        answers.put((asked, result))

    async def _complete(self, asked: PendingRequest) -> Completion | None:
        """Repeat a request until a server has answered; return `None` if none is left."""
        while (server := self.servers.acquire()) is not None:
            try:
                return await self._ask_one(server, asked)
            except ServerUnavailable as lost:
                self.servers.exclude(server, str(lost))
                asked.repeats += 1
                if asked.repeats > MOST_REPEATS:
                    raise RuntimeError(
                        f"one request failed {asked.repeats} times, at the last server ({server.url}) by: {lost}. "
                        "See the logs of the servers"
                    ) from lost
            finally:
                server.in_flight -= 1
        return None

    async def _ask_one(self, server: Server, asked: PendingRequest) -> Completion:
        body = {"model": self.weight_sync.model_name(server), **asked.body}
        try:
            answer = await server.complete(body, self.request_timeout)
        except RequestRejected as error:
            if error.status == 404:  # of an adapter: it was started again, and knows the base alone
                raise ServerUnavailable(f"it has no model {body['model']!r} any more: {error}") from error
            raise RuntimeError(f"{server.url} rejects a request: {error}") from error
        return self._read(asked, answer)

    def _read(self, asked: PendingRequest, answer: Any) -> Completion:
        """Parse the response; raise `ServerUnavailable` if it does not match the request."""
        try:
            (choice,) = answer["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            longest, vocabulary = asked.body["max_tokens"], self.weight_sync.vocabulary
            faults = {  # what the model cannot have sampled must not be trained on
                f"finish_reason is {choice['finish_reason']!r}": choice["finish_reason"] not in FINISHED,
                "it read a different prompt than was sent": choice["prompt_token_ids"] != asked.body["prompt"],
                f"its completion has {len(ids)} tokens": not 1 <= len(ids) == len(logprobs) <= longest,
                "its completion has tokens of another vocabulary": not all(0 <= token < vocabulary for token in ids),
                "its log-probabilities are not finite": not all(map(math.isfinite, logprobs)),
            }
            if fault := next((text for text, found in faults.items() if found), None):
                raise ServerUnavailable(fault)
            completion = self._completion(asked.sampling, ids, logprobs)
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerUnavailable(f"its response is not vLLM's ({type(error).__name__}: {error})") from error
        completion.cached_tokens, completion.repeats = details.get("cached_tokens"), asked.repeats
        return completion

    def metrics(self) -> dict[str, float]:
        return {
            "time/weights": self.sync_seconds,
            "rollout/servers_left_out": len(self.servers.all) - len(self.servers.available),
            "rollout/server_logp_difference": self.sync_difference,
        }

    # -- rollouts --------------------------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._sync()
        try:
            yield
        finally:
            self._abandon()
        if self.accelerator.is_main_process:
            self.weight_sync.check_unchanged(self.servers.available)

    def close(self) -> None:
        self._abandon()
        if self.accelerator.is_main_process:
            self.files.keep_only(None)

    def _abandon(self) -> None:
        """Close all connections, so that the servers stop computing pending requests."""
        run(self._cancel_all())
        self._answers, self._unanswered = queue.SimpleQueue(), 0
        for server in self.servers.all:
            run(server.close_idle())

    async def _cancel_all(self) -> None:
        """Cancel all requests at once, in their loop, so that a waiting one is not sent in the place of another."""
        for request in list(self._requests):
            request.cancel()

    def _open_folder(self) -> None:
        try:
            self.files.open()
        except OSError as error:
            raise G2POError(
                f"weights_folder is {str(self.files.path)!r}, which cannot be written ({error}): set it to a "
                "folder that this process and the servers reach by the same name"
            ) from error

    def _sync(self) -> None:
        """Give the current policy to all servers that answer, including ones that were excluded."""
        started, trainer, weight_sync = time.perf_counter(), self.trainer, self.weight_sync
        weight_sync.probe = Probe.from_ids(trainer, weight_sync.probe_ids)
        model, device = trainer.model(), self.accelerator.device
        adapter, error = None, None
        if weight_sync.takes_adapters:
            weights = adapter_parameters(model, trainer.gather, device).items()
            adapter = model.peft_config[model.active_adapter]
        else:
            weights = whole_parameters(model, trainer.gather, device)
        self.accelerator.wait_for_everyone()  # no rank generates with the old weights any more
        try:
            version = self.files.save(weights, adapter)
        except Exception as failure:
            error = failure

        def hand_over() -> tuple[str, list[str | None], float]:
            if error is not None:
                raise RuntimeError(
                    f"weights_folder: the weights cannot be written to {self.files.path} ({error})"
                ) from error
            weight_sync.version = version
            lost, difference = weight_sync.load_everywhere(self.servers.all, self.patience)
            self.files.keep_only(version)
            return str(version), lost, difference

        path, lost, difference = on_main(self.accelerator, hand_over)
        weight_sync.version = Path(path)
        for server, reason in zip(self.servers.all, lost):
            server.lost = reason
            server.version = None if weight_sync.takes_adapters else weight_sync.version.name
        self.sync_seconds, self.sync_difference = time.perf_counter() - started, difference

    def _wait_for_one(self) -> None:
        """Wait until one of the servers answers and has the weights. Raises `RuntimeError` when it takes too long."""
        reasons, deadline = self.servers.reasons(), time.monotonic() + self.patience
        logger.warning("no vLLM server is left (%s): waiting %g s for one", reasons, self.patience)
        while not self.servers.available:
            for server in self.servers.all:
                try:
                    run(self.weight_sync.load(server))
                except ServerUnavailable:
                    continue
                server.lost = None
                logger.warning("%s answers again", server.url)
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no server answers, for {self.patience:g} s (vllm_server_timeout): {reasons}. Start "
                    "them again, and resume the run from its last checkpoint"
                )
            time.sleep(min(1.0, self.patience / 10))
