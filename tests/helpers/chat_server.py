"""Servers on loopback whose answers a test writes."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, data = self.server.respond(self.path, text, self.headers)
        content = (data if isinstance(data, str) else json.dumps(data)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **self.server.answer_headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@contextmanager
def scripted_server(respond):
    """`respond(path, text, headers) -> (status, data)`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.respond, server.answer_headers = respond, {}
        server.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def chat_server(answer):
    """OpenAI's protocol by `answer(body, headers) -> (status, data)`; `asked`: the bodies of all requests."""

    def respond(path, text, headers):
        server.asked.append(json.loads(text))
        return server.answer(server.asked[-1], headers)

    with scripted_server(respond) as server:
        server.answer, server.asked, server.url = answer, [], f"{server.endpoint}/v1"
        yield server


def chat_completion(message, finish_reason="stop", **more):
    """Return a completion's data; `message` is a text or a whole message. Of 7 tokens that were read and 3 written."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
    return {**about, "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}], **more}
