"""The code of docs/elsewhere.md and frameworks/ runs: TRL's in TRL, verl's between stand-ins.

The stand-ins have the names, arguments and shapes read in the frameworks' source (docs/elsewhere.md has the commits).
They show that our lines put each number on its token, not that the framework still calls them.
"""

import asyncio
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import programs
import pytest
import torch

from g2po_trl import StateGraph, Step, Trajectory, credit, g2po

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "elsewhere.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
CODE = {block.splitlines()[0].removeprefix("# "): block for block in BLOCKS if block.startswith("# ")}
CODE |= {path.name: path.read_text(encoding="utf-8") for path in sorted((DOCS / "frameworks").glob("*.py"))}

# Of each episode: its group, the states its steps were taken in, and what it paid.
EPISODES = [
    ("x", ["hall", "kitchen"], 10.0),
    ("x", ["hall", "cellar", "hall"], 0.0),
    ("y", ["gate"], 0.0),
    ("y", ["gate", "gate"], 3.0),
]


def by_hand(episodes=EPISODES, gamma=0.95):
    """The advantages of each episode's steps, by the graph itself; groups follow each other in `episodes`."""
    groups = {}
    for group, keys, reward in episodes:
        groups.setdefault(group, []).append(Trajectory(group, [Step(key, "") for key in keys], reward, "failure"))
    graph = StateGraph.from_groups(list(groups.values()), gamma=gamma)
    return np.split(g2po(graph), np.cumsum(graph.lengths)[:-1])


def row(numbers):
    """One row of tokens: of each step, its completion's mask and number, then two tokens of the next message."""
    mask, values = [], []
    for place, number in enumerate(numbers):
        length = 1 + place % 2
        mask += [1] * length + [0, 0]
        values += [number] * length + [0.0, 0.0]
    return mask[:-2], values[:-2]


@pytest.fixture
def load(monkeypatch):
    """Run a block of the page as a module, with stand-ins for the modules it imports; returns its names."""

    def load(name, stubs=None, **names):
        for path, contents in (stubs or {}).items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                module = ".".join(parts[:end])
                if module not in sys.modules or end == len(parts):
                    monkeypatch.setitem(sys.modules, module, ModuleType(module))
            for key, value in contents.items():
                setattr(sys.modules[path], key, value)
        namespace = {"__name__": name.removesuffix(".py"), **names}
        exec(compile(CODE[name], name, "exec"), namespace)
        return SimpleNamespace(**namespace)

    return load


def test_the_first_lines_print_what_they_say(capsys):
    exec(BLOCKS[0], {})
    assert capsys.readouterr().out.split() == re.search(r"# (\[2\.6.*\])", BLOCKS[0])[1].split()


