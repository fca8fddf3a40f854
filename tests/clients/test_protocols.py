"""curl and raw sockets on HTTP/1.1, httpx and curl on HTTP/2, with and without TLS."""

import asyncio
import json
import socket
import ssl
import subprocess

import httpx
import pytest
from processes import PATIENCE, pool
from wire import CHAT, chat


def curl(*arguments, stdin=None):
    done = subprocess.run(["curl", "-sS", "--max-time", "30", *map(str, arguments)], input=stdin, capture_output=True, timeout=40)
    assert done.returncode == 0, done.stderr.decode()
    return done


@pytest.fixture
def body(tmp_path):
    file = tmp_path / "body.json"
    file.write_text(json.dumps(chat("x" * 200_000, max_tokens=5)))
    return file


def test_curl_with_expect_100_continue(launch, body):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    done = curl("-v", "-H", "expect: 100-continue", "--expect100-timeout", 20, "-d", f"@{body}", gateway.url + CHAT)
    assert b"< HTTP/1.1 100" in done.stderr
    assert b"< HTTP/1.1 200" in done.stderr
    assert json.loads(done.stdout)["choices"]
    assert "expect" not in backend.exchange().headers


def test_curl_with_a_chunked_upload(launch, body):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    with open(body, "rb") as upload:
        done = curl("-H", "transfer-encoding: chunked", "-H", "content-type: application/json", "-X", "POST", "-T", "-", gateway.url + CHAT, stdin=upload.read())
    assert json.loads(done.stdout)["choices"]
    exchange = backend.exchange()
    assert exchange.body == body.read_bytes()
    assert exchange.headers["content-length"] == str(len(exchange.body))
    assert "transfer-encoding" not in exchange.headers


def test_curl_streams(gateway):
    done = curl("-N", "-d", json.dumps(chat(stream=True, sim_output_tokens=12)), gateway.url + CHAT)
    lines = [line for line in done.stdout.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 12


def test_hop_by_hop_headers_stay_here(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    headers = {"connection": "x-mine, keep-alive", "x-mine": "1", "te": "trailers", "proxy-authorization": "secret", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    httpx.post(gateway.url + CHAT, json=chat(), headers=headers, timeout=PATIENCE).raise_for_status()
    seen = backend.exchange().headers
    assert not {"x-mine", "te", "proxy-authorization", "keep-alive"} & seen.keys()
    assert seen["traceparent"].split("-")[1] == "a" * 32


def test_h2_with_prior_knowledge(gateway):
    done = curl("--http2-prior-knowledge", "-v", "-d", json.dumps(chat(max_tokens=5)), gateway.url + CHAT)
    assert b"< HTTP/2 200" in done.stderr
    assert json.loads(done.stdout)["choices"]


@pytest.fixture
def secure(launch):
    """A gateway with TLS and a certificate of its own."""
    cert, key = launch.folder / "cert.pem", launch.folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-keyout", key, "-out", cert], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    engine = launch.engine(slots=32, speed=20)
    gateway = launch.gateway(pool("sim", engine), scheme="https", tls={"cert": str(cert), "key": str(key)})
    return gateway.healthy(1), ssl.create_default_context(cafile=cert)


def test_tls_with_h2_by_alpn_and_100_streams(secure):
    gateway, context = secure

    async def all_of_them():
        async with httpx.AsyncClient(http2=True, verify=context, timeout=60) as client:

            async def one(index):
                async with client.stream("POST", gateway.url + CHAT, json=chat(f"{index}", stream=True, sim_output_tokens=10)) as response:
                    lines = [line async for line in response.aiter_lines() if line]
                return response.http_version, response.status_code, lines[-1]

            return await asyncio.gather(*(one(index) for index in range(100)))

    assert set(asyncio.run(all_of_them())) == {("HTTP/2", 200, "data: [DONE]")}


def test_tls_with_http_1(secure):
    gateway, context = secure
    with httpx.Client(verify=context, timeout=30) as client:
        response = client.post(gateway.url + CHAT, json=chat(max_tokens=3))
    assert (response.http_version, response.status_code) == ("HTTP/1.1", 200)


def test_a_client_that_leaves_an_h2_stream_frees_its_place(secure):
    gateway, context = secure

    async def leave():
        async with httpx.AsyncClient(http2=True, verify=context, timeout=30) as client:
            body = chat(stream=True, sim_output_tokens=20_000, max_tokens=20_000)
            async with client.stream("POST", gateway.url + CHAT, json=body) as response:
                async for _ in response.aiter_lines():
                    break
            # The connection stays open: only the stream was reset.
            await asyncio.to_thread(gateway.wait_idle)
            assert (await client.post(gateway.url + CHAT, json=chat(max_tokens=1))).status_code == 200

    asyncio.run(leave())


def request(path, body):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def test_pipelined_requests_are_both_answered(gateway):
    host, port = gateway.listen.split(":")
    one = request(CHAT, json.dumps(chat(sim_output_tokens=2)))
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(one + one)
        seen = b""
        while seen.count(b"HTTP/1.1 200") < 2 or seen.count(b'"usage"') < 2:
            piece = connection.recv(65_536)
            assert piece, seen
            seen += piece


def test_a_client_that_closes_only_its_sending_side_gets_an_end(gateway):
    """Half-close: the answer, or a refusal; never a hang."""
    host, port = gateway.listen.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(request(CHAT, json.dumps(chat(sim_output_tokens=2))))
        connection.shutdown(socket.SHUT_WR)
        seen = b""
        while piece := connection.recv(65_536):
            seen += piece
    assert seen == b"" or seen.startswith(b"HTTP/1.1 200")
