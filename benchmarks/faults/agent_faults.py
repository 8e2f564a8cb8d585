"""What becomes of agents' episodes whose workers are killed, and of requests that are not well-formed.

    python -m benchmarks.faults.agent_faults --output benchmarks/results/agent_faults

32 episodes at once, of agents that ask 8 times by each protocol in turn: workers are killed with SIGKILL until 200
have died, and each episode is compared with the same one undisturbed. Then 60,000 requests to one endpoint, from 16
clients: valid ones of each protocol of which values, bytes, headers, lengths or paths were changed. Each that is
whole must be answered, none with a status of 500 or more, and a valid one at the end as at the beginning. Clients of
others send no more, and may find the connection closed. What is left is counted: processes, files, memory. Prints and
writes the command, the machine, the seed and every count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import psutil

from benchmarks.common import facts, write_results
from benchmarks.speed.agents import ANSWER, PROTOCOLS, agent, route_of
from g2po_trl import AgentEnvironment, EnvironmentPool, PoolLimits
from g2po_trl.agents.endpoint import running_endpoint
from g2po_trl.agents.session import AgentEnd
from g2po_trl.prompts.conversation import ChatResponse

TURNS, EPISODES, SECONDS, PER_EPISODE = 8, 32, 20.0, 2_000
JUNK = [
    None,
    True,
    -1,
    1e308,
    "",
    "\x00",
    "\ud800",
    "x" * 10_000,
    [],
    {},
    [[]],
    {"a": {"a": []}},
    "data:image/png;base64,",
]


def play(pool: EnvironmentPool, tasks: list[dict], kill: random.Random | None = None) -> tuple[list[list], int]:
    """Play all tasks at once; return what each saw, and how many workers `kill` killed before the rounds."""
    seen, killed = [[answer] for answer in pool.reset(tasks)], 0
    while live := [slot for slot, answers in enumerate(seen) if not _is_over(answers[-1])]:
        if kill is not None:
            os.kill(kill.choice(pool.worker_pids), signal.SIGKILL)
            killed += 1
        for slot, answer in pool.step(dict.fromkeys(live, ANSWER)).items():
            seen[slot].append(answer)
    return seen, killed


def _is_over(answer) -> bool:
    return hasattr(answer, "kind") or getattr(answer, "terminated", False) or getattr(answer, "truncated", False)


def kills(total: int, seed: int) -> dict:
    """Return how episodes ended while `total` workers died, and what is left."""
    endings, as_before, rng, killed = Counter(), 0, random.Random(seed), 0
    before = _left()
    for number in range(10**6):
        if killed >= total:
            break
        protocol = list(PROTOCOLS)[number % len(PROTOCOLS)]
        make = partial(AgentEnvironment, partial(agent, protocol=protocol, stream=False), TURNS + 1)
        tasks = [{"seed": seed, "turns": TURNS} for seed in range(EPISODES)]
        with EnvironmentPool(make, PoolLimits(num_environment_workers=4)) as pool:
            undisturbed, _ = play(pool, tasks)
            disturbed, died = play(pool, tasks, rng)
        killed += died
        endings.update(getattr(answers[-1], "kind", "ended") for answers in disturbed)
        as_before += sum(map(_same, disturbed, undisturbed))
    return {"killed": killed, "endings": dict(endings), "as undisturbed": as_before, "before": before, "left": _left()}


def _same(one: list, other: list) -> bool:
    return [_facts(answer) for answer in one] == [_facts(answer) for answer in other]


def _facts(answer) -> tuple:
    observation = getattr(answer, "observation", answer)
    return getattr(observation, "text", None), getattr(answer, "reward", None), getattr(answer, "kind", None)


def _left() -> dict[str, float]:
    process = psutil.Process()
    mine = process.children(recursive=True)
    return {"children": len(mine), "files": process.num_fds(), "MiB": round(process.memory_info().rss / 2**20)}


def mutated(rng: random.Random, host: str, key: str) -> tuple[bytes, bool]:
    """Return the bytes of a request with one to four faults, and whether it is whole: an answer is owed."""
    protocol, stream = rng.choice(list(PROTOCOLS)), rng.random() < 0.3
    path, (_, written) = route_of(protocol, stream), PROTOCOLS[protocol]
    value = {"model": "policy", "stream": stream, **written(["word"] * rng.randint(1, 4))}
    headers = {"Host": host, "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    faults = rng.choices(("value", "remove", "bytes", "length", "header", "path", "cut"), k=rng.randint(1, 4))
    for fault in faults:
        if fault in ("value", "remove"):
            _change(rng, value, fault)
    body = bytearray(json.dumps(value).encode())
    length = len(body)
    for fault in faults:
        if fault == "bytes" and body:
            for _ in range(rng.randint(1, 5)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        elif fault == "length":
            length = rng.choice((0, -1, length + 5, length // 2, 10**12))
        elif fault == "header":
            name = rng.choice(("Authorization", "Content-Type", "Content-Encoding", "Transfer-Encoding", "Expect"))
            headers[name] = rng.choice(("", "chunked", "gzip", "100-continue", "Bearer x", "\xff\xfe", "x" * 20_000))
        elif fault == "path":
            path = rng.choice((path + "/", "/models", "/../etc", "/" + "a" * 5_000, path.upper(), path + "?x=%ff"))
    if "cut" in faults:
        body = body[: rng.randrange(len(body) + 1)]
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    is_whole = length == len(body) and "header" not in faults
    return head.encode("latin-1") + f"Content-Length: {length}\r\n\r\n".encode() + bytes(body), is_whole


def _change(rng: random.Random, value: dict, fault: str) -> None:
    """Change or remove one value, at any depth."""
    places, waiting = [], [value]
    while waiting:
        inside = waiting.pop()
        for place in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, place))
            if isinstance(inside[place], (dict, list)):
                waiting.append(inside[place])
    inside, place = rng.choice(places or [({}, "x")])
    if fault == "remove" and inside:
        del inside[place]
    else:
        inside[place] = rng.choice(JUNK)


def send(address: tuple[str, int], request: bytes, is_whole: bool = True) -> str:
    """Return the status of the answer to a request; the client of one that is not whole sends no more."""
    with socket.create_connection(address, timeout=SECONDS) as connection:
        try:
            connection.sendall(request)
            if not is_whole:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(2**16):
                answer += part
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return answer[9:12].decode("latin-1") if answer else "closed"


def requests(total: int, seed: int) -> dict:
    """Return the statuses of mutated requests, and whether the endpoint then answers as before.

    An episode keeps its requests, so each has 2,000 of them: what grows beyond it is never given back.
    """
    endpoint = running_endpoint()
    counts, bad, memory, valid = Counter(), [], [], []
    for number in range(max(1, total // PER_EPISODE)):
        valid += _episode(endpoint, min(total, PER_EPISODE), f"{seed} {number}", counts, bad)
        memory.append([sum(counts.values()), _left()["MiB"]])
    statuses = dict(sorted(counts.items()))
    return {"statuses": statuses, "valid": Counter(valid), "memory": memory, "bad": bad[:20], "left": _left()}


def _episode(endpoint, total: int, seed: str, counts: Counter, bad: list[str]) -> list[str]:
    """Send an episode's requests from 16 clients; return the statuses of a valid one before and after them."""
    address = ("127.0.0.1", endpoint.server_port)
    session, lock = endpoint.open_session(max_turns=10**9, max_requests=10**9), threading.Lock()

    def answer_all() -> None:
        while not isinstance(call := session.next(), AgentEnd):
            session.answer(call, ChatResponse.read(ANSWER))

    model = threading.Thread(target=answer_all, daemon=True)
    model.start()
    path, written = PROTOCOLS["chat completions"]
    body = json.dumps({"model": "policy", **written(["word"])}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\nContent-Length: {len(body)}"
    request_of_all = f"{head}\r\n\r\n".encode() + body
    first = send(address, request_of_all)

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for _ in range(total // 16):
            request, is_whole = mutated(rng, "127.0.0.1", session.key)
            status = send(address, request, is_whole)
            with lock:
                counts[f"{'whole' if is_whole else 'not whole'}: {status}"] += 1
                if status.startswith("5") or status == "no answer" or (is_whole and status == "closed"):
                    bad.append(repr(request[:2000]))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    last = send(address, request_of_all)
    session.end(AgentEnd())
    model.join()
    endpoint.close_session(session)
    return [first, last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = {"kills": kills(args.kills, args.seed), "requests": requests(args.requests, args.seed)}
    print(json.dumps(found, indent=1))
    write_results(args.output, {**facts("uvicorn", "h11"), "seed": args.seed, **found})


if __name__ == "__main__":
    main()
