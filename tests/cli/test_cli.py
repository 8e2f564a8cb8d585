"""`g2po`: what each command imports, says and refuses, and a folder of `g2po init` from the first minute on."""

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import refused
from run_g2po import outcome
from safetensors import SafetensorError
from transformers import TrainerControl, TrainerState
from transformers.utils import cached_file

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli import COMMANDS, HELP, main
from g2po_trl.cli.commands.init import FILES, write_folder
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.recipe import _SaveOnInterrupt
from g2po_trl.cli.recipe_files import RECIPES, check_files_and_packages, keys_beside, recipes_of
from g2po_trl.utils.extras import extra_of, install_command

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft", "trl", "bitsandbytes", "pandas", "vllm"}
TINY = "--max_steps 1 --max_completion_length 4 --max_turns 2 --num_environment_workers 1".split()
TINY += "--per_device_train_batch_size 8 --num_eval_tasks 2".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What `g2po init tidy` writes, as the current folder."""
    write_folder(tmp_path / "tidy")
    monkeypatch.chdir(tmp_path / "tidy")
    return tmp_path / "tidy"


def edit(file, *changes):
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def test_commands_that_need_no_torch_import_none(folder):
    """Every --help, and check (its worker too), view and report: what they import is all the time they take."""
    source = (folder / "environment.py").read_text()
    told = f"\nimport sys, pathlib\npathlib.Path('worker').write_text(repr(sorted({HEAVY!r} & set(sys.modules))))\n"
    (folder / "environment.py").write_text(source + told)
    episodes = [
        Trajectory("one", [Step("a", "x", state_key="a"), Step("b", "y")], 10.0 * i, "success") for i in (0, 1)
    ]
    write_jsonl(folder / "run" / "trajectories" / "train-000001.jsonl", episodes)
    commands = [[name, "--help"] for name in COMMANDS] + [["--version"], ["check"]]
    commands += [["view", "run", "--no-open"], ["report", "run"]]
    code = f"""
import json, sys
from g2po_trl.cli import main
loaded = {{}}
for command in {commands!r}:
    try:
        main(command)
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    loaded[" ".join(command)] = [code, sorted({HEAVY!r} & set(sys.modules))]
    if "matplotlib" in sys.modules and command[0] != "report":
        loaded[" ".join(command)][1].append("matplotlib")
print(json.dumps(loaded))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    loaded = json.loads(run.stdout.splitlines()[-1])
    assert loaded == {" ".join(command): [0, []] for command in commands}
    assert (folder / "worker").read_text() == "[]"
    assert not run.stderr


def test_what_needs_no_arguments(capsys):
    assert all(f"\n  {name} " in HELP for name in COMMANDS)
    assert outcome(capsys, "--help") == (0, HELP, "")
    assert f"torch          {version('torch')}\n" in outcome(capsys, "version")[1]


SEVERAL = "from g2po_trl import TextEnvironment\nclass A(TextEnvironment): pass\nclass B(TextEnvironment): pass"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("trian", 2, "did you mean train?"),
        ("init .", 1, "environment.py, tasks.jsonl"),
        ("init tasks.jsonl", 1, "tasks.jsonl"),
        ("check nowhere:Env", 1, "nowhere:Env"),
        *((f"{command} several.py", 1, "several.py:A; it contains A, B") for command in ("check", "train", "serve")),
        ("train alfwrld", 1, "did you mean alfworld?"),
        ("train --num_processes 0", 2, "num_processes is 0"),
        ("train --accelerate_config fsdp", 1, "accelerate_config"),
        ("teach --num-processes 2", 1, "num_processes"),
        ("teach broken.py", 1, "broken.py cannot be imported: SyntaxError: invalid syntax"),
        ("view nosuch --serve --port 99999", 2, "port is 99999"),
    ],
)
def test_errors_are_one_line(capsys, folder, words, code, told):
    for name, text in (("several", SEVERAL), ("broken", "class")):
        (folder / f"{name}.py").write_text(text)
    found, _, errors = outcome(capsys, *words.split())
    assert found == code and told in errors and len(errors.splitlines()) == 1, errors


