"""Crowds of clients for tests and benches: idle connections, slow readers, and a concurrent stream."""
import contextlib
import http.client
import json
import resource
import selectors
import socket
import time
from urllib.parse import urlsplit


def raise_descriptor_limit():
    """Raises the limit to its maximum; returns it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connect(url):
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def post_bytes(path, body):
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data)


@contextlib.contextmanager
def idle_connections(url, count):
    """Open connections that sent no request; every tenth one sent a single request."""
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for i in range(count):
            client = stack.enter_context(connect(url))
            if i % 10 == 0:
                client.sendall(ask)
                assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        yield


@contextlib.contextmanager
def slow_readers(url, count, tokens, bytes_a_second=100):
    """Streams whose clients read a few bytes at a time, with small receive buffers."""
    body = {"text": "Tom has", "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(connect(url))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(post_bytes("/generate", body))
            client.setblocking(False)
            clients.append(client)

        def sip(seconds):
            """Reads at that rate for some seconds."""
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with selectors.DefaultSelector() as ready:
                    for client in clients:
                        ready.register(client, selectors.EVENT_READ)
                    for key, _ in ready.select(0):
                        with contextlib.suppress(OSError):
                            key.fileobj.recv(bytes_a_second // 10)
                time.sleep(0.1)
        yield sip


def stream(url, tokens):
    """One stream: the token ids, and the seconds between events."""
    body = {"text": "Tom has", "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    parts = urlsplit(url)
    times, ids = [], []
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)) as connection:
        connection.request("POST", "/generate", json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                ids = json.loads(line[6:])["output_ids"]
    return ids, [b - a for a, b in zip(times, times[1:])]


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
