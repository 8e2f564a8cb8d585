"""Rollouts by servers in processes of their own, that die, hang, answer nonsense and come back."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import build_tokenizer

from g2po_trl.engines.base import EngineParts
from g2po_trl.engines.sampling import Sampling
from g2po_trl.engines.weight_folder import WeightFolder
from g2po_trl.experimental.vllm_servers.client import Server, Servers, ServerUnavailable, run, start
from g2po_trl.experimental.vllm_servers.engine import ServedVLLMEngine

SCRIPT = Path(__file__).parents[1] / "helpers" / "scripted_vllm.py"
VOCABULARY = 300
SAMPLING = Sampling(temperature=0.7, max_completion_length=4)
PROMPTS = [[10 + row, 20, 30 + row % 3] for row in range(24)]
SEEDS = [1000 + row for row in range(24)]


def completion_ids(prompt, seed, longest=4):
    return [3 + (sum(prompt) + seed + place) % 200 for place in range(1 + (len(prompt) + seed) % min(4, longest))]


class ScriptedServer:
    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.settings = f"http://127.0.0.1:{self.port}", folder / f"{self.port}.json"
        self.set()

    def set(self, **settings):
        staged = self.settings.with_suffix(".staged")
        staged.write_text(json.dumps(settings))
        staged.rename(self.settings)

    def start(self, **settings):
        self.set(**settings)
        self.process = subprocess.Popen([sys.executable, SCRIPT, str(self.port), self.settings], stdin=subprocess.PIPE)
        return self

    def wait(self):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                return self.read()
            except OSError:
                time.sleep(0.02)
        raise AssertionError("it does not start")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def read(self):
        with urllib.request.urlopen(f"{self.url}/asked", timeout=5) as answer:
            return json.load(answer)


@contextmanager
def serving(folder, *settings):
    servers = [ScriptedServer(folder).start(**how) for how in settings]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()


class Table(torch.nn.Module):
    """The next token by the last one."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.config = SimpleNamespace(vocab_size=VOCABULARY, _name_or_path="toy", hidden_size=64)
        self.config.get_text_config = lambda: self.config

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def make_engine(tokenizer, servers, folder, model=None, patience=0.3, **options):
    model = model or Table()

    @contextmanager
    def generation_model(config):
        with torch.no_grad():
            yield model

    @contextmanager
    def gather(parameters):
        yield

    accelerator = SimpleNamespace(
        process_index=0, num_processes=1, is_main_process=True, device=torch.device("cpu"), wait_for_everyone=lambda: 0
    )
    args = SimpleNamespace(temperature=SAMPLING.temperature, max_prompt_length=400, max_completion_length=100)
    args.vllm_importance_sampling_correction = True
    parts = EngineParts(args, tokenizer, [2], accelerator, lambda: model, generation_model, gather)
    urls = [server.url for server in servers]
    return ServedVLLMEngine(parts, urls, folder / "weights", patience, **options)


def check_completions(completions, model, rows=range(24)):
    """Each is the one that follows from its prompt and seed, with log-probabilities of this model."""
    for row in rows:
        ids = completion_ids(PROMPTS[row], SEEDS[row])
        assert completions[row].ids == ids
        logits = model.table.detach()[[PROMPTS[row][-1], *ids[:-1]]] / SAMPLING.temperature
        expected = logits.log_softmax(-1)[range(len(ids)), ids]
        assert completions[row].logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def stream(engine, rows, at_once=4, on_completion=lambda number: None):
    """As a rollout does: another is asked as soon as one has answered."""
    rows, completions, number = list(rows), {}, 0
    for row in rows[:at_once]:
        engine.submit(row, PROMPTS[row], SAMPLING, SEEDS[row])
    for row in rows[at_once:] + [None] * min(at_once, len(rows)):
        while len(completions) <= number:
            completions.update(engine.poll(1.0))
        number += 1
        on_completion(number)
        if row is not None:
            engine.submit(row, PROMPTS[row], SAMPLING, SEEDS[row])
    return completions


def left_out(engine):
    return engine.metrics()["rollout/servers_left_out"]


def test_the_server_with_the_fewest_requests_is_asked():
    servers = Servers(["http://a", "http://b", "http://c"], first=1)
    a, b, c = servers.all
    assert [servers.acquire() for _ in range(4)] == [b, c, a, b], "ranks begin at different ones"
    c.in_flight -= 1
    assert servers.acquire() is c
    servers.exclude(c, "it died")
    assert [servers.acquire() for _ in range(3)] == [a, b, a]
    servers.exclude(a, "as well"), servers.exclude(b, "too")
    assert servers.acquire() is None and "http://b: too" in servers.reasons()