NO_VLLM = "vLLM is not available. Please install it with `pip install trl[vllm]`"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'textworld'", name="textworld.core"), install_command("alfworld")),
        (ImportError(NO_VLLM), install_command("vllm")),
        (OSError(28, "No space left on device", "runs/a/model"), "disk is full: runs/a/model cannot be written"),
        (SafetensorError("header too large"), "damaged"),
        (partial(cached_file, "no/such", "config.json", local_files_only=True), "cannot be loaded: We couldn't"),
    ],
)
def test_what_users_can_fix_is_one_line(capsys, monkeypatch, error, told):
    monkeypatch.setattr("g2po_trl.cli.commands.check.main", raising(error))
    code, _, said = outcome(capsys, "check")
    assert code == 1 and told in said and said.startswith("g2po check: error: ") and len(said.splitlines()) == 1


def raising(error):
    def fail(argv):
        raise error() if callable(error) else error

    return fail


def test_bugs_have_a_traceback_and_ctrl_c_has_none(capsys, monkeypatch):
    for error in (RuntimeError("the roof is open"), BrokenPipeError(32, "of a worker"), OSError("of a game")):
        monkeypatch.setattr("g2po_trl.cli.commands.check.main", raising(error))
        with pytest.raises(type(error)):
            main(["check"])
    monkeypatch.setattr("g2po_trl.cli.commands.check.main", raising(KeyboardInterrupt()))
    code, _, errors = outcome(capsys, "check")
    assert code == 130 and errors == "\ng2po check: stopped\n"


def test_how_to_install_works_where_it_is_said(monkeypatch, tmp_path):
    assert install_command("webshop") == f"pip install -e '{ROOT.resolve()}[webshop]'"
    monkeypatch.setattr("g2po_trl.utils.extras.__file__", str(tmp_path / "g2po_trl" / "installing.py"))
    assert install_command("webshop") == "pip install 'g2po-trl[webshop]'"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {name: lines.split() for name, lines in setup["options.extras_require"].items() if name != "dev"}
    brought = {re.match(r"\w+", line)[0]: extra for extra, lines in extras.items() for line in lines if line[0] != "#"}
    del brought["pyyaml"]  # in every installation
    assert len(brought) > 8 and {module: extra_of(module) for module in brought} == brought


def test_flags_are_read_and_passed_on():
    words = "alfworld --config tiny --seed 1 --num-processes=2 --model m --beta=-1 --help-all".split()
    passed = "--config tiny --seed 1 --model m --beta=-1 --help-all".split()
    request = read(words)
    assert (request.target, request.passed, request.num_processes) == ("alfworld", passed, 2)
    assert read(["--seed", "1"]).target is None


def test_targets(folder):
    recipes, ours = RECIPES, ["alfworld", "alfworld-ppo", "appworld", "sokoban", "textworld", "webshop", "webshop-ppo"]
    assert sorted(recipes_of("train")) == sorted([*ours, "environment"])
    seed = ["--seed", "1"]
    assert resolve(read(["alfworld", *seed])) == (recipes / "train_alfworld.py", seed)
    assert resolve(read(["alfworld-ppo", *seed])) == (recipes / "train_alfworld_ppo.py", seed)
    own = (recipes / "train_environment.py", ["--environment", f"{folder}/environment.py:TidyEnvironment", *seed])
    for target in ([], ["environment.py"], ["environment.py:TidyEnvironment"]):
        assert resolve(read([*target, *seed])) == own
    name = "g2po_envs.sokoban:SokobanEnvironment"
    assert resolve(read([name])) == (own[0], ["--environment", name])


