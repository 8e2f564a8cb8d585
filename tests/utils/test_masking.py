"""What looks like a secret is in no file of a run or an evaluation, and who needs it is told."""

import functools
import json
import os
import re

import pytest
from toy_environments import KeyDoorEnvironment

from g2po_trl import G2POConfig, PromptTemplate
from g2po_trl.cli.commands.evaluate import read
from g2po_trl.runs.output_dir import RunFolder
from g2po_trl.runs.run_json import describe_run
from g2po_trl.utils.masking import HIDDEN, masked, withheld_variables


class Keyed(KeyDoorEnvironment):
    def __init__(self, api_key, options=None, size=3):
        self.api_key = api_key


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"api_key": "a", "API-KEY": "b", "apikey": "c"}, dict.fromkeys(("api_key", "API-KEY", "apikey"), HIDDEN)),
        ({"hub_token": "a", "password": "b", "db_password_file": "c", "auth": "d"}, None),
        ({"credentials": {"user": "a", "codes": ["b", {"c": "d"}], "port": 5}},
         {"credentials": {"user": HIDDEN, "codes": [HIDDEN, {"c": HIDDEN}], "port": 5}}),
        ({"headers": {"Authorization": "Bearer abc"}}, {"headers": {"Authorization": HIDDEN}}),
        ("http://me:pass@there:8000/v1?x=1", f"http://{HIDDEN}@there:8000/v1?x=1"),
        (["https://there/?access_token=abc&x=1"], [f"https://there/?access_token={HIDDEN}&x=1"]),
        ("https://there/?user_pin=4711&spin=2&otp=12#", f"https://there/?user_pin={HIDDEN}&spin=2&otp={HIDDEN}#"),
        ({"passcode": "a", "door_pin": "b", "pinCode": "c", "OTP": "d", "bearer": "e"}, None),
        ({"note": "use hf_abcdefghijklmnopqrstuvwx here"}, {"note": f"use {HIDDEN} here"}),
        ("sk-proj-abcdefghijklmnopqrst", HIDDEN),
        ("postgres://me:p@ss@there/db", f"postgres://{HIDDEN}@there/db"),
        ("https://there/#access_token=abc", f"https://there/#access_token={HIDDEN}"),
        ({"accessToken": "a", "cookies": ["b"]}, {"accessToken": HIDDEN, "cookies": [HIDDEN]}),
        ([["Authorization", "Bearer abcdefgh"]], [["Authorization", f"Bearer {HIDDEN}"]]),
    ],
)  # fmt: skip
def test_masked_hides_secrets(data, expected):
    assert masked(data) == (dict.fromkeys(data, HIDDEN) if expected is None else expected)


@pytest.mark.parametrize(
    "data",
    [
        {"max_tokens": 5, "eos_token": "<|im_end|>", "stop_tokens": ["a"], "state_key": "room", "key_room": "hall"},
        {"api_key": None, "password": "", "use_auth_token": True, "state_key_ignores": ["case"], "monkey": "x"},
        {"url": "http://there:8000/a@b", "environment_variables": ["HF_TOKEN"], "author": "me", "pattern": "x"},
        {"key": "released", "keys": ["red", "blue"], "url": "http://there:8000, a mail: me@there"},
        {"pins": "red", "opinion": "a", "shopping": "b", "tokens": 512, "spinning": "c", "pinned": "d", "pin": 4711},
        {"text": "the task-force sk-8 and hf_small", "token_layout": "padded", "nested": [[1, 2.5, None]]},
    ],
)
def test_masked_keeps_what_is_no_secret(data):
    assert masked(data) == data


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
ORDINARY_VALUES = [
    *("/home/me/sk-learn-experiments-2024:/bin", "/data/hf_models_of_our_group", "ssh://git@there/a", "me@there"),
]


def test_one_list_of_names_and_values_for_workers_and_for_files(monkeypatch):
    """What a worker does not get is not written down either."""
    secret = dict.fromkeys(SECRET_NAMES.split(), "x") | {f"S{i}": value for i, value in enumerate(SECRET_VALUES)}
    ordinary = dict.fromkeys(ORDINARY_NAMES.split(), "x")
    ordinary |= {f"O{i}": value for i, value in enumerate(ORDINARY_VALUES)}
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (secret | ordinary).items():
        monkeypatch.setenv(name, value)
    assert secret.keys() <= set(withheld_variables())
    assert {*withheld_variables()} - {*withheld_variables(["DB_PASS", "S0"])} == {"DB_PASS", "S0"}
    written = masked(secret | ordinary)
    assert {name for name, value in written.items() if HIDDEN in value} == secret.keys()
    assert written["S8"] == f"git+https://{HIDDEN}@there/a/b"


def test_workers_get_what_programs_need_to_run_and_what_is_named(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    needed = (
        "PATH HOME LANG LC_ALL TMPDIR PYTHONPATH OMP_NUM_THREADS CUDA_VISIBLE_DEVICES HF_HOME https_proxy MUJOCO_GL"
    )
    others = (
        "TF_VAR_size TS_AUTHKEY DB_PW SLACK_WEBHOOK BACKUP_OPTIONS SERVICE_CONFIG HF_TOKEN MY_GAME PATHS AWS_PROFILE"
    )
    for name in f"{needed} {others}".split():
        monkeypatch.setenv(name, "x")
    assert sorted(withheld_variables()) == sorted(others.split())
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
        str(tmp_path), use_cpu=True, bf16=False, hub_token="SECRET-1",
        model_init_kwargs={"token": "SECRET-2", "revision": "main"},
        generation_kwargs={"extra": {"auth_token": "SECRET-3"}},
        vllm_server_base_url="http://me:SECRET-4@127.0.0.1:8000",
    )  # fmt: skip
    inner = functools.partial(Keyed, "SECRET-5")
    factory = functools.partial(inner, options={"password": "SECRET-6", "rooms": ["hall"]}, size=4)
    described = describe_run(
        args, factory, PromptTemplate("x", "x"), "G2PO", {"history": "window"}, model="http://me:SECRET-7@there/model"
    )
    folder = RunFolder(tmp_path, save_trajectories=False)
    folder.settings = {"engine_options": {"hf_token": "SECRET-8"}}
    folder.write_run(described, {"eval": [{"key_room": "hall"}]})
    written = (tmp_path / "run.json").read_text()
    assert "SECRET" not in written and "SECRET" not in args.to_json_string()
    run = json.loads(written)
    assert run["environment"]["kwargs"] == {"api_key": HIDDEN, "options": {"password": HIDDEN, "rooms": ["hall"]}} | {
        "size": 4
    }
    assert run["trainer"]["model_init_kwargs"]["revision"] == "main"
    with pytest.raises(SystemExit):
        read(["--model", str(tmp_path)])
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"error: (environment_options|generation_kwargs) is ", told) and "SECRET" not in told, told
    mine = {"api_key": "mine", "options": {"password": "mine"}}
    given = read(["--model", str(tmp_path), "--environment-options", json.dumps(mine), "--generation-kwargs", "{}"])[0]
    assert given.environment_options == {**mine, "size": 4}
