"""Untrusted peers on the sockets between prefill and decode nodes (src/engine/disagg/kv_wire.h): frames, fake
nodes and attacks."""
import contextlib
import os
import socket
import struct
import threading
import time

MAGIC, MASK = 0x44503446, (1 << 64) - 1
HELLO, PREFILL, FAILED, CHALLENGE = 1, 2, 7, 8
PROTOCOL = 2


def hash64(data, seed=0):
    """hash64() of src/base/hash.h."""
    def mix(state, word):
        state = (state ^ word) * 0x9e3779b97f4a7c15 & MASK
        return state ^ state >> 32
    lanes = [seed, ~seed & MASK, (seed + 1) & MASK, (~seed - 1) & MASK]
    whole = len(data) // 32 * 4
    for i, word in enumerate(struct.unpack_from(f"<{whole}Q", data)):
        lanes[i % 4] = mix(lanes[i % 4], word)
    state = mix(seed, len(data))
    for lane in lanes:
        state = mix(state, lane)
    for at in range(whole * 8, len(data), 8):
        state = mix(state, int.from_bytes(data[at:at + 8], "little"))
    return state


def frame(kind, payload=b"", epoch=0, room=0):
    head = struct.pack("<IIQQqQ", MAGIC, kind, epoch, room, len(payload), 0)
    return head[:32] + struct.pack("<Q", hash64(payload, hash64(head))) + payload


def challenge(has_secret=0):
    return frame(CHALLENGE, struct.pack("<II", PROTOCOL, has_secret) + os.urandom(32))


def deep_json(num_bytes):
    return b"[" * (num_bytes // 2) + b"]" * (num_bytes // 2)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def is_closed(connection, seconds):
    """Whether the other side closes the connection within `seconds`."""
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def deep_hello(port):
    """Sends a hello of JSON nested 100000 deep instead of a challenge, and one nested 4000 deep after a
    challenge."""
    with contextlib.suppress(OSError), connect(port) as first:
        first.sendall(frame(HELLO, b'{"epoch": ' + deep_json(200_000) + b', "facts": []}'))
        is_closed(first, 2)
    with contextlib.suppress(OSError), connect(port) as second:
        second.sendall(challenge())
        second.recv(80, socket.MSG_WAITALL)
        second.sendall(frame(HELLO, bytes(32) + b'{"epoch": ' + deep_json(8_000) + b', "facts": []}'))
        is_closed(second, 2)


class Drips:
    """with Drips(port, 50): 50 connections that each send one byte of a frame (a challenge) every 50 ms and
    never its last byte. Connections that the server ends are replaced; num_ended counts them."""

    def __init__(self, port, count, text=None):
        self.port, self.count, self.text, self.num_ended = port, count, text or challenge(), 0
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()

    def run(self):
        open_ones = {}
        while not self.ends.wait(0.05):
            while len(open_ones) < self.count:
                try:
                    connection = connect(self.port)
                except OSError:
                    break
                connection.setblocking(False)
                open_ones[connection] = 0
            for connection, sent in list(open_ones.items()):
                try:
                    if sent < len(self.text) - 1:
                        open_ones[connection] += connection.send(self.text[sent:sent + 1])
                    elif not connection.recv(1 << 16):
                        raise ConnectionResetError
                except BlockingIOError:
                    pass
                except OSError:
                    self.num_ended += 1
                    connection.close()
                    del open_ones[connection]
        for connection in open_ones:
            connection.close()


class FakePrefillNode:
    """with FakePrefillNode(answer): a port that sends the same bytes on every connection, then nothing."""

    def __init__(self, answer):
        self.answer, self.num_connections = answer, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()

    def run(self):
        open_ones = []
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                open_ones.append(connection)
                self.num_connections += 1
                with contextlib.suppress(OSError):
                    connection.sendall(self.answer)
        for connection in open_ones:
            connection.close()
