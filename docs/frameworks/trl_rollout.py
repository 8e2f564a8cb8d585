"""A `rollout_func` for TRL's `GRPOTrainer`, with `transformers` on one device."""

import torch


def rollout_func(make_environment, max_turns, max_tokens):
    """Return TRL's `rollout_func` for an environment with `reset(prompt) -> text` and `step(action) -> (text, reward,
    done)`. It plays an episode for each prompt, each in one row.
    """

    def play(prompts, trainer):
        columns = {name: [] for name in ("prompt_ids", "completion_ids", "env_mask", "state_keys", "reward")}
        tokenizer, model = trainer.processing_class, trainer.model
        for prompt in prompts:
            environment = make_environment()
            observation, ids, mask, keys, total, done = environment.reset(prompt), [], [], [], 0.0, False
            prompt_ids = tokenizer(f"{prompt}\n{observation}\n")["input_ids"]
            while not done and len(keys) < max_turns:
                if keys:
                    new = tokenizer(f"\n{observation}\n")["input_ids"]
                    ids, mask = ids + new, mask + [0] * len(new)
                context = torch.tensor([prompt_ids + ids], device=model.device)
                with torch.no_grad():
                    tokens = model.generate(context, do_sample=True, max_new_tokens=max_tokens)[0]
                completion = tokens[context.shape[1] :].tolist()
                ids, mask, keys = ids + completion, mask + [1] * len(completion), [*keys, observation]
                observation, reward, done = environment.step(tokenizer.decode(completion, skip_special_tokens=True))
                total += reward
            for name, value in zip(columns, (prompt_ids, ids, mask, keys, total)):
                columns[name].append(value)
        return {**columns, "logprobs": None}

    return play
