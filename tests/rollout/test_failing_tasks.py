"""A task that cannot be played is set aside and named; one that fails now and then is not."""

from datasets import Dataset
from letter_environment import LetterEnvironment

from g2po_trl import TrajectoryRecord
from g2po_trl.rollout.failing_tasks import TaskErrors


def rollout(**outcomes):
    return [TrajectoryRecord(task, [], [], 0.0, outcome) for task, all_of in outcomes.items() for outcome in all_of]


def test_only_rollouts_of_nothing_but_errors_in_a_row_count():
    errors = TaskErrors(2)
    errors.count(rollout(a=["error", "error"], b=["error", "failure"], c=["success"]))
    assert errors.excluded == []
    errors.count(rollout(a=["success", "error"], b=["error", "error"]))
    errors.count(rollout(a=["error"], b=["error"]))
    assert errors.excluded == ["b"] and "b" in errors and "a" not in errors
    errors.count(rollout(a=["error"], b=["error"]))
    assert errors.excluded == ["a", "b"]


def test_lost_episodes_say_nothing_about_their_task():
    errors = TaskErrors(2)
    errors.count(rollout(a=["error", "error"], b=["error"]))
    errors.count(rollout(a=["lost", "lost"], b=["lost"], c=["lost"]))
    errors.count(rollout(a=["error"] + ["lost"] * 7))  # one ended in an error, and took the others along
    assert errors.in_a_row == {"a": 1, "b": 1}
    errors.count(rollout(a=["error", "error"], b=["lost", "failure"]))
    assert errors.excluded == ["a"] and "b" not in errors.in_a_row


class OneBadTask(LetterEnvironment):
    def reset(self, task_id, seed):
        if seed == 1:
            raise RuntimeError("this game is broken")
        return super().reset(seed)


def test_a_broken_task_is_set_aside(make_trainer):
    tasks = Dataset.from_list([{"task_id": f"game {seed}", "seed": seed} for seed in range(2)])
    options = {"max_steps": 4, "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    options |= {"environment": OneBadTask, "dataset": tasks}
    trainer = make_trainer(**options)
    trainer.train()
    logged = [entry["episode/tasks_set_aside"] for entry in trainer.state.log_history if "episode/reward" in entry]
    assert logged == [0, 1, 1, 1]
    again = make_trainer(**options)
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-2")
    assert again.task_errors.excluded == ["game 1"]
