"""The server: this machine only, behind a random token, with limits on what it reads and how long it waits.

    with LiveServer(app) as server:
        print(server.url)
        server.serve_forever()

A request must name this server as its host (a foreign name that resolves to 127.0.0.1 does not), carry the token as
the first part of its path and, to upload, come from the page itself. Everything else is refused with a sentence.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from anybit.errors import AnybitError, SpecError
from anybit.serve.app import Answer, App, Refused, say
from anybit.serve.upload import LARGEST_UPLOAD

ADDRESS = "127.0.0.1"
QUIET = 10.0
"""Seconds that a client may say nothing."""

PATIENCE = 30.0
"""Seconds in which a whole request must have come in."""

LINGER = 2.0
"""Seconds in which a refused upload is thrown away, so that the client reads why instead of a broken connection."""

MOST_CONNECTIONS = 32

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class LiveServer(ThreadingHTTPServer):
    """Serves one page on 127.0.0.1; `url` is its address, token included."""

    daemon_threads = False  # closing waits for runs: ONNX Runtime must not be cut off by the end of the process

    def __init__(self, app: App, *, port: int = 0, quiet: float = QUIET, patience: float = PATIENCE) -> None:
        self.app, self.quiet, self.patience = app, quiet, patience
        self.token = secrets.token_urlsafe(24)
        self._connections: set[Any] = set()
        self._counting = threading.Lock()
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise SpecError(
                f"port {port} cannot be used ({getattr(error, 'strerror', None) or error}); "
                "choose another one, or 0 for any free one"
            ) from error

    def server_bind(self) -> None:
        """Take the port; unlike the base class, ask nobody for the machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a request may call this server."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, unless too many are open."""
        with self._counting:
            full = len(self._connections) >= MOST_CONNECTIONS
            if not full:
                self._connections.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._counting:
            self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, hang up on everybody, and wait for what still runs."""
        with self._counting:
            for connection in self._connections:
                _hang_up(connection)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about clients that went away; a bug goes to the terminal."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server: LiveServer

    def setup(self) -> None:
        """Start the clock: a client that sends a byte now and then is cut off too."""
        super().setup()
        self.connection.settimeout(self.server.quiet)
        self._unread = False
        self._clock = threading.Timer(self.server.patience, _hang_up, [self.connection])
        self._clock.daemon = True
        self._clock.start()

    def finish(self) -> None:
        """Stop the clock."""
        self._clock.cancel()
        super().finish()

    def do_GET(self) -> None:
        """Serve the page or one of its parts."""
        self._serve()

    def do_POST(self) -> None:
        """Take a picture."""
        self._unread = True
        self._serve()

    def _serve(self) -> None:
        try:
            answer = self._answer()
        except Refused as error:
            answer = say({"error": str(error)}, error.status)
        except AnybitError as error:
            answer = say({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            traceback.print_exc()
            bug = "this is a bug in anybit; the terminal says more"
            answer = say({"error": bug}, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)
        if self._unread:
            self._throw_away()

    def _answer(self) -> Answer:
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise Refused(HTTPStatus.FORBIDDEN, f"this server is only known as {' and '.join(self.server.hosts)}")
        path, _, query = self.path.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        if not (hmac.compare_digest(token.encode("latin-1", "replace"), self.server.token.encode()) and slash):
            raise Refused(HTTPStatus.FORBIDDEN, "the token is missing or wrong; open the address that was printed")
        if self.command == "POST":
            origins = [f"http://{host}" for host in self.server.hosts]
            if any(origin not in origins for origin in self.headers.get_all("Origin", [])):
                raise Refused(HTTPStatus.FORBIDDEN, "only the page itself may upload")
        route = self.server.app.find(self.command, name)
        body = self._body() if self.command == "POST" else b""
        self._clock.cancel()
        return route(read_query(query), body)

    def _body(self) -> bytes:
        """Read the upload; its length is checked first."""
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "an upload must say its length first")
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "the length of an upload must be one whole number")
        length = int(lengths[0])
        if length > LARGEST_UPLOAD:
            limit = f"{LARGEST_UPLOAD // 10**6} MB"
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a file of up to {limit} is expected, got {length:,} bytes"
            )
        if not length:
            raise Refused(HTTPStatus.BAD_REQUEST, "a picture is expected, got an empty file")
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, "the upload took too long; try again") from None
        self._unread = False
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the upload was cut short: {len(body)} of {length} bytes came")
        return body

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for key, value in HEADERS.items():
            self.send_header(key, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _throw_away(self) -> None:
        """Read and forget what a refused client still sends, for a moment."""
        until = time.monotonic() + LINGER
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER)
            while time.monotonic() < until and self.connection.recv(2**16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, or has an unknown method, in the same form as every other refusal."""
        status = HTTPStatus(code)
        text = f"this server takes GET and POST requests; {message or status.phrase}"[:300]
        self._send(say({"error": text}, status))

    def version_string(self) -> str:
        """Return what the server calls itself: no versions for strangers."""
        return "anybit"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: the address holds the token."""


def read_query(text: str) -> dict[str, str]:
    """Return the fields of a query.

    >>> read_query("weights=4&activations=8")
    {'weights': '4', 'activations': '8'}
    >>> read_query("weights=4&weights=8")
    Traceback (most recent call last):
    anybit.errors.SpecError: 'weights' is given twice
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=10)
    except ValueError:
        raise SpecError("the query has too many fields; at most 10 are expected") from None
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise SpecError(f"{key[:20]!r} is given twice")
        found[key] = value
    return found


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
