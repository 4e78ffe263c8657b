"""An HTTP server for tests: a function answers its requests."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(answer, health=None):
    """
    Yield the URL of a server, and the list of the bodies of its requests.

    `answer(body, handler)` returns an object, which is sent as JSON; bytes, sent as they are; a status with headers
    and a body; or None, if it has dealt with the request itself. `health()` answers GET, which is else not found.
    """
    came, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True  # else each answer takes 40 ms

        def do_POST(self):  # noqa: N802 - http.server's name
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                came.append(body)
            self.send(answer(body, self))

        def do_GET(self):  # noqa: N802
            self.send(health() if health and self.path == "/health" else (404, {}, {"error": "no such page"}))

        def send(self, said):
            if said is None:
                self.close_connection = True
                return
            status, headers, content = said if isinstance(said, tuple) else (200, {}, said)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-length": len(content), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args):  # a client that hung up
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        server.server_close()
