"""A backend inside the test, whose every byte the test decides: for answers that no real engine gives on demand."""

import contextlib
import json
import socket
import struct
import threading

from processes import PATIENCE, wait_for


class Left(Exception):
    """The peer closed the connection."""


class Exchange:
    """One request that reached the backend, and the means to answer it."""

    def __init__(self, connection, method, path, headers, body):
        self.connection, self.method, self.path, self.headers, self.body = connection, method, path, headers, body
        self.left = threading.Event()
        self.released = threading.Event()
        self.keep = True

    @property
    def json(self):
        return json.loads(self.body)

    def raw(self, data):
        try:
            self.connection.sendall(data)
        except OSError as error:
            self.left.set()
            raise Left from error

    def reply(self, status=200, body=b"", headers=None, kind="application/json"):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} x", f"content-type: {kind}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def start_stream(self):
        self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def chunk(self, data):
        data = data if isinstance(data, bytes) else data.encode()
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def word(self, text, **more):
        """One event of a chat stream."""
        delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "sim", "choices": [delta], **more}
        self.chunk(f"data: {json.dumps(event)}\n\n")

    def end_stream(self, done=True):
        if done:
            self.chunk("data: [DONE]\n\n")
        self.raw(b"0\r\n\r\n")

    def wait_left(self, within=PATIENCE):
        """Blocks until the peer has closed; true if it did in time."""
        self.connection.settimeout(within)
        with contextlib.suppress(OSError):
            if self.connection.recv(1) == b"":
                self.left.set()
        self.connection.settimeout(None)
        self.keep = False
        return self.left.is_set()

    def wait_released(self, within=PATIENCE):
        assert self.released.wait(within), "the test never released this answer"

    def reset(self):
        """Closes as a crash does: the peer sees a reset."""
        self.keep = False
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def close(self):
        self.keep = False
        self.connection.close()


def completion(text="hello", model="sim", tokens=1):
    message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [message], "usage": usage}


def answer_normally(exchange):
    if exchange.json.get("stream"):
        exchange.start_stream()
        exchange.word("hello")
        exchange.end_stream()
    else:
        exchange.reply(body=completion())


def gate(exchange):
    """Holds the answer until the test sets `exchange.released`."""
    exchange.wait_released()
    answer_normally(exchange)


class ScriptedBackend:
    """`answer(exchange)` runs in a thread of its own for every POST; models and health answer by themselves."""

    def __init__(self, answer=answer_normally, models=("sim",)):
        self.answer, self.models = answer, models
        self.exchanges = []
        self.failures = []
        self.connections = set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def exchange(self, index=0, within=PATIENCE):
        """The request that came as number `index`, waited for."""
        wait_for(lambda: len(self.exchanges) > index, lambda: f"{index + 1} requests reached the backend: {len(self.exchanges)}", within)
        return self.exchanges[index]

    def release_all(self):
        for exchange in self.exchanges:
            exchange.released.set()

    def stop(self):
        """Refuses new connections and closes the open ones."""
        # A thread blocked in accept() keeps the socket alive past close(); shutdown() wakes it.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.release_all()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        self.connections.add(connection)
        reader = connection.makefile("rb")
        try:
            while exchange := self._read(connection, reader):
                if exchange.method == "POST":
                    self.exchanges.append(exchange)
                    self.answer(exchange)
                elif exchange.path == "/v1/models":
                    exchange.reply(body={"object": "list", "data": [{"id": model, "object": "model", "owned_by": "test"} for model in self.models]})
                elif exchange.path == "/health":
                    exchange.reply(body={})
                else:
                    exchange.reply(404, {"detail": "Not Found"})
                if not exchange.keep:
                    return
        except (Left, OSError, ValueError):
            return  # the peer has gone, which is what some tests are about
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            self.connections.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @staticmethod
    def _read(connection, reader):
        first = reader.readline()
        if not first:
            return None
        method, path, _ = first.decode().split(" ", 2)
        headers = {}
        while (line := reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        body = reader.read(int(headers.get("content-length", 0)))
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(reader.readline(), 16):
                body += reader.read(size)
                reader.readline()
            reader.readline()
        return Exchange(connection, method, path, headers, body)
