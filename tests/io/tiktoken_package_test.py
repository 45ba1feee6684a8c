"""Compares tokenizer_dump with tiktoken on random vocabularies, texts and ids.

    tiktoken_package_test.py TOKENIZER_DUMP [SEED [TEXTS_PER_VOCABULARY]]
With 1000 or more texts, every code point is tested with every vocabulary; with fewer, with one of them.
"""
import random
import sys
import tempfile

SKIPPED = 77  # CTest's SKIP_RETURN_CODE
try:
    import make_tiktoken_fixtures as fixtures
except ImportError as error:
    print(f"SKIPPED: {error}; scripts/setup --tests installs it")
    sys.exit(SKIPPED)

import tokenizer_texts
from tokenizer_dump import Dump
from tokenizer_hf_test import all_characters


def random_ranks(rng):
    """The bytes in any order, and tokens of which many have no merge that makes them, or several."""
    alphabet = [b"a", b"b", b"c", b" ", b"'", b"s", b"1", "é".encode(), "日".encode(), b"\n"]
    tokens = [bytes([i]) for i in range(256)]
    for _ in range(rng.choice([0, 20, 400])):
        token = b"".join(rng.choice(alphabet) for _ in range(rng.randrange(2, 9)))
        tokens.append(token[rng.randrange(2):])
    tokens = [token for token in dict.fromkeys(tokens) if token]
    rng.shuffle(tokens)
    return {token: rank for rank, token in enumerate(tokens)}


def vocabularies(rng):
    from make_tokenizer_fixtures import CORPUS
    yield fixtures.train(CORPUS * 2 + fixtures.TEXTS, 500)
    for _ in range(8):
        yield random_ranks(rng)


def compare(reference, ours, ranks, texts, rng):
    num_ids = len(ranks) + fixtures.NUM_SPECIALS
    specials = {i for i in range(len(ranks), num_ids) if i - len(ranks) not in fixtures.PLAIN}
    for text in texts:
        expected, actual = reference.encode(text, allowed_special="all"), ours.encode(text)
        assert actual == expected, f"{text!r}: {actual} instead of {expected}"
        assert ours.decode(actual, False) == text
        ids = [rng.randrange(num_ids) for _ in range(rng.randrange(12))]
        for skip in (False, True):
            expected = reference.decode([i for i in ids if not skip or i not in specials])
            assert ours.decode(ids, skip) == expected, f"{ids}: {ours.decode(ids, skip)!r} instead of {expected!r}"
    for _ in range(100):
        raw = bytes(rng.choice(b"a \xc3\xa9\xe6\x97\xa5\xf0\x9f\x91\x8d\xed\xa0\xff\x80") for _ in range(9))
        text = raw.decode(errors="replace")
        actual = ours.encode(raw)
        assert actual == reference.encode(text), raw
        assert ours.decode(actual, False) == text, raw


def main():
    binary = sys.argv[1]
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 20240601
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    print(f"seed {seed}, {count} texts per vocabulary")
    rng = random.Random(seed)
    characters = list(all_characters())
    for number, ranks in enumerate(vocabularies(rng)):
        texts = tokenizer_texts.FIXED + fixtures.TEXTS + tokenizer_texts.random_texts(seed + number, count)
        if number == 0 or count >= 1000:
            texts += characters
        with tempfile.TemporaryDirectory() as folder:
            fixtures.write(folder, ranks, fixtures.NAMES, fixtures.PLAIN)
            ours = Dump(binary, folder)
            compare(fixtures.encoding(ranks, fixtures.NAMES), ours, ranks, texts, rng)
            ours.close()
    print(f"{number + 1} vocabularies agree")


if __name__ == "__main__":
    main()
