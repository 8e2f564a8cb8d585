"""The one parser: types, spellings, precedence, and what it says about words that it does not know."""

import dataclasses
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


def test_types_and_spellings():
    found, other, given = read(
        *"here a b --max_turns 3 --learning-rate=1e-3 --serve --no-prompts --seed 4".split(),
        *("--keys", '{"a": 1}', "--task", "{}", "--task", '{"seed": 2}', "--report_to", "none"),
        types=(Options, Other),
    )
    tasks = [{}, {"seed": 2}]
    expected = Options(Path("here"), ["a", "b"], 3, 1e-3, True, False, {"a": 1}, tasks, "none", "transformers")
    assert found == expected and other == Other(4)
    assert given == {one.name for one in dataclasses.fields(Options)} - {"engine"} | {"seed"}
    assert read("here", "--report_to", "a", "b")[0].report_to == ["a", "b"]
    assert read("here")[0] == Options(Path("here")) and read("here")[0].keys is not read("here")[0].keys


@pytest.mark.parametrize(
    ("words", "value"), [("--serve", True), ("--serve true", True), ("--serve=no", False), ("--no_serve", False)]
)
def test_truth_values(words, value):
    found = read(*words.split(), "here")[0]
    assert found == Options(Path("here"), serve=value), "a flag takes no positional argument"


@pytest.fixture
def file(tmp_path):
    """Write a.yaml and return the flag that names it."""

    def write(text):
        (tmp_path / "a.yaml").write_text(text)
        return "--config", str(tmp_path / "a.yaml")

    return write


def test_flags_then_file_then_defaults(file):
    flags = file("max_turns: 4\nlearning-rate: 1e-5\nserve: true\ntask: [{seed: 1}]\nmore: alone\n")
    of_run = {"max_turns": 7, "engine": "vllm"}
    found, given = read("here", "--max-turns", "5", *flags, defaults=lambda given: of_run)
    tasks, alone = [{"seed": 1}], ["alone"]  # a text is a list of one
    assert found == Options(Path("here"), alone, 5, 1e-5, True, task=tasks, engine="vllm")
    assert given == {"folder", "max_turns", "learning_rate", "serve", "task", "more"}


LIBRARY = [("scale: false", False), ("scale: 2.5", 2.5), ("save: no", "no"), ('push: "false"', False)]


@pytest.mark.parametrize(("text", "value"), LIBRARY)
def test_a_file_may_have_what_a_library_takes(file, text, value):
    assert getattr(read(*file(text), types=(Other,))[0], text.partition(":")[0]) == value


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        ("here --max_turn 3", None, "did you mean --max-turns?"),
        ("here --serve=maybe", None, "--serve is 'maybe'"),
        ("here --keys [1]", None, "--keys: "),
        ("", None, "FOLDER"),
        ("here --config none.yaml", None, "config is 'none.yaml'"),
        ("here", "lerning_rate: 1", "a.yaml: did you mean learning_rate?"),
        *(("here", f"max_turns: {value}", "--max-turns: ") for value in ("many", "true", "1.5", "[1]")),
        *(("here", text, f"--{text.partition(':')[0]}") for text in ("serve: 3", "keys: [1]", "engine: vlm")),
        *(("here", text, "a.yaml") for text in ("- 1", "a: [1", "max_turns:")),
    ],
)
def test_what_is_refused(capsys, file, words, text, told):
    with pytest.raises(SystemExit) as exit_:
        read(*words.split(), *([] if text is None else file(text)))
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.startswith("g2po x: error: ") and len(said.splitlines()) == 1
    assert told in said
