"""Seconds of an iteration by phase, from what there is to do and what a unit of it costs: formulas alone.

`cost_model.py` measures unit costs and prints tables. Every phase is linear in the unit costs, so these can be fitted.

Left out: optimizer step, checkpoints, weights on their way to vLLM, logging; the rank whose episodes happen to be
longest. Communication is taken not to overlap with computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.speed.phases import SHAPES


@dataclass(frozen=True)
class Work:
    """One iteration.

    Args:
        episodes: of all ranks. group: of one task; they share a worker. turns: of a rank's longest episode.
        active: share of (episode, turn) places with a live episode, `rollout/active_fraction`.
        prompt_tokens, reply_tokens: of a step sample's prompt and completion; named as in the stored results.
        longest_reply: of a turn, over a rank's live episodes.
        decoded_tokens: that a step's completion costs; `None`: its own. `generate` goes on to the longest completion.
        forwarded: positions in the update by tokens of its step samples: what is shared passes through once.
        passes: of log-probabilities: under the old policy, under the reference. slices: optimizer steps.
        workers: environment processes of a rank.
    """

    episodes: int
    ranks: int = 1
    group: int = 8
    turns: float = 50
    active: float = 0.66
    prompt_tokens: float = 700
    reply_tokens: float = 150
    longest_reply: float = 512
    decoded_tokens: float | None = None
    forwarded: float = 0.65
    passes: int = 2
    slices: int = 4
    micro_batch_tokens: int = 32768
    workers: int = 12

    @property
    def steps(self) -> float:
        """Step samples of all ranks."""
        return self.episodes * self.turns * self.active

    @property
    def own_steps(self) -> float:
        return self.steps / self.ranks

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.reply_tokens

    @property
    def own_forwarded(self) -> float:
        """Positions a rank passes through the model once."""
        return self.own_steps * self.sample_tokens * self.forwarded

    @property
    def micro_batches(self) -> int:
        """Of a rank, over all slices."""
        return self.slices * max(1, math.ceil(self.own_forwarded / self.slices / self.micro_batch_tokens))

    @property
    def busiest_worker(self) -> int:
        """Episodes of a rank's busiest worker: a group stays together."""
        own = math.ceil(self.episodes / self.ranks)
        return min(own, math.ceil(math.ceil(own / self.group) / self.workers) * self.group)


@dataclass(frozen=True)
class UnitCosts:
    """Seconds, unless said otherwise. `own` is what a rank does for itself, `all` for all ranks' step samples.

    Args:
        prompt_token, generated_token, decode_pass: of generation; the last one whatever the batch.
        kv_bytes, kv_memory: bytes of a token's keys and values, and of a rank's room for them; 0: no limit.
        reset, environment_step: of one episode in a worker.
        played_turn, built_prompt, built_token: turns, own steps, tokens of their prompts: encoding, reading
            completions.
        graph, graph_step: once, and all.
        pickled_step: own. unpickled_step, unpickled_byte: all. step_bytes: besides 4 for a token.
        planned_step, planned_token: all. collated_step, collated_token: own.
        scored_token, updated_token: of a position; forward, and forward and backward.
        gradient_bytes, weight_bytes: exchanged once an optimizer step; at each pass of a micro-batch, if sharded.
        link: of a byte between ranks.
    """

    prompt_token: float = 0.0
    generated_token: float = 0.0
    decode_pass: float = 0.0
    kv_bytes: float = 0.0
    kv_memory: float = 0.0
    reset: float = 0.0
    environment_step: float = 0.0
    played_turn: float = 0.0
    built_prompt: float = 0.0
    built_token: float = 0.0
    graph: float = 0.0
    graph_step: float = 0.0
    pickled_step: float = 0.0
    unpickled_step: float = 0.0
    unpickled_byte: float = 0.0
    step_bytes: float = 0.0
    planned_step: float = 0.0
    planned_token: float = 0.0
    collated_step: float = 0.0
    collated_token: float = 0.0
    scored_token: float = 0.0
    updated_token: float = 0.0
    gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    link: float = 0.0


