"""Who may see a dashboard, and what a browser may do with what it gets.

On loopback anyone on this machine may; a request whose Host is not this machine's is refused, so that a web page cannot
reach the dashboard through a name that it makes point here (DNS rebinding). On any other address a token is needed,
once in the link that is printed at the start, and from then on in a cookie.

Texts of rollouts come from a model and may be anything. The page makes text nodes of them; should a script get in all
the same, the content security policy refuses to run what is not one of the dashboard's own files.
"""

from __future__ import annotations

import secrets
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrl.machine.loopback import host_of_header, is_loopback

TOKEN = "token"
"""Name of the token in the link."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer. Charts set styles of their elements, which the policy calls inline styles."""


class AccessGuard:
    """ASGI middleware that lets in who may, and adds the headers."""

    def __init__(self, app: ASGIApp, token: str | None, port: int) -> None:
        """Take the token that is needed; None: none, but the Host must be this machine."""
        self._app, self._token = app, token
        self._cookie = f"streamrl_dashboard_{port}"  # cookies are shared by all ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that may not pass, or the one that sets the cookie."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            if is_loopback(host_of_header(request.headers.get("host", ""))):
                return None
            return PlainTextResponse("this dashboard is reached as http://localhost or http://127.0.0.1 only", 421)
        query = parse_qs(request.url.query)
        if given := query.pop(TOKEN, []):
            if not self._is_token(given[0]):
                return _no_entry()
            rest = urlencode(query, doseq=True)
            path = "/" + request.url.path.lstrip("/")  # "//name" would lead to another host
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            # not "strict": a link in another page would then lead to a refusal; nothing here does more than read
            answer.set_cookie(self._cookie, given[0], httponly=True, samesite="lax", path="/")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self._cookie, "")) or self._is_token(bearer):
            return None
        return _no_entry()

    def _is_token(self, text: str) -> bool:
        return self._token is not None and secrets.compare_digest(text.encode(), self._token.encode())


def _no_entry() -> Response:
    text = "a token is needed: open the link that `streamrl dashboard` has printed"
    return PlainTextResponse(text, 401, {"WWW-Authenticate": 'Bearer realm="streamrl dashboard"'})
