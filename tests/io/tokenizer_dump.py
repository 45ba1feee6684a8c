"""A client of the tokenizer_dump binary; see its source for the protocol."""
import struct
import subprocess


class Dump:
    def __init__(self, binary, tokenizer_json):
        self.process = subprocess.Popen([binary, tokenizer_json], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _ask(self, kind, count, payload):
        self.process.stdin.write(kind + struct.pack("=i", count) + payload)
        self.process.stdin.flush()
        answer = self.process.stdout.read(4)
        assert len(answer) == 4, "tokenizer_dump ended"
        return struct.unpack("=i", answer)[0]

    def encode(self, text, special=False):
        raw = text if isinstance(text, bytes) else text.encode()
        count = self._ask(b"s" if special else b"e", len(raw), raw)
        assert count >= 0, "tokenizer_dump failed to encode"
        return list(struct.unpack(f"={count}i", self.process.stdout.read(4 * count)))

    def decode(self, ids, skip):
        count = self._ask(b"k" if skip else b"d", len(ids), struct.pack(f"={len(ids)}i", *ids))
        return self.process.stdout.read(count).decode()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
