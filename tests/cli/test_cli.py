"""`g2po`: what each command imports and refuses, where its files are found, and how its processes end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
from refusals import refused
from run_g2po import outcome
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState
from transformers.utils import cached_file

from g2po_trl import Step, Trajectory, write_jsonl
from g2po_trl.cli import COMMANDS, main
from g2po_trl.cli.commands.init import FILES, write_folder
from g2po_trl.cli.commands.train import read, resolve
from g2po_trl.cli.recipe import _SaveOnInterrupt
from g2po_trl.cli.recipe_files import RECIPES, check_files_and_packages, check_model, keys_beside
from g2po_trl.utils.errors import G2POError
from g2po_trl.utils.extras import install_command

HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft", "trl", "bitsandbytes", "pandas", "vllm"}
TINY = "--max_steps 1 --max_completion_length 4 --max_turns 2 --num_environment_workers 1".split()
TINY += "--per_device_train_batch_size 8 --num_eval_tasks 2".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What `g2po init tidy` writes, as the current folder."""
    write_folder(tmp_path / "tidy")
    monkeypatch.chdir(tmp_path / "tidy")
    return tmp_path / "tidy"


def test_commands_that_need_no_torch_import_none(folder):
    """Every --help, check (its worker too), view, report and a typo: what they import is all the time they take."""
    source = (folder / "environment.py").read_text()
    told = f"\nimport sys, pathlib\npathlib.Path('worker').write_text(repr(sorted({HEAVY!r} & set(sys.modules))))\n"
    (folder / "environment.py").write_text(source + told)
    episodes = [Trajectory("one", [Step("a", "x"), Step("b", "y")], 10.0 * i, "success") for i in (0, 1)]
    write_jsonl(folder / "run" / "trajectories" / "train-000001.jsonl", episodes)
    commands = [f"{name} --help" for name in COMMANDS]
    commands += ["--help", "version", "check", "view run --no-open", "report run"]
    typos = ["train alfworld --max-turnz 3", "train alfworld --max-turnz 3 --num-processes 2"]
    code = f"""
import json, sys
from g2po_trl.cli import main
loaded = {{}}
for command in {commands + typos!r}:
    try:
        main(command.split())
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    loaded[command] = [code, sorted({HEAVY!r} & set(sys.modules))]
print(json.dumps(loaded))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    loaded = json.loads(run.stdout.splitlines()[-1])
    assert loaded == dict.fromkeys(commands, [0, []]) | dict.fromkeys(typos, [2, []])
    assert (folder / "worker").read_text() == "[]"
    assert run.stderr.count("\n") == 2 == run.stderr.count("did you mean --max-turns?")


SEVERAL = "from g2po_trl import TextEnvironment\nclass A(TextEnvironment): pass\nclass B(TextEnvironment): pass"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("trian", 2, "did you mean train?"),
        ("init .", 1, "environment.py, tasks.jsonl"),
        ("check nowhere:Env", 1, "nowhere:Env"),
        *((f"{command} several.py", 1, "several.py:A; it contains A, B") for command in ("check", "train", "serve")),
        ("check a.py --agent b.py", 2, "agent is 'b.py'"),
        ("check --model m --response yes", 2, "response is ['yes']"),
        ("check --max-episode-tokens 9", 2, "max_episode_tokens is 9"),
        ("train alfwrld", 1, "did you mean alfworld?"),
        ("train --agent several.py", 1, "no public function (task, client)"),
        ("train --num_processes 0", 2, "num_processes is 0"),
        ("teach --num-processes 2", 1, "num_processes"),
        ("teach broken.py", 1, "broken.py cannot be imported: SyntaxError: invalid syntax"),
    ],
)
def test_errors_are_one_line(capsys, folder, words, code, told):
    for name, text in (("several", SEVERAL), ("broken", "class")):
        (folder / f"{name}.py").write_text(text)
    found, _, errors = outcome(capsys, *words.split())
    assert found == code and told in errors and len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'textworld'", name="textworld.core"), install_command("alfworld")),
        (OSError(28, "No space left on device", "runs/a/model"), "disk is full: runs/a/model cannot be written"),
        *((kind("damaged"), "damaged") for kind in (peft.utils.error.NoMatchingPeftModuleError, SafetensorError)),
        (partial(cached_file, "no/such", "config.json", local_files_only=True), "cannot be loaded: We couldn't"),
        *((error, None) for error in (RuntimeError("a bug"), BrokenPipeError(32, "of a worker"), OSError("a game's"))),
    ],
)
def test_what_users_can_fix_is_one_line_and_a_bug_has_a_traceback(capsys, monkeypatch, error, told):
    def fail(argv):
        raise error() if callable(error) else error

    monkeypatch.setattr("g2po_trl.cli.commands.check.main", fail)
    if told is None:
        with pytest.raises(type(error)):
            main(["check"])
    else:
        code, _, said = outcome(capsys, "check")
        assert code == 1 and told in said and said.startswith("g2po check: error: ") and len(said.splitlines()) == 1


def test_targets(folder, tmp_path, monkeypatch):
    request = read("alfworld --config tiny --seed 1 --num-processes=2 --beta=-1 --help-all".split())
    assert request.passed == "--config tiny --seed 1 --beta=-1 --help-all".split() and request.num_processes == 2
    seed = ["--seed", "1"]
    own = RECIPES / "train_environment.py"
    environment = ["--environment", f"{folder}/environment.py:TidyEnvironment"]
    assert resolve(read(["alfworld", *seed])) == (RECIPES / "train_alfworld.py", seed)
    for target in ([], ["environment.py"], ["environment.py:TidyEnvironment"]):
        assert resolve(read([*target, *seed])) == (own, [*environment, *seed])
    name = "g2po_envs.sokoban:SokobanEnvironment"
    assert resolve(read([name])) == (own, ["--environment", name])
    write_folder(tmp_path / "house", kind="agent")
    monkeypatch.chdir(tmp_path / "house")
    for words in ([], ["--agent", "agent.py"], ["--agent=agent.py:tidy"]):
        assert resolve(read(words)) == (own, ["--agent", f"{tmp_path}/house/agent.py:tidy"])


def test_files_beside_an_environment(folder, tmp_path, monkeypatch):
    """From another folder, relative paths of its config.yaml are still those of its own folder."""
    flags = {"environment": f"{folder}/environment.py:TidyEnvironment"}
    for place, model, output in ((folder, "model", "runs/tidy"), (tmp_path, "tidy/model", "tidy/runs/tidy")):
        monkeypatch.chdir(place)
        keys = keys_beside(flags)
        assert (keys["model_name_or_path"], keys["output_dir"]) == (model, output)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "none.jinja"),
        *(("model_name_or_path", name) for name in ("no/such/model", "runs/a", "config.yaml", "Qwen/none")),
        *(("engine", "vllm"), ("load_in_4bit", True), ("report_to", ["none", "trackio"]), ("lora_r", 0)),
    ],
)
def test_files_models_and_packages_that_are_missing(folder, monkeypatch, field, value):
    (folder / "runs/a/checkpoint-3").mkdir(parents=True)
    (folder / "runs/a/checkpoint-3/trainer_state.json").write_text("{}")
    monkeypatch.setattr("g2po_trl.cli.recipe_files.find_spec", lambda name: None)
    check_files_and_packages({"model_name_or_path": "model", "chat_template": "config.yaml"})
    with refused(field):
        check_files_and_packages({"use_peft": True, field: value})


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def holding(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        *(("config.json", spoil) for spoil in (Path.unlink, holding("{}"), holding('{"model_type": "qwen99"}'))),
        *(("model.safetensors", spoil) for spoil in (Path.unlink, cut, holding(""))),
        ("model.safetensors.index.json", holding('{"weight_map": {"a": "b.safetensors"}}')),
        *(("tokenizer.json", spoil) for spoil in (Path.unlink, cut)),
        ("chat_template.jinja", Path.unlink),
        *(("adapter_config.json", holding(f'{{"base_model_name_or_path": {base}}}')) for base in ("null", '"./gone"')),
    ],
)
def test_a_broken_model_folder_is_refused_before_anything_is_loaded(tiny_model_dir, tmp_path, file, spoil):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    check_model("model", str(folder))
    if file.endswith(".index.json"):
        (folder / "model.safetensors").unlink()
    spoil(folder / file)
    with pytest.raises(G2POError):
        check_model("model", str(folder))


def test_a_model_that_trains_is_not_refused(tiny_model_dir, tmp_path, monkeypatch):
    """One with code for its tokenizer, a variant, an adapter that is computed from its base, and any under ZeRO-3."""
    shutil.copytree(tiny_model_dir, tmp_path / "own")
    (tmp_path / "own" / "model.safetensors").rename(tmp_path / "own" / "model.fp16.safetensors")
    code = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass"
    (tmp_path / "own" / "own.py").write_text(code)
    own = json.loads((file := tmp_path / "own" / "tokenizer_config.json").read_text())
    own |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    file.write_text(json.dumps(own))
    options = {"trust_remote_code": True, "model_init_kwargs": {"variant": "fp16"}}
    check_files_and_packages({"model_name_or_path": tmp_path / "own", **options})
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    config = peft.LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    check_model("model", str(tmp_path / "adapter"))
    monkeypatch.setattr("transformers.integrations.accelerate.is_deepspeed_zero3_enabled", lambda: True)
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    check_model("model", str(tiny_model_dir))


def test_init_writes_once(tmp_path, capsys):
    assert outcome(capsys, "init", str(tmp_path / "a"), "--model", "me/mine")[0] == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(FILES["environment"])
    texts = "".join((tmp_path / "a" / name).read_text() for name in ("config.yaml", "README.md"))
    assert "{NAME}" not in texts and "{MODEL}" not in texts and "runs/a" in texts and "me/mine" in texts
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "README.md").write_text("mine")
    assert outcome(capsys, "init", str(tmp_path / "b"))[0] == 1
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["README.md"], "nothing is written then"


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


# As a training: it prints long after `head` has ended, and so does its environment.
LONG = """
import sys
from g2po_trl.cli.process import set_up_process
set_up_process()
from pathlib import Path
from g2po_trl import Observation, TextEnvironment
from g2po_trl.environments.pool.limits import PoolLimits
from g2po_trl.environments.pool.pool import EnvironmentPool

class Loud(TextEnvironment):
    def reset(self):
        print("reset", flush=True)
        print("reset", file=sys.stderr, flush=True)
        return Observation("played")

print("started", flush=True)
sys.stdin.read()
with EnvironmentPool(Loud, PoolLimits(1)) as pool:
    played = pool.reset([{}])[0]
    print("step 1", flush=True)
Path(sys.argv[1]).write_text(getattr(played, "text", str(played)))
print("step 2")
sys.exit(3)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_goes_on_when_the_reader_of_its_output_has_ended(tmp_path, unbuffered):
    command = [sys.executable, "-c", LONG, tmp_path / "done"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) as process:
        assert process.stdout.readline() == b"started\n"
        process.stdout.close()
        process.stdin.close()
        assert process.wait(60) == 3, "its own code"
    assert (tmp_path / "done").read_text() == "played"


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
