"""A server on loopback with OpenAI's protocol, whose answers a test writes."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer(ThreadingHTTPServer):
    """Answers each request with `answer(body, headers) -> (status, data)`; `asked`: the bodies of all of them."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.answer_headers = answer, [], {}
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        status, data = self.server.answer(body, self.headers)
        content = (data if isinstance(data, str) else json.dumps(data)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **self.server.answer_headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def chat_server(answer):
    with ChatServer(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def chat_completion(message, finish_reason="stop", **more):
    """Return a completion's data; `message` is a text or a whole message. Of 7 tokens that were read and 3 written."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    about = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
    return {**about, "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}], **more}