@pytest.mark.parametrize("slowly", ["its headers", "its body"])
def test_a_response_has_its_time_as_a_whole(slowly):
    """A server that says a little now and then is late, too. Left alone, it would answer."""
    head, body = b"HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n", b'"' + b"x" * 23 + b'"'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(1000)
                connection.sendall(b"" if slowly == "its headers" else head)
                for byte in head + body if slowly == "its headers" else body:
                    time.sleep(0.1)
                    connection.sendall(bytes([byte]))

        threading.Thread(target=answer, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(ServerUnavailable, match="no answer in 1 s"):
            run(server.complete({}, timeout=1))


def test_a_connection_that_the_server_has_closed_is_not_used_again():
    """As vLLM closes one that is idle for 5 s: the server has not failed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            for _ in range(2):
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    while b"}" not in connection.recv(1000):
                        pass
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert run(server.complete({}, 20.0)) == {}
        time.sleep(0.2)
        assert run(server.complete({}, 20.0)) == {}
        answering.join(20)


def test_servers_die_in_mid_rollout_and_come_back(tokenizer, tmp_path):
    """By SIGKILL, one of two, then both; started again with other weights, then given the newest ones."""
    model = Table()
    with serving(tmp_path, {}, {"delay": 0.3}) as (fast, slow):
        engine = make_engine(tokenizer, (fast, slow), tmp_path, model, patience=10)
        assert not list((tmp_path / "weights").iterdir())
        with engine.rollout():
            completions = stream(engine, range(24))
        check_completions(completions, model)
        asked = [len(server.read()["asked"]) for server in (fast, slow)]
        assert sum(asked) == 24 and asked[0] >= 2 * asked[1] > 0, "the slow one has fewer under way to finish"
        assert all(completion.repeats == 0 and completion.cached_tokens == 2 for completion in completions.values())
        (first,) = (path.name for path in (tmp_path / "weights").iterdir())

        with torch.no_grad():
            model.table += 1.0 * torch.randn(model.table.shape)

        def kill_slow(number):
            if number == 5:
                slow.kill()

        with engine.rollout():
            assert engine.sync_difference < 1e-5
            completions = stream(engine, range(24), on_completion=kill_slow)
            check_completions(completions, model)
            assert left_out(engine) == 1
            # Started again within the rollout it has weights of its own, and is not asked.
            slow.start().wait()
            check_completions(stream(engine, range(24)), model)
            assert not slow.read()["asked"]
        assert 1 <= sum(completion.repeats for completion in completions.values()) <= 4
        (second,) = (path.name for path in (tmp_path / "weights").iterdir())
        assert second != first, "the old version is removed"
        versions = [version for _, _, version in fast.read()["asked"]]
        assert versions.count(first) >= 24 / 2 and set(versions) == {first, second}

        with engine.rollout():
            assert left_out(engine) == 0
            check_completions(stream(engine, range(24)), model)
            loaded = [server.read()["loaded"] for server in (fast, slow)]
            assert len(loaded[0]) == 3 and loaded[1] == loaded[0][2:]
            assert slow.read()["asked"]

            def kill_both(number):
                if number == 5:
                    fast.kill(), slow.kill()
                    threading.Timer(0.5, slow.start).start()

            completions = stream(engine, range(24), on_completion=kill_both)
            check_completions(completions, model)
            assert left_out(engine) == 1 and sum(completion.repeats for completion in completions.values()) >= 1
            slow.kill()
            engine.patience = 0.3
            with pytest.raises(RuntimeError, match="no server answers, for 0.3 s"):
                stream(engine, range(24))
        engine.close()
        assert not list((tmp_path / "weights").iterdir())


def test_a_server_that_was_started_again_unseen_is_not_asked(tokenizer, tmp_path):
    """No connection of ours broke: behind the same address there is another process, with other weights."""
    with serving(tmp_path, {}, {}) as (one, two):
        model = Table()
        engine = make_engine(tokenizer, (one, two), tmp_path, model)
        with engine.rollout():
            two.kill()
            two.start().wait()
            completions = stream(engine, range(24))
            assert left_out(engine) == 1 and not two.read()["asked"]
            check_completions(completions, model)
        engine.close()


FAULTS = ("break", "hang", "500", "text", "no ids", "prompt", "abort", "nan", "unknown", "empty", "long")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_is_asked_of_another(tokenizer, tmp_path, shared_pair, fault):
    good, bad = shared_pair
    model = Table()
    bad.set(faults=["fine"] * bad.completions() + [fault])
    engine = make_engine(tokenizer, (good, bad), tmp_path, model, request_timeout=0.5)
    with engine.rollout():
        completions = engine.generate(PROMPTS, SAMPLING, SEEDS)
        assert left_out(engine) == 1
    check_completions(completions, model)
    assert sum(completion.repeats for completion in completions) >= 1
    assert "".join(server.lost or "" for server in engine.servers.all) and engine.servers.all[0].lost is None
    engine.close()


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("servers"), {}, {}) as servers:
        for server in servers:
            server.completions = lambda server=server: len(server.read()["asked"])
        yield servers


def test_a_refused_request_ends_the_run(tokenizer, tmp_path, shared_pair):
    good, bad = shared_pair
    bad.set(faults=["fine"] * bad.completions() + ["400"])
    engine = make_engine(tokenizer, (good, bad), tmp_path)
    with engine.rollout(), pytest.raises(RuntimeError, match="rejects a request: HTTP 400: .*a fault of 400"):
        engine.generate(PROMPTS, SAMPLING, SEEDS)
    engine.close()


def test_what_is_unanswered_is_abandoned(tokenizer, tmp_path, shared_pair):
    model = Table()
    for server in shared_pair:
        server.set(delay=600.0)
    engine = make_engine(tokenizer, shared_pair, tmp_path, model)
    with engine.rollout():
        for row in range(4):
            engine.submit(row, PROMPTS[row], SAMPLING, SEEDS[row])
        assert engine.poll(0.1) == {}
    for server in shared_pair:
        server.set()
    with engine.rollout():
        completions = stream(engine, range(24))
    check_completions(completions, model)
    assert all(server.read()["waiting"] == 2 for server in shared_pair), "they are not waited for"
    engine.close()


def test_a_server_sees_the_folder_late_or_never(tokenizer, tmp_path, monkeypatch):
    """And lives: it is asked to load what it sees alone."""
    monkeypatch.setattr("g2po_trl.experimental.vllm_servers.weight_sync.FOLDER_TIMEOUT", 1.0)
    with serving(tmp_path, {"blind": 2}) as (server,):
        engine = make_engine(tokenizer, [server], tmp_path)
        with engine.rollout():
            assert len(server.read()["loaded"]) == 1
        server.set(blind=1000)
        with pytest.raises(RuntimeError, match="no server .* does not see .*: set weights_folder to"):
            with engine.rollout():
                pass
        server.read()
        engine.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lies": True}, "differ from the trainer's by .* nats"),
        ({"processed": False}, "start it with --logprobs-mode processed_logprobs"),
    ],
)
def test_servers_with_other_weights_or_log_probabilities(tokenizer, tmp_path, settings, words):
    with serving(tmp_path, settings) as servers:
        engine = make_engine(tokenizer, servers, tmp_path)
        with pytest.raises(RuntimeError, match=words), engine.rollout():
            pass
        engine.close()


def test_what_is_refused_before_anything_is_lost(tokenizer, tmp_path, shared_pair):
    good, bad = shared_pair
    for settings, words in [
        ({"dev": False}, f"{bad.url}, which cannot be given weights .*VLLM_SERVER_DEV_MODE=1"),
        ({"max_model_len": 100}, "takes 100 tokens, fewer than .* = 500"),
    ]:
        bad.set(**settings)
        with pytest.raises(ValueError, match=words):
            make_engine(tokenizer, (good, bad), tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SimpleNamespace(url=f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ValueError, match=f"{nobody.url}, which does not answer, for 0.3 s .*ConnectionRefused"):
            make_engine(tokenizer, (good, nobody), tmp_path)
    bad.set()


def test_a_folder_that_cannot_be_written(tokenizer, tmp_path, shared_pair):
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(ValueError, match="weights_folder"):
        make_engine(tokenizer, shared_pair, tmp_path)


def test_what_is_no_longer_vllm_is_left_out(tokenizer, tmp_path, shared_pair):
    """At the end of a rollout, at the beginning of the next, and when nobody else is left."""
    good, bad = shared_pair
    good.set(), bad.set()
    engine = make_engine(tokenizer, (good, bad), tmp_path)
    with engine.rollout():
        bad.set(other=True)
    with engine.rollout():
        assert left_out(engine) == 1 and "not vLLM's" in engine.servers.all[1].lost
        assert len(engine.generate(PROMPTS, SAMPLING, SEEDS)) == 24
        good.set(other=True)
        with pytest.raises(RuntimeError, match="no server answers, for 0.3 s"):
            engine.generate(PROMPTS, SAMPLING, SEEDS)
    good.set(), bad.set()
    engine.close()


def test_interrupted_while_a_server_loads(tokenizer, tmp_path):
    """Ctrl-C does not wait for a server that hangs."""
    with serving(tmp_path, {"stuck": True}) as servers:
        engine = make_engine(tokenizer, servers, tmp_path)
        threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt), engine.rollout():
            pass
        assert time.monotonic() - started < 50, "not the server's minute"
        engine.close()


def test_a_server_that_refuses_the_first_weights_ends_the_run_at_once(tokenizer, tmp_path, shared_pair):
    for server in shared_pair:
        server.set(refuses=True)
    engine = make_engine(tokenizer, shared_pair, tmp_path, patience=60)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="has not loaded .*rank 64 is greater than max_lora_rank"), engine.rollout():
        pass
    assert time.monotonic() - started < 50, "not the minute of its patience"
    for server in shared_pair:
        server.set()
    engine.close()


def test_nobody_asks_while_a_server_gets_weights(tokenizer, tmp_path):
    """It has come back with weights of its own, and a request that waited for it connects before it has the newest."""
    with serving(tmp_path, {}) as (server,):
        engine = make_engine(tokenizer, [server], tmp_path)
        with engine.rollout():
            server.kill()
            server.start(stuck=True).wait()
            (of_engine,) = engine.servers.all
            loading = start(engine.weight_sync.load(of_engine))
            time.sleep(0.3)
            with pytest.raises(ServerUnavailable, match="other weights"):
                run(of_engine.complete({"prompt": [1]}, 1.0))
            assert loading.cancel()
            assert not server.read()["asked"]
        engine.close()


class FirstComeFirst(list):
    """A set, in order."""

    add = list.append

    def discard(self, one):
        if one in self:
            self.remove(one)


def test_what_nobody_wants_is_not_asked(tokenizer, tmp_path, shared_pair, monkeypatch):
    """A request that waits for another one to be answered as the rollout ends, however long ending the other takes."""
    cancel = Future.cancel
    monkeypatch.setattr(Future, "cancel", lambda request: (cancel(request), time.sleep(0.1))[0])
    monkeypatch.setattr("g2po_trl.experimental.vllm_servers.engine.MOST_AT_ONCE", 1)
    complete, asked = ServedVLLMEngine._complete, []
    monkeypatch.setattr(
        ServedVLLMEngine, "_complete", lambda engine, one: (asked.append(one.key), complete(engine, one))[1]
    )
    server, _ = shared_pair
    server.set(delay=600.0)
    engine = make_engine(tokenizer, [server], tmp_path)
    engine._requests = FirstComeFirst()
    with engine.rollout():
        for row in range(3):
            engine.submit(row, PROMPTS[row], SAMPLING, SEEDS[row])
        assert engine.poll(0.3) == {}
    server.set()
    with engine.rollout():
        engine.submit(3, PROMPTS[3], SAMPLING, SEEDS[3])
        assert list(engine.poll(20.0)) == [3]
    assert asked == [0, 3]
    engine.close()


def test_an_abandoned_request_closes_its_connection():
    """So that the server stops computing it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        request = start(Server(f"http://127.0.0.1:{listening.getsockname()[1]}").complete({"prompt": [1]}, 60.0))
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(20)
            assert b"POST /v1/completions" in connection.recv(65536)
            assert not request.done() and request.cancel()
            while connection.recv(65536):  # the rest of the request, then the end
                pass


def test_versions_of_weights_are_complete_or_not_there(tmp_path):
    (tmp_path / "g2po-weights-old-3").mkdir()
    (tmp_path / ".g2po-weights-old-4").mkdir()
    (tmp_path / "mine").mkdir()
    folder = WeightFolder(tmp_path, writes=True, shard_bytes=100)
    folder.open()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    weights = {f"w{n}": torch.full((15,), float(n)) for n in range(4)}
    first = folder.save(weights.items())
    from safetensors.torch import load_file

    files = sorted(first.glob("*.safetensors"))
    assert len(files) == 4
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)

    iterated = []

    def until_the_disk_is_full():
        for name, value in weights.items():
            iterated.append(name)
            yield name, value
            if name == "w1":
                (tmp_path / f".{first.name[:-1]}2").rename(tmp_path / "gone")

    with pytest.raises(Exception, match="No such file"):
        folder.save(until_the_disk_is_full())
    assert len(iterated) == 4, "other ranks gather weights until the end"
    nowhere = WeightFolder(tmp_path / "nowhere", writes=True)
    with pytest.raises(FileNotFoundError):
        nowhere.save((iterated.append(name) or (name, value)) for name, value in weights.items())
    assert len(iterated) == 8, "also if there is nowhere to write to"
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, "gone", "mine"]
    second = folder.save(weights.items())
    folder.keep_only(second)
    assert sorted(path.name for path in tmp_path.iterdir()) == [second.name, "gone", "mine"]
    another_run = WeightFolder(tmp_path, writes=True)
    its = another_run.save(weights.items())
    folder.keep_only(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([its.name, "gone", "mine"])
    second = folder.save(weights.items())
    another_run.keep_only(None)
    others = WeightFolder(tmp_path, writes=False)
    others.save(weights.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [second.name, "gone", "mine"]
