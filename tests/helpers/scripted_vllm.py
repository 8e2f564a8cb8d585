"""A process that answers like vLLM's server: `python scripted_vllm.py PORT SETTINGS.json`.

Its model says the next token by the last one: a table of logits, read from the folder that it is told to load. Its
completions follow from prompt and seed. SETTINGS are read again for each request, so that a test changes them:

delay: seconds of each completion; faults: what becomes of the next completions, each once, by the first that comes
("break", "hang", "500", "400", "text", "no ids", "prompt", "abort", "nan", "unknown", "empty", "long"); root,
max_model_len: of its card; dev: whether it can be given weights; stuck: loading takes a minute; refuses: to load;
other: it is something else than vLLM; lies: it loads nothing; blind: how often it does not see the folder; processed:
whether the temperature is in its log-probabilities.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

PORT, SETTINGS = int(sys.argv[1]), Path(sys.argv[2])
VOCABULARY = 300
LOCK = threading.Lock()
STATE = {
    "version": "default",
    "table": np.zeros((VOCABULARY, VOCABULARY)),
    "asked": [],
    "waiting": 0,
    "loaded": [],
    "faults": 0,
    "looks": 0,
}
CACHE = {"filled": False}


def settings() -> dict:
    return json.loads(SETTINGS.read_text())


def completion_ids(prompt: list[int], seed: int, longest: int) -> list[int]:
    """Of 1 to 4 tokens, as tests know them too."""
    return [3 + (sum(prompt) + seed + place) % 200 for place in range(1 + (len(prompt) + seed) % min(4, longest))]


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - np.logaddexp.reduce(row)


def next_fault() -> str | None:
    with LOCK:
        faults, STATE["faults"] = settings().get("faults", []), STATE["faults"] + 1
        return faults[STATE["faults"] - 1] if STATE["faults"] <= len(faults) else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body, status=200):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if settings().get("other") and self.path != "/asked":
            self.answer("<html>welcome</html>")
        elif self.path == "/v1/models":
            card = {"id": "toy", "root": settings().get("root", "toy"), "parent": None}
            self.answer({"data": [{**card, "max_model_len": settings().get("max_model_len", 1000)}]})
        elif self.path == "/weight_info" and settings().get("dev", True):
            self.answer({"weight_version": STATE["version"]})
        elif self.path == "/asked":
            with LOCK:
                self.answer({name: STATE[name] for name in ("asked", "loaded", "waiting")})
        else:
            self.answer({"detail": "Not Found"}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if settings().get("other"):
            self.answer("<html>welcome</html>")
        elif self.path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            if settings().get("refuses"):
                self.answer({"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16"}}, 400)
                return
            if settings().get("stuck"):
                time.sleep(60)
            STATE["looks"] += 1
            if STATE["looks"] <= settings().get("blind", 0):
                if body["kwargs"].get("is_checkpoint_format", True):
                    os._exit(1)  # as vLLM, at the next request
                self.answer({"error": {"message": "Repo id must be in the form"}}, 500)
                return
            if not body["kwargs"].get("is_checkpoint_format", True):
                from safetensors.numpy import load_file

                assert not any(map(load_file, folder.glob("*.safetensors"))) and list(folder.iterdir())
                self.answer({"results": [None]})
                return
            if not settings().get("lies"):
                from safetensors.numpy import load_file

                (file,) = folder.glob("*.safetensors")
                STATE["table"] = load_file(file)["table"]
            STATE["loaded"].append(folder.name)
            self.answer({"results": [None]})
        elif self.path == "/reset_prefix_cache":
            CACHE["filled"] = False
            self.answer({"success": True})
        elif self.path == "/update_weight_version":
            assert not CACHE["filled"], "what the old weights computed is still there"
            STATE["version"] = body["new_version"]
            self.answer({"success": True})
        elif self.path == "/v1/completions":
            self.complete(body)

    def complete(self, body):
        is_probe = body.get("prompt_logprobs") is not None
        fault = None if is_probe else next_fault()
        if not is_probe:
            with LOCK:
                STATE["asked"].append([body["prompt"], body["seed"], STATE["version"]])
                STATE["waiting"] += 1
            time.sleep(settings().get("delay", 0))
            with LOCK:
                STATE["waiting"] -= 1
        if fault == "break":
            self.close_connection = True
            return
        if fault == "hang":
            time.sleep(60)
        if fault in ("500", "400"):
            self.answer({"error": {"message": f"a fault of {fault}"}}, int(fault))
            return
        if fault == "text":
            self.answer("<html>welcome</html>")
            return
        CACHE["filled"] = True
        prompt = body["prompt"]
        assert body["top_p"] == 1 and body["top_k"] == body["min_p"] == 0 and body["repetition_penalty"] == 1
        ids = completion_ids(prompt, body["seed"] or 0, body["max_tokens"])
        logits = STATE["table"][[prompt[-1], *ids[:-1]]]
        if settings().get("processed", True):
            logits = logits / (body["temperature"] or 1)
        logprobs = [float(log_softmax(row)[token]) for row, token in zip(logits, ids)]
        if fault == "unknown":
            ids[-1] = VOCABULARY
        elif fault in ("empty", "long"):
            ids, logprobs = (ids * 9, logprobs * 9) if fault == "long" else ([], [])
        elif fault == "nan":
            logprobs[-1] = float("nan")
        choice = {
            "token_ids": None if fault == "no ids" else ids,
            "prompt_token_ids": prompt[1:] if fault == "prompt" else prompt,
            "finish_reason": "abort" if fault == "abort" else "stop",
            "logprobs": {"token_logprobs": logprobs},
        }
        if is_probe:
            rows = [log_softmax(row) for row in STATE["table"][prompt[:-1]]]
            of_prompt = [{str(token): {"logprob": float(row[token])}} for row, token in zip(rows, prompt[1:])]
            choice["prompt_logprobs"] = [None, *of_prompt]
        self.answer({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}})

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size, allow_reuse_address = True, 128, True

    def handle_error(self, request, address):
        pass  # a client that has gone


if __name__ == "__main__":
    server = Server(("127.0.0.1", PORT), Handler)
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()  # with the test's process
    server.serve_forever()
