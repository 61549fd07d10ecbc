"""Decides who may use the pages, by the token of a server and signed sessions in a cookie.

Nothing is remembered: a session is a random number with a signature, and its CSRF token follows
from it. So no number of visitors takes memory.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie

# The cookie ends with the browser's session; the key ends with the server.
_MOST_COOKIE_BYTES = 4_096


class Sessions:
    """The sessions of one server. `token`: what a new visitor has to know; None: nothing."""

    def __init__(self, port: int, token: str | None) -> None:
        self._key = secrets.token_bytes(32)
        self.token = token
        # Cookies of one host are shared by its ports.
        self.cookie = f"sweep-ui-{port}"

    def knows(self, token: str) -> bool:
        """Return whether a visitor has told the token, in constant time."""
        return self.token is not None and hmac.compare_digest(
            token.encode(errors="replace"), self.token.encode()
        )

    def new(self) -> str:
        """A new session."""
        number = secrets.token_urlsafe(18)
        return f"{number}.{self._signed('session', number)}"

    def of(self, header: str) -> str | None:
        """The session of a request by its header `Cookie`; None: it has none that is valid."""
        if not header or len(header) > _MOST_COOKIE_BYTES:
            return None
        try:
            found = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return None
        if found is None:
            return None
        number, _, signature = found.value.partition(".")
        expected = self._signed("session", number)
        is_ours = hmac.compare_digest(signature.encode(errors="replace"), expected.encode())
        return found.value if is_ours else None

    def set_cookie(self, session: str) -> str:
        """The header `Set-Cookie` that begins a session."""
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict"

    def csrf(self, session: str) -> str:
        """The CSRF token that each form of this session carries."""
        return self._signed("csrf", session)

    def is_csrf(self, session: str, told: str) -> bool:
        """Return whether a form carries its session's token, in constant time."""
        return hmac.compare_digest(told.encode(errors="replace"), self.csrf(session).encode())

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(), sha256).hexdigest()
