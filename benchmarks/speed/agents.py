"""Agents' requests per second through each protocol, and what is left after many episodes.

    python -m benchmarks.speed.agents --output benchmarks/results/agents

32 episodes at once, each of 20 requests whose conversation grows, streamed and not, answered at once by a script in
place of a model. The agent speaks HTTP by the standard library, so that no client's time counts. Protocols take turns.
Then 500 episodes, whose workers' memory, threads, files and sockets are counted every 100. Prints and writes the
command, the machine and every value.
"""

import argparse
import http.client
import json
import random
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.common import facts, interleaved, write_results
from g2po_trl import AgentEnvironment, EnvironmentPool, PoolLimits
from g2po_trl.prompts.conversation import ChatResponse

TOOL = {
    "name": "run",
    "description": "Run a command.",
    "schema": {"type": "object", "properties": {"c": {"type": "string"}}},
}
WORDS = [f"word{number}" for number in range(200)]
CALL = {"type": "function", "function": {"name": "run", "arguments": {"c": "ls"}}}
ANSWER = ChatResponse("I look.", (CALL,), "tool_calls", 100, 10).to_action()


def chat(texts: list[str]) -> dict:
    """A conversation in chat completions: a system message, then calls and their results."""
    messages = [{"role": "system", "content": texts[0]}, {"role": "user", "content": "Go on."}]
    for number, text in enumerate(texts[1:], 1):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "run", "arguments": '{"c": "ls"}'}}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


def responses(texts: list[str]) -> dict:
    """The same conversation as items of Responses."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]
    for number, text in enumerate(texts[1:], 1):
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]})
        items.append({"type": "function_call", "call_id": f"call_{number}", "name": "run", "arguments": '{"c": "ls"}'})
        items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": text})
    tool = {"type": "function", "name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}
    return {"instructions": texts[0], "input": items, "tools": [tool]}


def messages(texts: list[str]) -> dict:
    """The same conversation as blocks of Messages."""
    made = [{"role": "user", "content": "Go on."}]
    for number, text in enumerate(texts[1:], 1):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "run", "input": {"c": "ls"}}
        made.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]})
        made.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]})
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["schema"]}
    return {"system": [{"type": "text", "text": texts[0]}], "messages": made, "tools": [tool], "max_tokens": 1000}


def generate_content(texts: list[str]) -> dict:
    """The same conversation as contents of generateContent."""
    contents = [{"role": "user", "parts": [{"text": "Go on."}]}]
    for text in texts[1:]:
        call = {"functionCall": {"name": "run", "args": {"c": "ls"}}}
        contents.append({"role": "model", "parts": [{"text": "I look."}, call]})
        result = {"functionResponse": {"name": "run", "response": {"output": text}}}
        contents.append({"role": "user", "parts": [result]})
    function = {"name": TOOL["name"], "description": TOOL["description"], "parametersJsonSchema": TOOL["schema"]}
    instruction = {"parts": [{"text": texts[0]}]}
    return {"systemInstruction": instruction, "contents": contents, "tools": [{"functionDeclarations": [function]}]}


PROTOCOLS = {
    "chat completions": ("/v1/chat/completions", chat),
    "Responses": ("/v1/responses", responses),
    "Messages": ("/v1/messages", messages),
    "generateContent": ("/v1beta/models/policy:generateContent", generate_content),
}


def route_of(protocol: str, stream: bool) -> str:
    """Return the path of a request; only Google's says whether the answer is streamed."""
    path = PROTOCOLS[protocol][0]
    return path.replace(":generate", ":streamGenerate") + "?alt=sse" if stream and ":generate" in path else path


def agent(task: dict, client, protocol: str, stream: bool) -> float:
    """Ask `task["turns"]` times, with a conversation that grows by 200 words a turn."""
    path, (_, written) = route_of(protocol, stream), PROTOCOLS[protocol]
    rng, url = random.Random(task["seed"]), urlsplit(client.base_url)
    texts = [" ".join(rng.choices(WORDS, k=2000))]
    for _ in range(task["turns"]):
        body = json.dumps({"model": client.model, "stream": stream, **written(texts)})
        connection = http.client.HTTPConnection(url.hostname, url.port)
        headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200 or b'"run"' not in answer:
            raise RuntimeError(f"{path} answered {response.status}: {answer[:500]!r}")
        connection.close()
        texts.append(" ".join(rng.choices(WORDS, k=200)))
    return 1.0


def play(pool: EnvironmentPool, tasks: list[dict]) -> float:
    """Play all tasks at once; return requests per second."""
    started, count = time.perf_counter(), 0
    live = set(range(len(pool.reset(tasks))))
    while live:
        results = pool.step(dict.fromkeys(live, ANSWER))
        count += len(results)
        live -= {slot for slot, result in results.items() if result.terminated or result.truncated}
        if failed := [result for result in results.values() if result.terminated and result.reward != 1.0]:
            raise RuntimeError(failed[0].info)
    return count / (time.perf_counter() - started)


def left(pool: EnvironmentPool) -> dict[str, float]:
    """Memory in MiB (proportional share), threads, files and sockets of all workers, and their children."""
    workers = [psutil.Process(pid) for pid in pool.worker_pids]
    return {
        "memory": sum(worker.memory_full_info().pss for worker in workers) / 2**20,
        "threads": sum(worker.num_threads() for worker in workers),
        "files": sum(worker.num_fds() for worker in workers),
        "children": sum(len(worker.children(recursive=True)) for worker in workers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=32, help="at once")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--total", type=int, default=500, help="episodes after which the workers are looked at")
    args = parser.parse_args()

    kinds = [(protocol, stream) for stream in (False, True) for protocol in PROTOCOLS]
    limits = PoolLimits(num_environment_workers=2)
    pools = {
        kind: EnvironmentPool(
            partial(AgentEnvironment, partial(agent, protocol=kind[0], stream=kind[1]), args.turns + 1), limits
        )
        for kind in kinds
    }
    tasks = [{"seed": seed, "turns": args.turns} for seed in range(args.episodes)]
    try:
        rates = interleaved(
            {
                f"{protocol}{', streamed' if stream else ''}": partial(_play, pools[protocol, stream], tasks)
                for protocol, stream in kinds
            },
            args.repetitions,
        )
        pool, seen = pools[kinds[0]], []
        for start in range(0, args.total + 1, args.episodes):
            seen.append({"episodes": start, **left(pool)})
            play(pool, tasks)
    finally:
        for pool in pools.values():
            pool.close()
    base = sorted(rates["chat completions"])[args.repetitions // 2]
    for name, values in rates.items():
        median = sorted(values)[len(values) // 2]
        print(f"{name:28} {median:7.0f} requests a second, {median / base:5.2f} of chat completions", flush=True)
    for one in seen[:: max(1, len(seen) // 5)]:
        print({name: round(value) for name, value in one.items()})
    write_results(
        args.output,
        {**facts(), "seeds": [task["seed"] for task in tasks], "rates": rates, "left": seen},
    )


def _play(pool: EnvironmentPool, tasks: list[dict], repetition: int) -> float:
    return play(pool, tasks)


if __name__ == "__main__":
    main()
