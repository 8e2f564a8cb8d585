"""What looks like a secret is in no file of a run or an evaluation, and who needs it is told."""

import functools
import json
import os

import pytest
from toy_environments import KeyDoorEnvironment

from g2po_trl import G2POConfig, PromptTemplate
from g2po_trl.cli.commands.evaluate import read
from g2po_trl.runs.output_dir import RunFolder
from g2po_trl.runs.run_json import describe_run
from g2po_trl.utils.masking import HIDDEN, masked, withheld_variables
from g2po_trl.utils.show import printable


class Keyed(KeyDoorEnvironment):
    def __init__(self, api_key, options=None, size=3):
        self.api_key = api_key


PLACES = {
    "names in mappings": (
        {"credentials": {"user": "a", "codes": ["b", {"c": "d"}], "port": 5}},
        {"credentials": {"user": HIDDEN, "codes": [HIDDEN, {"c": HIDDEN}], "port": 5}},
    ),
    "an address": ("http://me:p@ss@there:8000/v1?x=1", f"http://{HIDDEN}@there:8000/v1?x=1"),
    "a query": (
        ["https://there/?access_token=abc&spin=2&otp=12#", "https://there/#access_token=abc"],
        [f"https://there/?access_token={HIDDEN}&spin=2&otp={HIDDEN}#", f"https://there/#access_token={HIDDEN}"],
    ),
    "a word of a text": ({"note": "use hf_abcdefghijklmnopqrstuvwx here"}, {"note": f"use {HIDDEN} here"}),
    "a pair": ([["Authorization", "Bearer abcdefgh"]], [["Authorization", f"Bearer {HIDDEN}"]]),
}
NO_SECRETS = [
    {"max_tokens": 5, "eos_token": "<|im_end|>", "stop_tokens": ["a"], "state_key": "room", "key_room": "hall"},
    {"api_key": None, "password": "", "use_auth_token": True, "state_key_ignores": ["case"], "monkey": "x"},
    {"url": "http://there:8000/a@b", "environment_variables": ["HF_TOKEN"], "author": "me", "pattern": "x"},
    {"key": "released", "keys": ["red", "blue"], "url": "http://there:8000, a mail: me@there"},
    {"pins": "red", "tokens": 512, "pin": 4711, "text": "the task-force sk-8 and hf_small", "nested": [[1, 2.5]]},
]


@pytest.mark.parametrize("place", PLACES)
def test_secrets_are_hidden_wherever_they_stand(place):
    data, expected = PLACES[place]
    assert masked(data) == expected


def test_what_is_no_secret_is_kept():
    assert masked(NO_SECRETS) == NO_SECRETS


