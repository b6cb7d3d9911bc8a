"""Two requests have one identity only if they present one credential."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.django import middleware as django
from tests.http.drivers.asgi import scope


def request_of(kind: str, headers: list[tuple[str, str]]) -> Any:
    """Returns a request as the app gets it; WSGI servers join repeated fields."""
    if kind == "asgi":
        return scope(headers=headers)
    environ: dict[str, str] = {}
    for field, value in headers:
        name = "HTTP_" + field.upper().replace("-", "_")
        environ[name] = f"{environ[name]},{value}" if name in environ else value
    return environ if kind == "wsgi" else SimpleNamespace(META=environ)


MODULES = {"asgi": asgi, "wsgi": wsgi, "django": django}

each_kind = pytest.mark.parametrize("kind", MODULES)


def of_header(kind: str, *values: str) -> str | None:
    identity = MODULES[kind].by_header("X-Api-Key")
    return identity(request_of(kind, [("x-api-key", value) for value in values]))


def of_cookie(kind: str, *fields: str) -> str | None:
    identity = MODULES[kind].by_cookie("sid")
    return identity(request_of(kind, [("cookie", field) for field in fields]))


@each_kind
def test_a_header_is_an_identity(kind: str) -> None:
    others = (None, of_header(kind, "A"), of_header(kind, "a, b"), of_cookie(kind, "sid=a"))
    assert of_header(kind, "a") == of_header(kind, "a")
    assert of_header(kind, "a") not in others
    assert of_header(kind) is of_header(kind, "") is None


def test_repeated_fields_under_asgi() -> None:
    assert of_header("asgi", "a", "b") is of_header("asgi", "a", "a") is None
    assert of_cookie("asgi", "x=1", "sid=a") == of_cookie("asgi", "sid=a")
    assert of_cookie("asgi", "sid=a", "sid=b") is None


@each_kind
@pytest.mark.parametrize(
    "field", ["sid=a", " sid=a ", "x=1; sid=a", "sid=a;", "sid = a", "sid=a; sid=a", "Sid=b; sid=a"]
)
def test_a_cookie_is_an_identity(kind: str, field: str) -> None:
    assert of_cookie(kind, field) == of_cookie(kind, "sid=a") is not None


@each_kind
@pytest.mark.parametrize(
    "field",
    ["", "sid", "sid=", "x=a", "sid2=a", "xsid=a", "SID=a", "sid=a; sid=b", 'sid=a; sid="a"'],
)
def test_a_cookie_that_is_absent_or_ambiguous_is_none(kind: str, field: str) -> None:
    assert of_cookie(kind, field) is None


@each_kind
def test_a_quoted_cookie_is_another_one(kind: str) -> None:
    assert of_cookie(kind, 'sid="a"') not in (None, of_cookie(kind, "sid=a"))
    assert of_cookie(kind, "sid=a=b") not in (None, of_cookie(kind, "sid=a"))


FLASK = "eyJ1c2VyX2lkIjoiYWxpY2UifQ.arUwGg.Wk5vC3WZyLOYxyc9XqhLQJvH3Xo"
COMPRESSED = ".eJyrVkrLz1eyUkpKLFKqBQAdegQ0.arUwGg.Wk5vC3WZyLOYxyc9XqhLQJvH3Xo"
STARLETTE = "eyJ1c2VyIjogImFsaWNlIn0=.arUwGg.Wk5vC3WZyLOYxyc9XqhLQJvH3Xo"
DJANGO = "eyJhIjoxfQ:1QaUZC:YIye-ze3TTx7gtSv422nZA4sgmkYIye-ze3TTx7gtSv"


@each_kind
@pytest.mark.parametrize("session", [FLASK, COMPRESSED, STARLETTE, DJANGO, f'"{FLASK}"'])
def test_a_session_that_is_in_the_cookie_itself_is_none(
    kind: str, session: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is another one after each write, so that a retry would be executed again."""
    assert of_cookie(kind, f"sid={session}") is None
    (warning,) = caplog.messages
    assert "the cookie sid is a signed session" in warning
    assert "identify the user" in warning
    assert session not in warning


def test_the_signed_sessions_of_frameworks_are_recognized() -> None:
    from base64 import b64encode

    from django.core.signing import TimestampSigner
    from flask import Flask
    from itsdangerous import TimestampSigner as StarletteSigner

    app = Flask("shop")
    app.secret_key = "for tests"
    serializer: Any = app.session_interface.get_signing_serializer(app)  # type: ignore[attr-defined]
    django_signer = TimestampSigner(key="for tests", salt="session", fallback_keys=[])
    for data in ({}, {"user": "alice"}, {"cart": ["article"] * 100}):
        starlette = StarletteSigner("for tests").sign(b64encode(repr(data).encode()))
        signed = [serializer.dumps(data), starlette.decode()]
        signed += [django_signer.sign_object(data, compress=compress) for compress in (False, True)]
        assert [of_cookie("wsgi", f"sid={session}") for session in signed] == [None] * 4


