"""What every results file begins with, and arms that are run in turns."""

import re
import sys

from benchmarks import common


def test_command_has_no_folders_of_the_machine(monkeypatch, tmp_path):
    inside = str(common.ROOT / "benchmarks/results/phases")
    monkeypatch.setattr(sys, "argv", ["phases.py", "--output", inside, "--model", str(tmp_path / "start"), "-n", "2"])
    shown = common.command()
    assert shown.endswith(" --output benchmarks/results/phases --model start -n 2") and shown.startswith("python ")
    assert str(tmp_path) not in shown and str(common.ROOT) not in shown


def test_facts_name_versions_also_of_what_is_not_installed():
    found = common.facts("numpy", "no-such-package", seeds=[1])
    assert found["versions"]["numpy"] and found["versions"]["no-such-package"] is None
    assert found["machine"]["cores"] > 0 and found["seeds"] == [1]
    assert "versions" not in common.facts()


def test_arms_run_in_turns_and_warm_ups_are_not_counted():
    calls = []
    arms = {name: lambda repetition, name=name: calls.append((name, repetition)) or repetition for name in "ab"}
    assert common.interleaved(arms, 2) == {"a": [0, 1], "b": [0, 1]}
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_medians_are_rounded_on_request():
    assert common.medians({"a": [1.0, 5.12345, 9.0]}) == {"a": 5.12345}
    assert common.medians({"a": [1.0, 5.12345, 9.0]}, 2) == {"a": 5.12}


def test_texts_lose_the_machines_folders():
    said = (
        f"python {common.ROOT}/recipes/teach_alfworld.py --cache_dir /data/me/cache --from https://a.b/c and 1/2 x/y"
    )
    assert common.without_folders(said) == (
        "python recipes/teach_alfworld.py --cache_dir cache --from https://a.b/c and 1/2 x/y"
    )
    assert common.without_folders("make('/data/me/games', 8)") == "make('games', 8)"


def test_results_name_no_folder_of_a_machine():
    files = [path for path in common.RESULTS.rglob("*") if path.suffix in (".json", ".jsonl", ".gz", ".md", ".txt")]
    folder = re.compile(r"(?<![\w.:/])/(?:data|home|mnt|opt|root|tmp|Users|usr|var|work)/\w")
    assert len(files) > 100 and not [path for path in files if folder.search(common.read_text(path))]