def test_every_block_is_run_here_or_imports_what_there_is():
    tested = set(re.findall(r'(?:load\(|CODE\[)\s*"(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    tested |= {"async_grpo.py"}  # tests/credit/test_async_grpo.py
    assert set(CODE) - tested == {"verl_agent_graph.py", "prime_graph.py", "skyrl_graph.py", "swift_graph.py"}
    for name in set(CODE) - tested:
        compile(CODE[name], name, "exec")
        for imported in re.findall(r"from g2po_trl\.credit import (.+)", CODE[name]):
            assert all(hasattr(credit, function) for function in imported.split(", "))


def test_logged_runs_are_credited_by_the_key_of_the_page(load, tmp_path, monkeypatch, capsys):
    """Three runs of a browser; equal pages in tabs of different numbers."""
    monkeypatch.chdir(tmp_path)

    def messages(*pages):
        told = [{"role": "user", "content": f"{page}\nsome text"} for page in pages]
        return [
            message
            for one in told
            for message in (one, {"role": "assistant", "content": f"leave {one['content'][:4]}"})
        ]

    runs = [(3, ["Home, tab 1", "Shop, tab 4"]), (0, ["Home, tab 2", "Shop, tab 5"]), (0, ["Home, tab 1"])]
    with open("runs.jsonl", "w") as file:
        for reward, pages in runs:
            print(json.dumps({"task_id": "buy", "reward": reward, "messages": messages(*pages)}), file=file)
    page = load("keys.py").page
    assert [page(messages(*pages)[:-1]) for _, pages in runs] == ["Shop, ", "Shop, ", "Home, "]
    assert page([{"role": "user", "content": "Home"}]) == "Home"
    load("logged_runs.py")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[:3] for words in printed] == [
        ["buy", "leave", name] for name in ("Home", "Shop", "Home", "Shop", "Home")
    ]
    # GiGPO: A_EP by rewards 3, 0, 0, and in "Home, tab 1", which two runs saw, by returns 2.7075 and 0.
    episode = [2 / 3**0.5, 2 / 3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]
    np.testing.assert_allclose(
        [float(words[3]) for words in printed], np.add(episode, [2**-0.5, 0, 0, 0, -(2**-0.5)]), rtol=1e-5
    )


class Rooms:
    """Two or three turns; where a completion leads and what it pays depend on its letters: any model is paid."""

    def reset(self, prompt):
        self.turns = 0
        return f"hall {prompt}"

    def step(self, action):
        code = sum(action.encode())
        self.turns += 1
        return ("kitchen", "cellar")[code % 2], float(code % 3), self.turns == 2 + code % 2


BEFORE = """
import json, os, sys
from pathlib import Path
from datasets import Dataset
from trl import GRPOConfig

model, output, rows, of_a_group = sys.argv[1:]
kept, rank = [], os.environ.get("RANK", "0")


class Watched(GraphGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        masks = (batch["completion_mask"] * batch["tool_mask"]).tolist()
        keys = [(row["prompt"], row["state_keys"], row["reward"]) for row in inputs]
        kept.append(list(zip(keys, masks, batch["advantages"].tolist())))
        return batch

    def _compute_loss(self, model, inputs):
        assert inputs["advantages"].shape == inputs["completion_ids"].shape
        return super()._compute_loss(model, inputs)


MyEnvironment, GraphGRPOTrainer = Rooms, Watched
args = GRPOConfig(
    output, per_device_train_batch_size=int(rows), num_generations=int(of_a_group), max_steps=2, learning_rate=1e-2,
    bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
    seed=3,
)
torch.manual_seed(int(rank))
prompts = Dataset.from_list([{"prompt": str(seed)} for seed in range(4)])
"""
AFTER = """
fresh = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(model)
assert any(not torch.equal(a, b) for a, b in zip(fresh.parameters(), trainer.model.parameters()))
Path(output, f"rank{rank}.json").write_text(json.dumps(kept))
"""


@pytest.mark.parametrize(("ranks", "rows", "of_a_group"), [(1, 8, 4), pytest.param(2, 4, 8, marks=pytest.mark.slow)])
def test_trl_trains_on_the_advantages_of_the_graph(tiny_model_dir, tmp_path, ranks, rows, of_a_group):
    """Also of a group that is spread over two ranks."""
    hook, rollout, training = CODE["trl_graph.py"], CODE["trl_rollout.py"], CODE["trl_train.py"]
    code = "\n\n".join([hook, rollout, inspect.getsource(Rooms), BEFORE, training, AFTER])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    run = programs.run_ranks(ranks, "-c", code, tiny_model_dir, tmp_path, rows, of_a_group, env=env, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    of_ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert len(of_ranks[0]) == 2
    different = 0
    for parts in zip(*of_ranks):
        batch = [row for part in parts for row in part]
        episodes = [(f"{i // of_a_group} {of[0]}", *of[1:]) for i, (of, _, _) in enumerate(batch)]
        assert len(batch) == 8 and len({group for group, _, _ in episodes}) == 8 // of_a_group
        for steps, (of, mask, got) in zip(by_hand(episodes), batch):
            runs = np.cumsum(np.diff(mask, prepend=0) == 1) - 1
            assert len(of[1]) == runs[-1] + 1
            np.testing.assert_allclose(got, np.where(mask, steps[runs], 0.0), rtol=1e-6, atol=1e-6)
            different += len({round(number, 4) for number in steps.tolist()}) > 1
    assert different > 0, "no episode has steps of different worth: the test shows nothing"


def test_verl_puts_each_step_on_its_tokens(load):
    stored = {}

    class Column(list):
        tolist = unbind = lambda self: list(self)

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id == "train"
        return {field: Column(stored[key][field] for key in keys) for field in select_fields}

    def kv_batch_put(keys, partition_id, fields):
        for number, key in enumerate(keys):
            stored[key].update({name: tensor.unbind()[number] for name, tensor in fields.items()})

    class ToolAgentLoop:
        async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False):
            agent_data.messages.append({"role": "assistant", "content": "go"})
            return "processing_tools"

    class PPOTrainerSync:
        def _compute_advantage(self, batch, metrics):
            metrics["asked"] = True
            return batch

    registered = {}

    def register(name):
        return lambda cls: registered.setdefault(name, cls)

    class TensorDict(dict):
        def __init__(self, fields, batch_size):
            super().__init__(fields)
            assert all(len(tensor.unbind()) == batch_size for tensor in fields.values())

    load(
        "verl_graph.py",
        {
            "transfer_queue": {"kv_batch_get": kv_batch_get, "kv_batch_put": kv_batch_put},
            "tensordict": {"TensorDict": TensorDict},
            "verl.experimental.agent_loop.agent_loop": {"register": register},
            "verl.experimental.agent_loop.tool_agent_loop": {"ToolAgentLoop": ToolAgentLoop},
            "verl.trainer.ppo.v1": {"register_trainer": register},
            "verl.trainer.ppo.v1.trainer_sync": {"PPOTrainerSync": PPOTrainerSync},
        },
    )
    loop = registered["graph_agent"]()
    for number, ((group, keys, reward), steps) in enumerate(zip(EPISODES, by_hand())):
        data = SimpleNamespace(messages=[{"role": "system", "content": "play"}], extra_fields={})
        for key in keys:
            data.messages.append({"role": "tool", "content": key})
            assert asyncio.run(loop._handle_generating_state(data, {})) == "processing_tools"
        mask, values = row(steps)
        scores = torch.zeros(len(mask))
        scores[-1] = reward
        stored[f"{group}_{number}_0"] = {
            "uid": group, "loss_mask": torch.tensor(mask), "rm_scores": scores, "extra_fields": data.extra_fields,
            "expected": values,
        }  # fmt: skip
    order = sorted(stored, reverse=True)
    stored["pad_0_0"] = {"uid": "pad", "loss_mask": torch.tensor([0]), "rm_scores": torch.tensor([0.0])}
    tags = [{}] * len(order) + [{"is_padding": True}]
    batch = SimpleNamespace(keys=[*order, "pad_0_0"], tags=tags, partition_id="train")
    metrics = {}
    assert registered["sync_graph"]()._compute_advantage(batch, metrics) is batch and metrics
    for key in order:
        torch.testing.assert_close(stored[key]["advantages"], torch.tensor(stored[key]["expected"]).float())
    assert "advantages" not in stored["pad_0_0"]
