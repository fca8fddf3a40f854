"""Requests that two parsers could read differently (RFC 9112, 11.2): each is refused, or reaches the backend as exactly one whole request."""

import json
import socket

import pytest
from processes import PATIENCE, pool
from wire import CHAT, chat, post

BODY = json.dumps(chat("plain")).encode()
HIDDEN = b"GET /v1/hidden HTTP/1.1\r\nhost: x\r\n\r\n"


def head(*lines, path=CHAT):
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", "connection: close", "content-type: application/json", *lines]).encode() + b"\r\n\r\n"


def chunked(*chunks):
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def length(body):
    return f"content-length: {len(body)}"


def statuses(gateway, data):
    """The status of every answer to these bytes, until the gateway closes."""
    with socket.create_connection(gateway.listen.split(":"), timeout=PATIENCE) as client:
        client.sendall(data)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


REFUSED = {
    "two lengths": head(length(BODY), "content-length: 5") + BODY,
    "a list of lengths": head(f"content-length: {len(BODY)}, 5") + BODY,
    "a length with a sign": head(f"content-length: +{len(BODY)}") + BODY,
    "a length in hexadecimal": head("content-length: 0x10") + BODY,
    "a space before the colon": head(f"content-length : {len(BODY)}") + BODY,
    "a folded line": head("x-a: 1", " transfer-encoding: chunked", length(BODY)) + BODY,
    "a coding after chunked": head("transfer-encoding: chunked, identity") + chunked(BODY),
    "an unknown coding": head("transfer-encoding: xchunked") + chunked(BODY),
    "a chunk size with a sign": head("transfer-encoding: chunked") + b"+%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "a chunk size of many digits": head("transfer-encoding: chunked") + b"f" * 17 + b"\r\n" + BODY,
    "a chunk without its line end": head("transfer-encoding: chunked") + b"%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY),
    "a null in a header": head("x-a: 1\x002", length(BODY)) + BODY,
    "a bare carriage return in a header": head("x-a: 1\r2", length(BODY)) + BODY,
    "a space in the target": b"POST /v1/chat/completions x HTTP/1.1\r\nhost: x\r\n" + length(BODY).encode() + b"\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_ambiguous_is_refused_and_nothing_behind_it_is_read(launch, case):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    answers = statuses(gateway, REFUSED[case] + HIDDEN)
    assert answers == [400]
    assert not backend.exchanges
    assert post(gateway, chat()).status_code == 200


def test_a_length_beside_chunks_reaches_the_backend_as_one_request(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    # The length ends inside the chunks, and what is behind that looks like a request.
    for order in (("transfer-encoding: chunked", "content-length: 4"), ("content-length: 4", "transfer-encoding: chunked")):
        before = len(backend.exchanges)
        answers = statuses(gateway, head(*order) + chunked(BODY))
        assert answers in ([400], [200]), answers
        seen = backend.exchanges[before:]
        assert [exchange.body for exchange in seen] == ([BODY] if answers == [200] else [])
        for exchange in seen:
            assert exchange.headers["content-length"] == str(len(BODY))
            assert "transfer-encoding" not in exchange.headers


def test_a_body_that_looks_like_a_request_is_a_body(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    body = json.dumps(chat("\r\n\r\nGET /v1/hidden HTTP/1.1\r\nhost: x\r\n\r\n")).encode()
    assert statuses(gateway, head(length(body)) + body) == [200]
    assert [exchange.body for exchange in backend.exchanges] == [body]


def test_names_and_ids_cannot_carry_headers(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool({"name": "mine", "upstream": "sim"}, backend)).healthy(1)
    answer = post(gateway, chat(model="mine\r\nx-injected: 1"))
    assert answer.status_code == 404
    assert "x-injected" not in answer.headers
    answer = post(gateway, chat(model="mine"), headers={"x-request-id": "a" * 500})
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32