def kv_rounds(w: Work, c: UnitCosts) -> float:
    """How often the cache is filled for one turn of all live episodes."""
    needed = w.own_steps / w.turns * w.sample_tokens * c.kv_bytes
    return max(1.0, needed / c.kv_memory) if c.kv_memory else 1.0


def generation(w: Work, c: UnitCosts) -> float:
    """As if all episodes were as long as the mean."""
    decoded = w.reply_tokens if w.decoded_tokens is None else w.decoded_tokens
    passes = w.turns * w.active * w.longest_reply * kv_rounds(w, c)
    return w.own_steps * (w.prompt_tokens * c.prompt_token + decoded * c.generated_token) + passes * c.decode_pass


def waiting(w: Work, c: UnitCosts) -> float:
    """Decode passes of the turns that only the longest episodes play."""
    return w.turns * (1 - w.active) * w.longest_reply * kv_rounds(w, c) * c.decode_pass


def environment(w: Work, c: UnitCosts) -> float:
    return w.busiest_worker * (c.reset + w.turns * w.active * c.environment_step)


def prompts(w: Work, c: UnitCosts) -> float:
    return w.turns * c.played_turn + w.own_steps * (c.built_prompt + w.prompt_tokens * c.built_token)


def advantages(w: Work, c: UnitCosts) -> float:
    return c.graph + w.steps * c.graph_step


def gathered_bytes(w: Work, c: UnitCosts) -> float:
    """Of all ranks' step samples: what each rank receives and holds. One rank gathers nothing."""
    return w.steps * (4 * w.sample_tokens + c.step_bytes) if w.ranks > 1 else 0.0


def gather(w: Work, c: UnitCosts) -> float:
    if w.ranks == 1:
        return 0.0
    moved = gathered_bytes(w, c) * ((w.ranks - 1) / w.ranks * c.link + c.unpickled_byte)
    return w.own_steps * c.pickled_step + w.steps * c.unpickled_step + moved


def batch(w: Work, c: UnitCosts) -> float:
    """Every rank plans the micro-batches of all step samples, and makes its own."""
    planning = w.steps * (c.planned_step + w.sample_tokens * c.planned_token)
    return planning + w.own_steps * (c.collated_step + w.sample_tokens * c.collated_token)


def logps(w: Work, c: UnitCosts) -> float:
    return w.passes * w.own_forwarded * c.scored_token


def update(w: Work, c: UnitCosts) -> float:
    return w.own_forwarded * c.updated_token


def exchange(w: Work, c: UnitCosts) -> float:
    """Gradients of each optimizer step (a ring: each byte out and in); sharded weights at every pass."""
    weights = (w.passes + 2) * w.micro_batches * c.weight_bytes
    return (w.ranks - 1) / w.ranks * (2 * w.slices * c.gradient_bytes + weights) * c.link


PHASES: tuple[Callable[[Work, UnitCosts], float], ...] = (
    generation,
    waiting,
    environment,
    prompts,
    advantages,
    gather,
    batch,
    logps,
    update,
    exchange,
)


def iteration(w: Work, c: UnitCosts) -> dict[str, float]:
    """Seconds by phase; the phases follow one another."""
    return {phase.__name__: phase(w, c) for phase in PHASES}


@dataclass(frozen=True)
class Gpu:
    """Assumptions about the machines: of an H100 of 80 GB, eight in a box. Bytes, seconds, and FLOPs a second.

    Args:
        flops, utilisation: bfloat16, dense; the share of it that a pass over full micro-batches reaches.
        bandwidth, read_share: of memory; the share of it that decoding reaches. pass_overhead: of a decode pass.
        link, network: between GPUs of a box and of several, of each. gpus: of a box.
        cores, host_memory: of a box, by its GPUs. worker_memory: of an environment worker.
        work_space: activations of the update.
    """

    flops: float = 989e12
    utilisation: float = 0.4
    bandwidth: float = 3.35e12
    read_share: float = 0.6
    pass_overhead: float = 4e-3
    memory: float = 80e9
    work_space: float = 15e9
    link: float = 300e9
    network: float = 40e9
    gpus: int = 8
    cores: int = 12
    host_memory: float = 128e9
    worker_memory: float = 135e6


VLLM_SHARE = {"1.5b": 0.3, "7b": 0.4}  # of memory, as in the recipes; there, the 7B model is sharded