def test_files_beside_an_environment(folder, tmp_path, monkeypatch):
    """From another folder, relative paths of its config.yaml are still those of its own folder."""
    flags = {"environment": f"{folder}/environment.py:TidyEnvironment"}
    keys = keys_beside(flags)
    assert (keys["model_name_or_path"], keys["output_dir"]) == ("model", "runs/tidy")
    monkeypatch.chdir(tmp_path)
    keys = keys_beside(flags)
    assert (keys["model_name_or_path"], keys["output_dir"]) == ("tidy/model", "tidy/runs/tidy")
    assert keys_beside({"environment": "module:Class"}) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "none.jinja"),
        *(("model_name_or_path", name) for name in ("no/such/model", "runs/a", "config.yaml", "runs/b", "Qwen/none")),
        ("critic_model_name_or_path", "./none"),
        *(("engine", "vllm"), ("load_in_4bit", True), ("report_to", ["none", "trackio"])),
        *(("lora_alpha", 0), ("lora_r", 0), ("lora_dropout", 1.0)),
    ],
)
def test_files_models_and_packages_that_are_missing(folder, monkeypatch, field, value):
    (folder / "runs/a/checkpoint-3").mkdir(parents=True)
    (folder / "runs/a/checkpoint-3/trainer_state.json").write_text("{}")
    monkeypatch.setattr("g2po_trl.cli.recipe_files.find_spec", lambda name: None)
    check_files_and_packages({"model_name_or_path": "model", "chat_template": "config.yaml"})
    with refused(field):
        check_files_and_packages({"use_peft": True, field: value})


def test_init_writes_once(tmp_path, capsys):
    assert outcome(capsys, "init", str(tmp_path / "a"), "--model", "me/mine")[0] == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(FILES["environment"])
    texts = "".join((tmp_path / "a" / name).read_text() for name in ("config.yaml", "README.md"))
    assert "{NAME}" not in texts and "{MODEL}" not in texts and "runs/a" in texts and "me/mine" in texts
    code, said, _ = outcome(capsys, "init", str(tmp_path / "own"))
    assert code == 0 and said.endswith("&& g2po check\n") and (tmp_path / "own/model/model.safetensors").is_file()
    text = (tmp_path / "own" / "config.yaml").read_text()
    assert "model_name_or_path: model " in text and "learning_rate: 3.0e-4" in text
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "README.md").write_text("mine")
    assert outcome(capsys, "init", str(tmp_path / "b"))[0] == 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["README.md"], "nothing is written then"


EXPERT = 'rng.choice(game.moves(right=game.things[0] in PLACES["fridge"]))'


def test_an_expert_that_fails_is_not_taught_and_one_that_needs_all_turns_is_told(folder, capsys):
    shutil.copy("environment.py", "failing.py")
    edit(folder / "failing.py", (EXPERT, "'look'"))
    code, said, _ = outcome(capsys, "check", "failing.py", "--task", '{"things": ["pen"]}')
    assert code == 0 and "the expert succeeds in 0 of 4 episodes within 7 turns" in said
    assert said.splitlines()[-1] == "Next: what the warnings say, then g2po check failing.py again"
    edit(folder / "environment.py", (EXPERT, "game.moves(right=True)[0]"))
    (folder / "tasks.jsonl").write_text('{"things": ["pen", "egg"]}\n{"things": ["pen", "egg", "cup"]}\n')
    said = outcome(capsys, "check", "--max-turns", "2")[1]  # half of its episodes need three
    assert "warning   the expert succeeds in 4 of 8 episodes within 2 turns (median 2)" in said


@pytest.mark.parametrize(("ignores", "counts"), [("", True), ("state_key_ignores: [numbers]\n", False)])
def test_several_environments_and_the_keys_of_their_training(folder, monkeypatch, capsys, ignores, counts):
    counted = [("self.things = list(things)", "self.turn, self.things = 0, list(things)")]
    counted += [('        text = f"', '        self.turn += 1\n        text = f"[{self.turn}] ')]
    edit(folder / "environment.py", *counted)
    with open("environment.py", "a") as games, open("config.yaml", "a") as config:
        games.write("\nGAMES = {'one': TidyEnvironment, 'two': TidyEnvironment}\n")
        config.write(ignores)
    tasks = [f'{{"environment": "{name}", "things": ["pen", "egg", "cup"]}}' for name in ("one", "two")]
    code, said, _ = outcome(capsys, "check", "environment.py:GAMES", "--task", *tasks)
    assert code == 0 and ("if keys had no numbers" in said) == counts and " one: " in said and " two: " in said


def test_what_init_writes_is_good(folder, capsys):
    """`g2po check` finds nothing, and the folder's own tests pass."""
    code, said, _ = outcome(capsys, "check")
    *lines, following = said.splitlines()
    assert code == 0 and {line.split()[0] for line in lines} == {"ok"} and following == "Next: g2po teach", said
    assert "there is a graph to learn from" in said and "rewards from 0 to 10" in said
    assert "of 40 episodes; 9 end within 7 turns" in said, "max_turns of config.yaml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0 and "4 passed" in run.stdout


