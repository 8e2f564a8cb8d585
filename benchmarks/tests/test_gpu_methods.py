"""The comparison of methods on a GPU, by numbers made up."""

from benchmarks.gpu import methods


def content(rates, panels):
    """One run of each arm and seed: training success by iteration, held-out success at 1.0 and 0.4 at the end."""
    found = {"runs": {}, "parts": {}}
    for (arm, seed), success in rates.items():
        lines = [{"step": step, "success_rate": rate} for step, rate in enumerate(success, 1)]
        for temperature, at in zip((1.0, 0.4), panels[arm]):
            lines += [{"step": step, "temperature": temperature, "panel": at * step / len(success)} for step in (1, 3)]
        found["runs"][f"{arm}-{seed}"] = {"arm": arm, "seed": seed}
        found["parts"][f"{arm}-{seed}"] = {"findings": lines}
    return found


def test_only_iterations_that_all_have_are_compared():
    rates = {("g2po", 1): [0.5, 0.7, 0.0], ("grpo", 1): [0.2, 0.4], ("g2po", 2): [0.6, 0.7], ("grpo", 2): [0.4, 0.3]}
    made = content(rates, {"g2po": (0.5, 0.6), "grpo": (0.25, 0.3)})
    assert methods.iterations(made) == 2
    found = methods.numbers(made)["training"]
    assert {key: round(value, 6) for key, value in found.items()} == {
        ("g2po", 1): 60.0,
        ("grpo", 1): 30.0,
        ("g2po", 2): 65.0,
        ("grpo", 2): 35.0,
    }
    assert round(methods.comparison(made, "training").differences["grpo"].mean, 6) == -30


def test_the_last_panel_counts():
    rates = {(arm, seed): [0.5, 0.5, 0.5] for arm in ("g2po", "grpo") for seed in (1, 2)}
    found = methods.numbers(content(rates, {"g2po": (0.5, 0.6), "grpo": (0.25, 0.3)}))
    assert found["held-out at 1.0"]["g2po", 1] == 50 and round(found["held-out at 0.4"]["grpo", 2], 6) == 30
