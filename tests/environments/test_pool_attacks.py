"""Environments that execute what a model writes, and what that may do to its worker.

Nothing of it runs in the trainer, and only its own episode is lost.
"""

import copy
import json
import pickle

import pytest

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.answers import Answer, InvalidAnswerError, decode, encode
from g2po_trl.environments.pool.channel import LENGTH
from g2po_trl.environments.validation import validate_observation, validate_step

# The worker's socket, as code finds it that was given nothing.
SOCKET = """
import os, socket, time
for name in os.listdir('/proc/self/fd'):
    try:
        if os.readlink(f'/proc/self/fd/{name}').startswith('socket:'):
            pipe = int(name)
    except OSError:
        pass
def write(data):
    while data:
        data = data[os.write(pipe, data):]
"""


class Executes(TextEnvironment):
    """Runs the action. Its answers name no process: an episode can be played again elsewhere."""

    def reset(self, number):
        self.number, self.steps = number, 0
        return Observation(f"number {number}")

    def step(self, action):
        self.steps += 1
        exec(action, {"environment": self})
        return StepResult(f"{self.number} step {self.steps}", reward=1.0)


@pytest.fixture(scope="module")
def executing():
    """One pool for all attacks: it has to survive each of them."""
    with EnvironmentPool(Executes, PoolLimits(1, 60, 30)) as pool:
        yield pool


def framed(message):
    return LENGTH.pack(len(message)) + message


def forged(job):
    return framed(encode(Answer(job, "0", StepResult(Observation("forged"), 10.0, True))))


ATTACKS = {
    "garbage": "write(b'not a message at all')",
    "a huge message announced": f"write({LENGTH.pack(1 << 40)!r})",
    "an answer that nobody is owed": f"write({forged(17)!r})",
    "an answer for another episode": f"for n in range(3): write({forged(1)!r})",
    "a message of nothing": f"write({framed(b'')!r})",
    "nothing, a thousand times": f"write({framed(b'')!r} * 1000)",
    "half a message": f"write({framed(bytes(50))[:12]!r})",
    "millions of bytes": f"write({LENGTH.pack(20_000_000)!r} + bytes(20_000_000))",
    "bytes without an end": "while True: write(b'x' * 1_000_000)",
    "the socket closed": "os.close(pipe)",
    "the socket shut": "socket.socket(fileno=os.dup(pipe)).shutdown(socket.SHUT_RDWR)",
    "another file in the socket's place": "os.dup2(os.open('/dev/null', os.O_RDWR), pipe); os._exit(0)",
    "deep nesting": f"write({framed(b'[' * 200_000)!r})",
}


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS.keys())
def test_what_is_written_to_the_workers_socket_costs_one_episode(executing, code):
    assert len(executing.reset([{"number": n} for n in range(3)])) == 3
    first = executing.step(dict.fromkeys(range(3), "pass"))
    replayed = executing.replayed
    results = executing.step({0: "pass", 1: SOCKET + code, 2: "pass"})
    assert results[1].kind == "crash", results[1]
    for slot in (0, 2):
        assert first[slot].observation.text == f"{slot} step 1"
        assert results[slot] == StepResult(Observation(f"{slot} step 2"), 1.0), "played again, and not misled"
    assert executing.replayed > replayed
    again = executing.step({0: "pass", 2: "pass"})
    assert [again[slot].observation.text for slot in (0, 2)] == ["0 step 3", "2 step 3"]


@pytest.mark.parametrize("rest", ["", "\nwhile True: write(b'x'); time.sleep(0.2)"], ids=["silence", "drops"])
def test_half_a_message(rest):
    """No time limit is renewed by a byte now and then."""
    with EnvironmentPool(Executes, PoolLimits(1, environment_step_timeout=1)) as pool:
        pool.reset([{"number": 0}, {"number": 1}])
        results = pool.step({0: f"{SOCKET}write({framed(bytes(5000))[:12]!r}){rest}", 1: "pass"})
        assert results[0].kind == "timeout" and results[1].observation.text == "1 step 1"


