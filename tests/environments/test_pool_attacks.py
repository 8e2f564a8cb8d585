"""Environments that execute what a model writes, and what that may do to its worker.

Nothing of it runs in the trainer, and only its own episode is lost.
"""

import os
import pickle
import struct

import pytest

from g2po_trl import EnvironmentPool, Observation, PoolLimits, StepResult, TextEnvironment
from g2po_trl.environments.pool.answers import Answer, InvalidAnswerError, decode, encode

# The worker's socket, as code finds it that was given nothing.
SOCKET = """
import os, pickle, socket, struct, time
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


class Runs:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def framed(message):
    return struct.pack("!Q", len(message)) + message


FORGED = b'[%d,0.0,"0","0",{"seen":["forged",null,null,null],"step":[10.0,true,false,{}]}]'
ATTACKS = {
    "garbage": "write(b'not a message at all')",
    "a huge message announced": "write(struct.pack('!Q', 1 << 40))",
    "an answer that nobody is owed": f"write({framed(FORGED.replace(b'%d', b'17'))!r})",
    "an answer for another episode": f"for n in range(3): write({framed(FORGED.replace(b'%d', b'1'))!r})",
    "a message of nothing": "write(bytes(8))",
    "nothing, a thousand times": "write(bytes(8000))",
    "half a message": "write(struct.pack('!Q', 50) + b'half')",
    "millions of bytes": "write(struct.pack('!Q', 20_000_000) + bytes(20_000_000))",
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


def test_half_a_message_and_silence():
    with EnvironmentPool(Executes, PoolLimits(1, environment_step_timeout=5)) as pool:
        pool.reset([{"number": 0}, {"number": 1}])
        results = pool.step({0: SOCKET + "write(struct.pack('!Q', 5000) + b'half')", 1: "pass"})
        assert results[0].kind == "timeout" and "more than 5 s" in results[0].message
        assert results[1].observation.text == "1 step 1"


def test_a_message_that_comes_in_drops():
    """No time limit is renewed by a byte now and then."""
    with EnvironmentPool(Executes, PoolLimits(1, environment_step_timeout=3)) as pool:
        pool.reset([{"number": 0}])
        drops = "write(struct.pack('!Q', 5000))\nwhile True: write(b'x'); time.sleep(0.2)"
        assert pool.step({0: SOCKET + drops})[0].kind == "timeout"


def test_a_pickle_is_not_loaded(executing, tmp_path):
    executing.reset([{"number": 0}, {"number": 1}])
    loaded = pickle.dumps((0.0, "mark", Runs(f"touch {tmp_path / 'ran'}")))
    results = executing.step({0: f"{SOCKET}write({framed(loaded)!r})", 1: "pass"})
    assert results[0].kind == "crash" and "an invalid message" in results[0].message
    assert results[1].observation.text == "1 step 1"
    assert not (tmp_path / "ran").exists(), "the trainer ran it"


FORKS = {
    "that comes back": "import os; os.fork()",
    "that comes back with an error": "import os\nif os.fork() == 0: raise RuntimeError('in the child')",
    "that leaves": "import os, sys\nif os.fork() == 0: sys.exit(3)",
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


def test_neither_forks_nor_programs_have_the_socket(executing):
    executing.reset([{"number": 0}])
    look = "ls -l /proc/self/fd | grep -c socket: > {path}; true"
    code = (
        "import os, tempfile\n"
        "for way in ('system', 'fork'):\n"
        "    path = tempfile.mktemp()\n"
        "    if way == 'system': os.system(f'{look}')\n"
        "    elif (child := os.fork()): os.waitpid(child, 0)\n"
        "    else:\n"
        "        links = [os.path.realpath(f'/proc/self/fd/{{n}}') for n in os.listdir('/proc/self/fd')]\n"
        "        open(path, 'w').write(str(sum('socket:' in link for link in links))); os._exit(0)\n"
        "    environment.number = str(environment.number) + ' ' + open(path).read().strip()\n"
    ).replace("{look}", look)
    assert executing.step({0: code.replace("{{n}}", "{n}")})[0].observation.text == "0 0 0 step 1"


class Answering:
    """Results of all kinds, as a worker checks them."""

    seen = Observation("x\ud83d\ude00é\0", "key", ["a", "b"], "task")
    info = {"success": True, "score": 0.1, "deep": [{"a": None}], "big": 10**4000, "half": "\ud800", "none": None}
    results = (
        None,
        ("exception", "it raised"),
        Observation("x"),
        seen,
        Observation("", admissible_actions=[]),
        StepResult(seen, -0.1, True, False, info),
        StepResult(Observation("x", "k"), 1e-300, info={}),
    )


@pytest.mark.parametrize("result", Answering.results, ids=range(len(Answering.results)))
def test_answers_arrive_as_they_were_sent(result):
    if isinstance(result, Observation) and "\ud83d" in result.text or isinstance(result, StepResult) and result.info:
        seen = Observation("x\U0001f600é\0", "key", ["a", "b"], "task")
        result = seen if isinstance(result, Observation) else StepResult(seen, -0.1, True, False, result.info)
    answer = Answer(2**61 + 1, 0.25, "0f", result)
    arrived = decode(encode(answer))
    assert arrived == answer and type(arrived.result) is type(result)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[1,0.0,null]",
        b'[1.5,0.0,"m",null]',
        b'["1",0.0,"m",null]',
        b'[true,0.0,"m",null]',
        b'[1,-1.0,"m",null]',
        b'[1,NaN,"m",null]',
        b'[1,Infinity,"m",null]',
        b"[1,0.0,5,null]",
        b'[1,0.0,"m",5]',
        b'[1,0.0,"m",["crash","x"]]',
        b'[1,0.0,"m",["exception",5]]',
        b'[1,0.0,"m",{}]',
        b'[1,0.0,"m",{"seen":[5,null,null,null]}]',
        b'[1,0.0,"m",{"seen":["\\ud800",null,null,null]}]',
        b'[1,0.0,"m",{"seen":["x",null,"abc",null]}]',
        b'[1,0.0,"m",{"seen":["x",null,[5],null]}]',
        b'[1,0.0,"m",{"seen":["x",null,null,null]}]\0bytes',
        b'[1,0.0,"m",{"seen":["x",null,null,null],"step":[1e999,false,false,{}]}]',
        b'[1,0.0,"m",{"seen":["x",null,null,null],"step":["1",false,false,{}]}]',
        b'[1,0.0,"m",{"seen":["x",null,null,null],"step":[1,0,false,{}]}]',
        b'[1,0.0,"m",{"seen":["x",null,null,null],"step":[1,false,false,[]]}]',
        b'[1,0.0,"m",{"seen":["x",null,null,null],"step":[1,false,false,{"score":"high"}]}]',
        pickle.dumps((0.0, "m", None)),
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_refused(message):
    with pytest.raises(InvalidAnswerError):
        decode(message)


def test_an_answer_that_cannot_be_sent_is_invalid():
    class Large(TextEnvironment):
        def reset(self):
            return Observation("x")

        def step(self, action):
            return StepResult("x", info={"digits": 10**5000} if action == "digits" else {})

    with EnvironmentPool(Large, PoolLimits(1)) as pool:
        pool.reset([{}, {}])
        results = pool.step({0: "digits", 1: "go"})
        assert results[0].kind == "invalid" and "cannot be sent to the trainer" in results[0].message
        assert results[1] == StepResult(Observation("x"))