@pytest.fixture
def two(folder, tiny_model_dir):
    """A command that trains in two processes, started; it has updated once."""
    words = ["train", "--model", str(tiny_model_dir), *TINY, "--num_processes", "2", "--output_dir", "runs/two"]
    command = [sys.executable, "-m", "g2po_trl", *words, "--save_steps", "1000"]
    with open("log", "w") as log:
        run = subprocess.Popen([*command, "--max_steps", "1000"], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 300
        while "iteration   2/1000" not in Path("log").read_text() and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield command, run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_processes_and_ctrl_c(two, number):
    """The finished step is saved, one line, exit code 130 or 143, and the same command goes on."""
    command, run = two
    os.killpg(run.pid, number)
    assert run.wait(60) == 128 + number, Path("log").read_text()[-3000:]
    said = Path("log").read_text()
    assert "Traceback" not in said and said.count("Stopped at step") == 1 and "OMP_NUM_THREADS" not in said
    step = int(re.search(r"continues from runs/two/checkpoint-(\d+)\.", said)[1])
    command += ["--max_steps", str(step + 1), "--resume_from_checkpoint", "auto"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"iteration   {step + 1}/{step + 1}" in again.stdout + again.stderr


@pytest.mark.slow
def test_two_processes_whose_launcher_is_killed(two):
    import psutil

    started = psutil.Process(two[1].pid).children(recursive=True)
    assert len(started) >= 4, "two ranks and their workers"
    two[1].kill()
    two[1].wait()
    assert psutil.wait_procs(started, timeout=60)[1] == []


LAUNCHER = """
import os, subprocess, sys, time
code = "from g2po_trl.cli.launch import end_with_launcher as end; end(); print('started', flush=True); input()"
subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "G2PO_LAUNCHED": "1"}, start_new_session=True)
time.sleep(100)
"""


def test_what_was_launched_ends_when_its_launcher_is_killed():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], text=True, **pipes) as launcher:
        assert launcher.stdout.readline() == "started\n"
        launcher.kill()
        assert launcher.stdout.read() == "", "all that could write have ended"


@pytest.mark.slow
def test_the_wheel_holds_all_of_it(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "build", "runs", "*.egg-info")
    source.mkdir()
    for name in ("g2po_trl", "envs", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored if name != "g2po_trl" else None)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode and "setuptools" in run.stderr:
        pytest.skip("no package index to get setuptools from")
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = set(packed.namelist())
        entry_points = packed.read(next(name for name in held if name.endswith("entry_points.txt"))).decode()
    for place, package in (("g2po_trl", "g2po_trl"), ("envs", "g2po_envs"), ("recipes", "g2po_recipes")):
        for path in filter(Path.is_file, (ROOT / place).rglob("*")):
            if not {"__pycache__", "notebooks"} & {*path.parts} and not path.match("tiny_model/README.md"):
                assert f"{package}/{path.relative_to(ROOT / place).as_posix()}" in held
    assert "g2po = g2po_trl.cli:main" in entry_points
    assert not [name for name in held if name.startswith(("tests/", "docs/"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_what_would_be_lost_and_a_second_ctrl_c_stops_at_once(number):
    stop, control = _SaveOnInterrupt(), TrainerControl()
    given = SimpleNamespace(world_size=1), TrainerState(global_step=1), control
    try:
        stop.on_train_begin(*given)
        stop.on_step_end(*given)
        stop.on_save(*given)
        with pytest.raises(KeyboardInterrupt):  # nothing would be lost
            signal.raise_signal(number)
        stop.on_train_begin(*given)
        stop.on_step_end(*given)
        assert not control.should_save and not control.should_training_stop
        signal.raise_signal(number)
        assert stop.code == 128 + number
        signal.raise_signal(signal.SIGTERM)  # a launcher passes on what its processes got
        stop.on_step_end(*given)
        assert control.should_save and control.should_training_stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        stop.on_train_end(*given)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
