"""The one parser: types, spellings, precedence, and what it says about words that it does not know."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from g2po_trl.cli.parser import parse, read_config
from g2po_trl.utils.options import Options as Checked
from g2po_trl.utils.options import option


@dataclass
class Options(Checked):
    folder: Path = option("where", positional=True, metavar="FOLDER")
    more: list[str] = option("others", [], positional=True)
    max_turns: int = option("turns of an episode", 50, within="[1, inf)")
    learning_rate: float | None = option("100 % of the rate", None, group="learning")
    serve: bool = option("serve the page", False)
    prompts: bool = option("show prompts", True)
    keys: dict[str, Any] = option("more", {}, group="learning")
    task: list[dict[str, Any]] = option("a task", [])
    report_to: str | list[str] | None = option("trackers", None)
    engine: str = option("engine", "transformers", choices=("transformers", "vllm"))


class Strategy(Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Other:
    seed: int = field(default=0, metadata={"help": "seed"})
    scale: str = field(default="group", metadata={"help": "of a library, which takes more than it says"})
    save: Strategy | str = field(default="steps", metadata={"help": "when"})
    push: bool = False  # of a library, which checks nothing


def read(*argv, types=(Options,), **options):
    keys = {"config": lambda name, flags: read_config(name) if name else {}, **options}
    return parse(types, argv, command="g2po x", **keys)


def refused(capsys, *argv, **options):
    with pytest.raises(SystemExit) as exit_:
        read(*argv, **options)
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.startswith("g2po x: error: ") and len(said.splitlines()) == 1
    return said


def test_types_and_spellings():
    found, other, given = read(
        *"here a b --max_turns 3 --learning-rate=1e-3 --serve --no-prompts --seed 4".split(),
        *("--keys", '{"a": 1}', "--task", "{}", "--task", '{"seed": 2}', "--report_to", "none"),
        types=(Options, Other),
    )
    expected = Options(
        Path("here"), ["a", "b"], 3, 1e-3, True, False, {"a": 1}, [{}, {"seed": 2}], "none", "transformers"
    )
    assert found == expected and other == Other(4)
    assert given == {one.name for one in dataclasses.fields(Options)} - {"engine"} | {"seed"}
    assert read("here", "--report_to", "a", "b")[0].report_to == ["a", "b"]
    assert read("here")[0] == Options(Path("here")) and read("here")[0].keys is not read("here")[0].keys


@pytest.mark.parametrize(
    ("words", "value"),
    [("--serve", True), ("--serve true", True), ("--serve=no", False), ("--no-serve", False), ("--no_serve", False)],
)
def test_truth_values(words, value):
    found = read(*words.split(), "here")[0]
    assert found.serve is value and found.folder == Path("here"), "a flag takes no positional argument"


def test_flags_then_file_then_defaults(tmp_path):
    (file := tmp_path / "a.yaml").write_text("max_turns: 4\nlearning-rate: 1e-5\nserve: true\ntask: [{seed: 1}]\n")
    found, given = read(
        "here", "--max-turns", "5", "--config", str(file), defaults=lambda given: {"max_turns": 6, "engine": "vllm"}
    )
    assert (found.max_turns, found.learning_rate, found.serve, found.task) == (5, 1e-5, True, [{"seed": 1}])
    assert found.engine == "vllm" and given == {"folder", "max_turns", "learning_rate", "serve", "task"}
    (tmp_path / "text.yaml").write_text("more: alone\n")
    assert read("here", "--config", str(tmp_path / "text.yaml"))[0].more == ["alone"], "a text is a list of one"
    of_run = {"max_turns": 7, "engine": "vllm"}
    found = read(
        "here",
        config=lambda name, flags: read_config(file),
        defaults=lambda given: of_run if given["max_turns"] == 4 else {},
    )[0]
    assert (found.max_turns, found.engine) == (4, "vllm")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("scale: false", "scale", False),
        ("scale: 2.5", "scale", 2.5),
        ("save: no", "save", "no"),
        ('push: "false"', "push", False),
    ],
)
def test_a_file_may_have_what_a_library_takes(tmp_path, text, name, value):
    (tmp_path / "a.yaml").write_text(text)
    assert getattr(read("--config", str(tmp_path / "a.yaml"), types=(Other,))[0], name) == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("here --max_turn 3", "did you mean --max-turns?"),
        ("here --zzz", "--help lists"),
        ("here --max_turns x", "--max-turns: "),
        ("here --max_turns 0", "max_turns is 0"),
        ("here --serve=maybe", "--serve is 'maybe'"),
        ("here --keys [1]", "--keys: "),
        ("here --engine vlm", "--engine: "),
        ("", "FOLDER"),
        ("here --config none.yaml", "config is 'none.yaml'"),
    ],
)
def test_what_a_command_line_cannot_have(capsys, words, told):
    assert told in refused(capsys, *words.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lerning_rate: 1", "did you mean learning_rate?"),
        *((f"max_turns: {value}", "--max-turns: ") for value in ("many", "true", "1.5", "[1]")),
        *((f"{name}: {value}", f"--{name}") for name, value in (("serve", "3"), ("keys", "[1]"), ("engine", "vlm"))),
        *((text, "a.yaml") for text in ("", "- 1", "a: [1")),
    ],
)
def test_what_a_file_cannot_have(capsys, tmp_path, text, told):
    (tmp_path / "a.yaml").write_text(text)
    assert told in refused(capsys, "here", "--config", str(tmp_path / "a.yaml"))


def test_help(capsys):
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as exit_:
            read(word, config=lambda name, flags: {"max_turns": 4, "learning_rate": 0.5})
        text = capsys.readouterr().out
        assert exit_.value.code == 0
        assert text.startswith("usage: g2po x FOLDER MORE [--FLAG VALUE ...]\n") and "max_turns" not in text
        assert "turns of an episode (default: 4)" in text and "100 % of the rate (default: 0.5)" in text
        assert text.index("--max-turns") < text.index("learning:") < text.index("--keys JSON")


def test_a_typo_in_a_flag_is_answered_before_torch_is_imported():
    code = "import sys; from g2po_trl.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", "alfworld", "--max-turnz", "3"]
    for words in (command, [*command, "--num-processes", "2"]):
        run = subprocess.run(words, capture_output=True, text=True)
        assert run.returncode == 2 and run.stdout == "False\n" and "did you mean --max-turns?" in run.stderr