@each_kind
@pytest.mark.parametrize(
    "opaque",
    [
        "8e03978e-40d5-43e8-bc93-6894a57f9324",
        "l9a0iyexfd5dzjrvvfzozsigkgkyo6qh",  # Django's
        "VnPS7bSpAnA.Wk5vC3WZyLOYxyc9XqhLQJvH3Xo",  # Flask-Session's, with a signature
        "s:VnPS7bSpAnA.Wk5vC3WZyLOYxyc9XqhLQJvH3XoWk5vC3WZyLOYxyc9Xq",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.YIye-ze3TTx7gtSv422nZA4sgmkYIye-ze3TTx7gtSv",
    ],
)
def test_a_session_that_the_server_has_is_an_identity(kind: str, opaque: str) -> None:
    assert of_cookie(kind, f"sid={opaque}") is not None


def of_authorization(value: str) -> str | None:
    return asgi.by_header("Authorization")(scope(headers=[("authorization", value)]))


@pytest.mark.parametrize(
    "credentials",
    [
        'Digest username="alice", nonce="a", nc=00000001, response="b"',
        'OAuth oauth_consumer_key="a", oauth_nonce="b", oauth_signature="c"',
        'Hawk id="a", ts="1353832234", nonce="j4h3g2", mac="6R4r"',
        "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=b",
        'Signature keyId="a",signature="b"',
        *("Negotiate YII", "NTLM TlRM"),
    ],
)
def test_credentials_of_one_request_are_none(
    credentials: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert of_authorization(credentials) is None
    (warning,) = caplog.messages
    assert "Authorization differs in each request" in warning
    assert credentials not in warning


@pytest.mark.parametrize(
    "credentials", ["Bearer a", "Basic YTpi", "Token token=a", "OAuth y0_a", "DPoP a", "a"]
)
def test_other_credentials_are_an_identity(credentials: str) -> None:
    assert of_authorization(credentials) is not None


@each_kind
def test_all_cookies_together_are_no_identity(kind: str) -> None:
    with pytest.raises(ValueError, match="by_cookie"):
        MODULES[kind].by_header("Cookie")


TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20)
VALUES = st.lists(TEXT, max_size=3)


@given(VALUES, VALUES)
def test_two_credentials_in_headers_never_collide(one: list[str], other: list[str]) -> None:
    if of_header("asgi", *one) == of_header("asgi", *other) is not None:
        assert one == other
    joined = (of_header("wsgi", *one), of_header("wsgi", *other))
    if joined[0] == joined[1] is not None:  # the app gets the fields joined, too
        assert ",".join(one) == ",".join(other)


COOKIES = st.lists(
    st.tuples(st.sampled_from(["sid", "sid ", "Sid", "x", ""]), TEXT).map("=".join), max_size=4
).map("; ".join)


@given(COOKIES, COOKIES)
def test_two_credentials_in_cookies_never_collide(one: str, other: str) -> None:
    def values(field: str) -> set[str]:
        pairs = [pair.partition("=") for pair in field.split(";")]
        return {value.strip() for name, equals, value in pairs if equals and name.strip() == "sid"}

    if of_cookie("asgi", one) == of_cookie("asgi", other) is not None:
        assert values(one) == values(other)
        assert len(values(one)) == 1


def test_anonymous_is_one_identity_for_all() -> None:
    assert asgi.anonymous({}) == wsgi.anonymous({}) == django.anonymous(None) == "anonymous"


@each_kind
@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\nb", "é", None, b"a"])
def test_an_impossible_name_is_refused(kind: str, name: Any) -> None:
    for helper, what in (("by_header", "header"), ("by_cookie", "cookie")):
        with pytest.raises(ValueError, match=rf"{helper} needs the name of a {what}"):
            getattr(MODULES[kind], helper)(name)


class User:
    is_authenticated = True

    def __init__(self, pk: Any) -> None:
        self.pk = pk


class Admin(User):
    pass


def test_a_user_is_an_identity() -> None:
    def identity(user: Any) -> str | None:
        return django.by_user(SimpleNamespace(user=user))

    assert identity(User(1)) == identity(User(1)) is not None
    assert len({identity(User(1)), identity(User(11)), identity(Admin(1))}) == 3
    assert identity(User(None)) is None
    assert identity(SimpleNamespace(is_authenticated=False, pk=1)) is None