def num_parameters(shape: str) -> tuple[int, int]:
    """Of the body and of the LM head."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    attention = 2 * hidden**2 + 2 * hidden * (hidden // heads * kv_heads)
    return layers * (attention + 3 * hidden * intermediate), hidden * vocabulary


def trainer_bytes(shape: str, ranks: int) -> float:
    """Of a rank: weights, reference, gradients (4 bytes each) and Adam (8); the 7B model's are spread over ranks."""
    body, head = num_parameters(shape)
    return 20 * (body + head * (2 if shape == "7b" else 1)) / (ranks if shape == "7b" else 1)


def gpu_costs(shape: str, gpu: Gpu, w: Work, host: UnitCosts) -> UnitCosts:
    """Unit costs on GPUs: what the host does is as measured, the rest by FLOPs and bytes."""
    hidden, intermediate, layers, heads, kv_heads, _ = SHAPES[shape]
    body, head = num_parameters(shape)
    stored = body + head * (2 if shape == "7b" else 1)
    compute, read = gpu.flops * gpu.utilisation, gpu.bandwidth * gpu.read_share
    scored = w.reply_tokens / (w.sample_tokens * w.forwarded)
    forward = (2 * body + 4 * hidden * layers * w.sample_tokens + 2 * head * scored) / compute
    kv_bytes = 2 * 2 * layers * kv_heads * (hidden // heads)
    return replace(
        host,
        prompt_token=2 * body / compute,
        generated_token=2 * (body + head) / compute + (w.prompt_tokens + w.reply_tokens / 2) * kv_bytes / read,
        decode_pass=2 * (body + head) / read + gpu.pass_overhead,
        kv_bytes=kv_bytes,
        kv_memory=gpu.memory * VLLM_SHARE[shape] - 2 * stored - 2e9,
        scored_token=forward,
        updated_token=4 * forward,  # backward is two; gradient checkpointing repeats the forward pass
        gradient_bytes=4 * stored / (2 if shape == "7b" else 1),  # reduced to the rank that holds them, in one way
        weight_bytes=2 * stored if shape == "7b" else 0.0,
        link=1 / (gpu.link if w.ranks <= gpu.gpus else gpu.network),
    )


def longest_environment_step(w: Work, c: UnitCosts) -> float:
    """Seconds of an environment's step at which environments take as long as the model's generation."""
    return (generation(w, c) + waiting(w, c)) / (w.busiest_worker * w.turns * w.active)


def limits(shape: str, gpu: Gpu, w: Work, c: UnitCosts) -> list[str]:
    """What does not fit or holds the rest up, the worst first."""
    seconds = iteration(w, c)
    total = sum(seconds.values())
    share = {name: value / total for name, value in seconds.items()}
    host = share["prompts"] + share["advantages"] + share["gather"] + share["batch"]
    trainer = trainer_bytes(shape, w.ranks) + gpu.work_space
    room = gpu.memory * (1 - VLLM_SHARE[shape])
    # Of all ranks' token ids: as gathered, joined, as sort keys, and what travelled. Of a rank's own, to the end of
    # the iteration: ids and masks of padded rows, three numbers a position of trees.
    held = 12 * w.steps * w.sample_tokens + gathered_bytes(w, c) + w.workers * gpu.worker_memory
    held += 16 * w.own_steps * w.sample_tokens + 24 * w.own_forwarded
    found = [
        (trainer / room, f"GPU memory {trainer / 1e9:.0f} of {room / 1e9:.0f} GB"),
        (kv_rounds(w, c), f"KV cache in {kv_rounds(w, c):.1f} rounds"),
        (held / gpu.host_memory, f"host memory {held / 1e9:.0f} of {gpu.host_memory / 1e9:.0f} GB a rank"),
        (share["environment"] / 0.25, f"environments {share['environment']:.0%}"),
        (host / 0.1, f"host work {host:.0%}"),
        (share["waiting"] / 0.25, f"longest episode {share['waiting']:.0%}"),
        (share["exchange"] / 0.1, f"exchange {share['exchange']:.0%}"),
    ]
    return [text for excess, text in sorted(found, reverse=True) if excess > 1]
