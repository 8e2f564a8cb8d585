"""One iteration on a coding agent of others, unchanged, with a random model of long context.

    python -m benchmarks.speed.agent_iteration claude --one-path --bin node_modules/.bin --tokenizer tokenizer.json \\
        --output benchmarks/results/agents

Four episodes of a task, of at most three calls; the model has two layers of 64. It fixes nothing: rewards are by
chance, so that there is a gradient. Writes the metrics of the iteration, how many parameters have moved, and the peak
memory of the process.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import torch
import trl
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from benchmarks.common import facts, write_results
from benchmarks.speed.coding_agents import FILES, ONE_PATH, OPTIONS, command
from g2po_trl import G2POConfig, G2POTrainer, tasks_dataset

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536}


def by_chance(folder: Path, returncode: int) -> int:
    """Return a reward by the random name of the episode's folder; Codex fails after a response that is cut off."""
    return sum(str(folder).encode()) % 7


def train(agent, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict:
    """Return what one iteration reports, and how many parameters it moves."""
    set_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SIZES, **ends))
    limits = {"max_turns": 3, "max_completion_length": 24, "max_prompt_length": 40_000, "num_environment_workers": 2}
    batch = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    plain = {"use_cpu": True, "bf16": False, "max_steps": 1, "learning_rate": 1e-3, "report_to": []}
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    args = G2POConfig(str(folder / "run"), **limits, **batch, **plain)
    trainer = G2POTrainer(str(folder / "model"), args, tasks_dataset([{"task": "Fix the test"}]), agent=agent)
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    moved = sum(not torch.equal(before[name], one) for name, one in trainer.model.named_parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    metrics = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    return {"moved": moved, "parameters": len(before), "peak MiB": round(peak), "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=OPTIONS)
    parser.add_argument("--one-path", action="store_true")
    parser.add_argument("--bin", type=Path, nargs="+", required=True, help="folders of the programs")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.tokenizer), eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name) / "workspace"
        workspace.mkdir()
        for file, text in FILES.items():
            (workspace / file).write_text(text)
        prefix, folders = ONE_PATH if args.one_path else (), [folder.resolve() for folder in args.bin]
        agent = command(args.client, folders, workspace, 120, prefix, verify=by_chance)
        found = train(agent, tokenizer, Path(name))
    shown = ("update/step_samples", "rollout/mean_prompt_tokens", "update/forwarded_tokens", "train_loss", "grad_norm")
    print(args.client, {name: value for name, value in found.items() if name != "metrics"})
    print({name: found["metrics"][name] for name in (*shown, "time/update")})
    file = f"iteration_{args.client}{'_one_path' if args.one_path else ''}.json"
    write_results(args.output, {**facts("torch", "transformers", "trl"), **found}, file)


if __name__ == "__main__":
    main()
