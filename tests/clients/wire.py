"""Requests as plain HTTP, and many of them at once."""

import threading

import httpx

CHAT = "/v1/chat/completions"


def chat(content="hello", *, model="sim", **more):
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def post(gateway, body, path=CHAT, timeout=60, **options):
    kind = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
    return httpx.post(gateway.url + path, timeout=timeout, **kind, **options)


def error(response):
    """The error of an answer in OpenAI's shape."""
    body = response.json()["error"]
    assert {"message", "type", "param", "code"} <= body.keys(), body
    return body


class Call(threading.Thread):
    """One request in the background; `response` or `failure` once it is over."""

    def __init__(self, gateway, body, **options):
        super().__init__(daemon=True)
        self.gateway, self.body, self.options = gateway, body, options
        self.response = self.failure = None
        self.start()

    def run(self):
        try:
            self.response = post(self.gateway, self.body, **self.options)
        except httpx.HTTPError as failure:
            self.failure = failure

    def result(self, within=60):
        self.join(within)
        assert not self.is_alive(), "the request has no end"
        if self.failure:
            raise self.failure
        return self.response