def test_a_pickle_is_not_loaded(executing, tmp_path):
    executing.reset([{"number": 0}, {"number": 1}])
    runs = f"cos\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR.".encode()
    results = executing.step({0: f"{SOCKET}write({framed(runs)!r})", 1: "pass"})
    assert results[0].kind == "crash" and "an invalid message" in results[0].message
    assert results[1].observation.text == "1 step 1" and not (tmp_path / "ran").exists(), "the trainer ran it"
    pickle.loads(runs)
    assert (tmp_path / "ran").exists()


FORKS = {
    "that comes back": "import os; os.fork()",
    "that comes back with an error": "import os\nif os.fork() == 0: raise RuntimeError('in the child')",
    "that leaves": "import os, sys\nif os.fork() == 0: sys.exit(3)",
    "that writes": f"import os\nif os.fork() == 0: exec({SOCKET + 'write(bytes(9))'!r})",
    "that Python does not know of": "import ctypes; ctypes.CDLL(None).fork()",
    "that stays": "import os, time\nif os.fork() == 0: time.sleep(60); os._exit(0)",
    "of a fork": "import os; os.fork(); os.fork()",
}


@pytest.mark.parametrize("code", FORKS.values(), ids=FORKS.keys())
def test_a_fork(executing, code):
    """The worker answers once, whatever its forks do."""
    executing.reset([{"number": 0}, {"number": 1}])
    pids = executing.worker_pids
    for turn in (1, 2):
        results = executing.step({0: code, 1: "pass"})
        assert [results[slot].observation.text for slot in (0, 1)] == [f"{slot} step {turn}" for slot in (0, 1)]
    assert executing.worker_pids == pids, "nothing was lost"


def test_programs_do_not_have_the_socket(executing, tmp_path):
    executing.reset([{"number": 0}])
    executing.step({0: f"import os; os.system('ls -l /proc/self/fd > {tmp_path}/seen')"})
    seen = (tmp_path / "seen").read_text()
    assert "/dev/null" in seen and "socket:" not in seen


SEEN = Observation("x\U0001f600é\0", "key", ["a", "b"], "task")
INFO = {"success": True, "score": 0.1, "deep": [{"a": None}], "big": 10**4000, "half": "\ud800", "none": None}
RESULTS = (
    None,
    ("exception", "it raised"),
    Observation("x"),
    SEEN,
    Observation("", admissible_actions=[]),
    StepResult(SEEN, -0.1, True, False, INFO),
    StepResult(Observation("x", "k"), 1e-300, info={}),
)


@pytest.mark.parametrize("result", RESULTS, ids=range(len(RESULTS)))
def test_answers_arrive_as_they_were_sent(result):
    answer = Answer(2**61 + 1, "0f", result)
    arrived = decode(encode(answer))
    assert arrived == answer and type(arrived.result) is type(result)


def changed(value):
    """The value with each of its parts left out, or replaced by something else."""
    yield from (None, True, 5, 1.5, float("inf"), "x", "\ud800", [], [1, 2], {}, {"score": "high"})
    if isinstance(value, (list, dict)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for other in changed(value[key]):
                yield {**value, key: other} if isinstance(value, dict) else [*value[:key], other, *value[key + 1 :]]
            without = copy.copy(value)
            del without[key]
            yield without


@pytest.mark.parametrize("result", RESULTS, ids=range(len(RESULTS)))
def test_what_is_decoded_keeps_the_contract(result):
    """Whatever bytes come, the trainer gets what `validate_step` would let through, or refuses them."""
    refused = 0
    for other in changed(json.loads(encode(Answer(1, "m", result)).decode("utf-8", "surrogatepass"))):
        try:
            answer = decode(json.dumps(other, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except InvalidAnswerError:
            refused += 1
            continue
        assert type(answer.job) is int and isinstance(answer.digest, (str, type(None)))
        if isinstance(answer.result, StepResult):
            assert validate_step(answer.result, "it") == answer.result
        elif isinstance(answer.result, Observation):
            assert validate_observation(answer.result, "it") == answer.result
        else:
            assert answer.result is None or list(map(type, answer.result)) == [str, str]
    assert refused > 20
