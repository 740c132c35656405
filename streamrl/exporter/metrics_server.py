"""Serve `/metrics` from a thread of the launcher.

On loopback everybody on this machine may read it, under a name of this machine only (a web page could otherwise reach
it by a name that it makes point here). At any other address a scraper sends a token; the connection is not encrypted.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from streamrl.config.cluster import MetricsEndpoint
from streamrl.errors import UserError, as_typed
from streamrl.exporter.run_collector import RunCollector
from streamrl.machine.loopback import host_of_header, is_loopback

REQUEST_S = 10.0
"""Seconds that a client has to send its request and to take the answer, however slowly it does."""
MOST_CONNECTIONS = 16
"""Connections at once, each of which has a thread of the launcher: whoever reaches the port can open more."""
LEAST_TOKEN = 16
"""Characters that a token has at least."""


def read_token(endpoint: MetricsEndpoint, key: str) -> str | None:
    """Return the token of an endpoint; None: it needs none.

    Args:
        endpoint: its keys.
        key: where they are in the cluster file, for messages.

    Raises:
        UserError: other machines can reach the endpoint and there is no token, or the file is of no use.
    """
    if endpoint.token_file is None:
        if is_loopback(endpoint.listen):
            return None
        raise UserError(
            f"{key}.listen is {endpoint.listen}, which other machines can reach: name a token_file, or listen at "
            "127.0.0.1; make one with: (umask 077; openssl rand -hex 32 > metrics.token)"
        )
    path = Path(endpoint.token_file)
    try:
        mode, token = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}.token_file: {path} cannot be read: {error}") from error
    if mode & 0o077:
        raise UserError(f"{key}.token_file: others can read {path}; chmod 600 {as_typed(path)}")
    if len(token) < LEAST_TOKEN or not token.isascii() or token.split() != [token]:
        raise UserError(f"{key}.token_file: {path} needs one line of at least {LEAST_TOKEN} characters, without blanks")
    return token


def guarded(app: WSGIApplication, token: str | None) -> WSGIApplication:
    """Return an application that lets in who may read, answers on /metrics alone, and says what failed.

    Args:
        app: what answers.
        token: what a scraper has to send; None: nothing, but the Host must be this machine.
    """

    def refuse(start: StartResponse, code: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
        start(code, [("Content-Type", "text/plain; charset=utf-8"), *headers])
        return [f"{text}\n".encode()]

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if token is None:
            if not is_loopback(host_of_header(environ.get("HTTP_HOST", ""))):
                return refuse(start, "421 Misdirected Request", "ask for http://localhost or http://127.0.0.1")
        elif not secrets.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), f"Bearer {token}".encode()):
            challenge = ("WWW-Authenticate", 'Bearer realm="streamrl metrics"')
            return refuse(start, "401 Unauthorized", "send the token: Authorization: Bearer TOKEN", challenge)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return refuse(start, "405 Method Not Allowed", "metrics are only read", ("Allow", "GET, HEAD"))
        if environ.get("PATH_INFO") != "/metrics":
            return refuse(start, "404 Not Found", "metrics are at /metrics")
        try:
            return app(environ, start)
        except Exception as error:  # a scrape must neither end the launcher nor print into its live view
            return refuse(start, "500 Internal Server Error", f"{type(error).__name__}: {error}")

    return answer


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread; further ones are closed unheard, and each has an end."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: WSGIApplication) -> None:
        """Take the socket that listens, and what answers."""
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = listener.family
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and end the connection after `REQUEST_S` whatever its client does."""
        end = threading.Timer(REQUEST_S, _hang_up, [request])
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # no thread can be started
            self.shutdown_request(request)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away is no news."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the launcher's terminal is for the run."""


def endpoint_problems(endpoint: MetricsEndpoint, key: str) -> Iterator[str]:
    """Yield why an endpoint cannot be served here, if it cannot."""
    try:
        read_token(endpoint, key)
        _bound(endpoint, key).close()
    except UserError as error:
        yield str(error)


@contextlib.contextmanager
def serving_metrics(
    endpoint: MetricsEndpoint, key: str, run_dir: Path, staleness_limit: int | None, site: str = ""
) -> Iterator[str]:
    """Serve the metrics of a run while the block runs; give their address.

    Args:
        endpoint: where to serve.
        key: where that is in the cluster file, for messages.
        run_dir: the run's folder.
        staleness_limit: staleness that the run's schedule allows, in weight versions; None: any.
        site: the launcher's site.

    Raises:
        UserError: the port is taken, the address is not this machine's, or the token is of no use.
    """
    token = read_token(endpoint, key)
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dir, staleness_limit, site=site, largest=None))
    with _bound(endpoint, key) as listener:
        server = MetricsServer(listener, guarded(make_wsgi_app(registry, disable_compression=True), token))
        loop: Callable[[], None] = server.serve_forever
        thread = threading.Thread(target=loop, name="metrics", daemon=True)
        thread.start()
        try:
            host = f"[{endpoint.listen}]" if ":" in endpoint.listen else endpoint.listen
            yield f"http://{host}:{server.server_port}/metrics"
        finally:
            with contextlib.suppress(OSError):  # wakes the thread, which else looks twice a second whether it shall end
                listener.shutdown(socket.SHUT_RDWR)
            server.shutdown()
            thread.join()
            server.server_close()


def _bound(endpoint: MetricsEndpoint, key: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(endpoint.listen, endpoint.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((endpoint.listen, endpoint.port), family=family)
    except OSError as error:
        raise UserError(
            f"{key}: cannot listen at {endpoint.listen}:{endpoint.port}: {error.strerror or error}; choose another "
            "port, 0 for any free one"
        ) from error
