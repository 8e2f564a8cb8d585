"""G2PO's advantages in prime-rl (0.8.0 at `559b447`).

`score_group(episodes)` runs on the orchestrator when a group is complete. A trace is a graph of messages. A node
whose `mask` has ones is a completion, and its `parent` the message it answers. `assign_advantages(trace, values)`
takes one float for each sampled token.

To use it: An advantage function that its configuration names by `import_path` returns one advantage per rollout. For
one per step, add a config class to the union in `prime_rl.configs.algorithm`, and `"g2po": G2POAlgorithm` to
`ALGORITHM_CLASSES`. Tokens of advantage 0 are removed from the batch unless `orchestrator.train.filter_zero_advantages
= false`.
"""

import numpy as np
from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_advantages
from verifiers.v1.types import content_text

from g2po_trl.credit import step_advantages


class G2POAlgorithm(Algorithm):
    async def score_group(self, episodes):
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        completions = [[node for node in trace.nodes if any(node.mask)] for trace in traces]
        keys = [
            [content_text(trace.nodes[node.parent].message.content) for node in nodes]
            for trace, nodes in zip(traces, completions)
        ]
        agents = [trace.agent.name for trace in traces]  # one role is compared with itself
        rewards = [trace.reward for trace in traces]
        for trace, nodes, steps in zip(traces, completions, step_advantages(keys, rewards, agents)):
            assign_advantages(trace, np.repeat(steps, [sum(node.mask) for node in nodes]).tolist())
