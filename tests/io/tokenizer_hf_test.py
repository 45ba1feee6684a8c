"""Compares tokenizer_dump with Hugging Face tokenizers on new random texts and ids.

    tokenizer_hf_test.py TOKENIZER_DUMP [SEED [TEXTS_PER_TOKENIZER]]
With 1000 or more texts, every tokenizer is also tested with every code point; with fewer, with 1 in 24.
"""
import json
import random
import sys
import tempfile

from tokenizers import Tokenizer

import make_tokenizer_fixtures as fixtures
import tokenizer_texts
from tokenizer_dump import Dump


def split_variants():
    for behavior in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        for invert in [False, True]:
            yield fixtures.split(r"\p{L}+|\d|'s", behavior, invert)
            yield fixtures.split(r"[aé日]*", behavior, invert)
        yield fixtures.split("a.", behavior, kind="String")
        yield {"type": "Punctuation", "behavior": behavior}
    for pattern in [r"\w+|\W", r"\S+|\s", r"[\w\s]+", r"\p{Han}+|\p{Hiragana}|\p{Katakana}|\p{Latin}|\p{Hangul}", r"\P{L}+|.",
                    r"[^\d\h]+", r"\x41|\u0061|\x{1F44D}|\t", r"(?>a+)b|(?<=a)\p{^L}|(?<!b)\n", r"a++|b*+|c?+\p{Cn}|\p{Cf}",
                    r"[\p{Han}]+|[\p{Lu}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}&&[^\p{Han}a-c]]+|[\p{N}\p{Cn}&&[^\d]]",
                    r"(?i:[a-f]x?|don't)|\p{Z}", r"a{2,3}?|b{2}|(c|s)+"]:
        yield fixtures.split(pattern)
    yield {"type": "Digits", "individual_digits": False}
    yield {"type": "Digits", "individual_digits": True}
    yield {"type": "Whitespace"}
    yield {"type": "WhitespaceSplit"}


def random_merges(rng):
    """Merges that produce tokens in several ways and any order, over a vocabulary without some bytes."""
    config = fixtures.gpt2()
    letters = [c for c in "abcdefs'" if rng.random() < 0.9]
    tokens, merges = list(letters), set()
    for _ in range(40):
        pair = rng.choice(tokens), rng.choice(tokens)
        if len(pair[0] + pair[1]) <= 8:
            merges.add(pair)
            tokens.append(pair[0] + pair[1])
    for token in list(tokens):  # other ways to produce the same tokens
        for cut in range(1, len(token)):
            if token[:cut] in tokens and token[cut:] in tokens and rng.random() < 0.5:
                merges.add((token[:cut], token[cut:]))
    merges = sorted(merges)
    rng.shuffle(merges)
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens + ["?"]))}
    config["added_tokens"] = []
    config["pre_tokenizer"] = fixtures.byte_level()
    config["model"].update(vocab=vocab, merges=merges, unk_token=rng.choice([None, "?"]), fuse_unk=rng.random() < 0.5)
    return config


def configs(rng):
    for name, make in fixtures.CONFIGS.items():
        yield name, make()
    for i, step in enumerate(split_variants()):
        config = fixtures.gpt2()
        config["pre_tokenizer"] = fixtures.sequence(step, fixtures.byte_level(add_prefix_space=i % 2 == 1))
        yield json.dumps(step), config
    without = fixtures.qwen()
    without["decoder"] = None
    yield "no decoder", without
    for i in range(12):
        yield f"random merges {i}", random_merges(rng)


def all_characters():
    """Every code point, alone between letters and spaces."""
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for i in range(0, len(points), 512):
        yield " ".join(f"a{c}a{c} {c}\u0323" for c in points[i:i + 512])


def compare_encoding(name, reference, ours, text, special):
    expected = reference.encode_batch_fast([text], add_special_tokens=special)[0].ids  # without offsets
    actual = ours.encode(text, special)
    assert actual == expected, f"{name}: {text!r}: {actual} instead of {expected}"
    return expected


def compare_decoding(name, reference, ours, ids, skip):
    expected, actual = reference.decode(ids, skip_special_tokens=skip), ours.decode(ids, skip)
    assert actual == expected, f"{name}: {ids}: {actual!r} instead of {expected!r}"


def compare_with(name, reference, ours, texts, characters, rng):
    for text in texts:
        for special in (False, True):
            ids = compare_encoding(name, reference, ours, text, special)
        for skip in (False, True):
            compare_decoding(name, reference, ours, ids, skip)
            compare_decoding(name, reference, ours, fixtures.random_ids(rng, reference), skip)
    for text in characters:  # the flags concern special tokens, which these texts do not have
        compare_decoding(name, reference, ours, compare_encoding(name, reference, ours, text, False), False)
    invalid = [bytes(rng.choice(b"a \xc3\xa9\xe6\x97\xf0\x9f\x91\x8d\xed\xa0\xff\x80") for _ in range(9)) for _ in range(50)]
    for raw in invalid:
        expected, actual = reference.encode(raw.decode(errors="replace"), add_special_tokens=False).ids, ours.encode(raw)
        assert actual == expected, f"{name}: {raw!r}: {actual} instead of {expected}"


def compare(name, config, texts, characters, rng, binary):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        ours = Dump(binary, file.name)
        compare_with(name, Tokenizer.from_file(file.name), ours, texts, characters, rng)
        ours.close()


def main():
    binary = sys.argv[1]
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 20240601
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    print(f"seed {seed}, {count} texts per tokenizer")
    rng = random.Random(seed)
    characters = list(all_characters())
    for number, (name, config) in enumerate(configs(rng)):
        texts = tokenizer_texts.FIXED + tokenizer_texts.random_texts(seed + number, count)
        shares = 1 if count >= 1000 else 24
        compare(name, config, texts, characters[number % shares::shares], rng, binary)
    print(f"{number + 1} tokenizers agree")


if __name__ == "__main__":
    main()