SECRET_NAMES = """
DB_PASS MYSQL_PWD HFTOKEN DATABASE_URL SESSION_COOKIE npm_config__authToken pwd pass dbPassword PGPASSFILE accessToken
HF_TOKEN_2 AWS_BEARER_TOKEN_BEDROCK SSH_AUTH_SOCK SENTRY_DSN REDIS_URL x-auth-token clientSecret SSHPASS GOOGLE_CREDS
DOOR_PIN PIN_OF_CARD otp passcode_of_door bearer userPin pincode CI_JOB_JWT TF_VAR_db_pass Set-Cookie ENCRYPTION_KEY
AZURE_STORAGE_CONNECTION_STRING KEY hub_token apikey
"""
ORDINARY_NAMES = """
PWD OLDPWD TOKENIZERS_PARALLELISM max_tokens MAX_NEW_TOKENS num_tokens pad_token padToken PATH KEYBOARD OPINION
SPINNING PINNED pins pin_color PIN_MEMORY optional forbearers MONKEY tokenizer TOKENIZER key state_key key_room COMPASS
bypass passes pass_rate secretary AUTHOR XAUTHORITY
"""
SECRET_VALUES = [
    *("hf_abcdefghijklmnopqrst", "gsk_abcdefghij0123456789", "ghp_abcdefghij0123456789abcd", "AKIAIOSFODNN7EXAMPLE"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def_123", "sk-ant-abcdefghij0123456789", "redis://:pw@there:6379"),
    *("https://token@there/simple", "git+https://token@there/a/b", "postgres://me:pass@there/db"),
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]
ORDINARY_VALUES = ["/home/me/sk-learn-2024:/bin", "/data/hf_models_of_our_group", "ssh://git@there/a", "me@there"]
NEEDED = "PATH HOME LANG LC_ALL TMPDIR PYTHONPATH OMP_NUM_THREADS CUDA_VISIBLE_DEVICES HF_HOME https_proxy MUJOCO_GL"
OTHERS = "TF_VAR_size TS_AUTHKEY DB_PW SLACK_WEBHOOK BACKUP_OPTIONS SERVICE_CONFIG HF_TOKEN MY_GAME PATHS AWS_PROFILE"


def set_variables(monkeypatch, variables):
    """These, and no others."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_one_list_of_names_and_values_for_workers_and_for_files(monkeypatch):
    """What a worker does not get is not written down either."""
    secret = dict.fromkeys(SECRET_NAMES.split(), "x") | {f"S{i}": value for i, value in enumerate(SECRET_VALUES)}
    ordinary = dict.fromkeys(ORDINARY_NAMES.split(), "x")
    ordinary |= {f"O{i}": value for i, value in enumerate(ORDINARY_VALUES)}
    set_variables(monkeypatch, secret | ordinary)
    assert secret.keys() <= set(withheld_variables())
    assert {*withheld_variables()} - {*withheld_variables(["DB_PASS", "S0"])} == {"DB_PASS", "S0"}
    written = masked(secret | ordinary)
    assert {name for name, value in written.items() if HIDDEN in value} == secret.keys()
    assert written["S8"] == f"git+https://{HIDDEN}@there/a/b"


def test_workers_get_what_programs_need_to_run_and_what_is_named(monkeypatch):
    set_variables(monkeypatch, dict.fromkeys(f"{NEEDED} {OTHERS}".split(), "x"))
    assert sorted(withheld_variables()) == sorted(OTHERS.split())
    assert "MY_GAME" not in withheld_variables(["MY_GAME"])
    monkeypatch.setenv("https_proxy", "http://me:pass@there:80")
    assert "https_proxy" in withheld_variables()


def test_masked_takes_linear_time():
    """The square of these lengths would be minutes."""
    for text in ("?" * 200_000, "#a" * 100_000, "://" + ":" * 200_000):
        assert masked(text) == text


@pytest.mark.filterwarnings("ignore:.* has no effect without")
def test_files_of_a_run_and_an_evaluation_hold_no_secret(tmp_path, capsys):
    """run.json, and what goes to loggers; and evaluation does not play with the mask for a key."""
    args = G2POConfig(
        str(tmp_path),
        **{"use_cpu": True, "bf16": False, "hub_token": "SECRET-1"},
        model_init_kwargs={"token": "SECRET-2", "revision": "main"},
        generation_kwargs={"extra": {"auth_token": "SECRET-3"}},
        vllm_server_base_url="http://me:SECRET-4@127.0.0.1:8000",
    )
    inner = functools.partial(Keyed, "SECRET-5")
    factory = functools.partial(inner, options={"password": "SECRET-6", "rooms": ["hall"]}, size=4)
    address, prompt = "http://me:SECRET-7@there/model", PromptTemplate("x", "x")
    described = describe_run(args, factory, prompt, "G2PO", {"history": "window"}, model=address)
    folder = RunFolder(tmp_path, save_trajectories=False)
    folder.settings = {"engine_options": {"hf_token": "SECRET-8"}}
    folder.write_run(described, {"eval": [{"key_room": "hall"}]})
    written = (tmp_path / "run.json").read_text()
    assert "SECRET" not in written and "SECRET" not in args.to_json_string()
    run = json.loads(written)
    options = {"password": HIDDEN, "rooms": ["hall"]}
    assert run["environment"]["kwargs"] == {"api_key": HIDDEN, "options": options, "size": 4}
    assert run["trainer"]["model_init_kwargs"]["revision"] == "main"
    with pytest.raises(SystemExit):
        read(["--model", str(tmp_path)])
    assert "SECRET" not in capsys.readouterr().err
    mine = {"api_key": "mine", "options": {"password": "mine"}}
    given = read(["--model", str(tmp_path), "--environment-options", json.dumps(mine), "--generation-kwargs", "{}"])[0]
    assert given.environment_options == {**mine, "size": 4}


def test_a_terminal_obeys_nothing_in_a_printable_text():
    """Titles, colours, cursors and reversed directions; tabs, lines and words of any language stay."""
    assert printable("a\x1b[2Jb\x1b]0;c\x07\x9b31m\rd\x00\u202ee") == "a�[2Jb�]0;c��31m�d��e"
    for text in ("line\n\tline", "日本 ünïcode العربية 👩‍👧"):
        assert printable(text) == text
    assert printable("one\r\ntwo") == "one\ntwo"
