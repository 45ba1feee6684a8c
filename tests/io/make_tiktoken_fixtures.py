"""Writes data/tiktoken: a small tokenizer in Kimi's format, trained on the text of make_tokenizer_fixtures, and
the ids that tiktoken gives the texts of data/tokenizer_expected.json and some others.

    python3 make_tiktoken_fixtures.py            # needs tiktoken and tokenizers
"""
import base64
import collections
import json
import os
import pathlib

import regex
import tiktoken

DATA = pathlib.Path(__file__).parent / "data"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join([r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}",
                    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}", r"\p{N}{1,3}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
NUM_SPECIALS = 256
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_start|>", 4: "<|endoftext|>", 7: "<é|>", 11: "<|tool_call_begin|>",
         22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]"}
PLAIN = {11, 22, 23}  # not special: decoding keeps them

TEXTS = ["你好，世界！hello世界World々〇〡ゝ한国", "中文English中文ENGLISH'S don'T 中's 々a々A", "[BOS]<|im_start|>user\n你好<|im_end|>[EOS]",
         "<|reserved_token_9|><|reserved_token_1|>", "<think>\nwell\n</think>\n\n好<|tool_call_begin|>", "[BOS[BOS]]<é|><e\u0301|>",
         "漢\u0301字\u3005\u3007\U000203ff \U0002ffff a\U0002f800b", "ᾈᾀ ǅǆ ªʰ\u0345", "𝟘中1二2三〸〹", "\u2e80\u2f00\u3021\u303b\uf900\ufa70\U00016ff0"]


def train(corpus, num_merges):
    """Byte-pair encoding: the bytes, then the most frequent pairs (the first of equals in byte order)."""
    ranks = {bytes([i]): i for i in range(256)}
    words = collections.Counter(word for text in corpus for word in regex.findall(PATTERN, text, regex.V1))
    split = {word: [bytes([b]) for b in word.encode()] for word in words}
    for _ in range(num_merges):
        pairs = collections.Counter()
        for word, parts in split.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        for parts in split.values():
            i = 0
            while i + 1 < len(parts):
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = [best[0] + best[1]]
                i += 1
    return ranks


def special_tokens(num_ranks, names):
    return {names.get(i, f"<|reserved_token_{num_ranks + i}|>"): num_ranks + i for i in range(NUM_SPECIALS)}


def encoding(ranks, names):
    return tiktoken.Encoding(name="test", pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens=special_tokens(len(ranks), names))


def write(folder, ranks, names, plain):
    """Writes tiktoken.model and tokenizer_config.json."""
    with open(os.path.join(folder, "tiktoken.model"), "w") as file:
        for token, rank in ranks.items():
            file.write(f"{base64.b64encode(token).decode()} {rank}\n")
    named = {str(len(ranks) + i): {"content": content, "lstrip": False, "normalized": False, "rstrip": False,
                                   "single_word": False, "special": i not in plain} for i, content in names.items()}
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"added_tokens_decoder": named, "tokenizer_class": "TikTokenTokenizer"}, file, separators=(",", ":"))
        file.write("\n")


def main():
    from make_tokenizer_fixtures import CORPUS
    ranks = train(CORPUS * 2 + TEXTS, 400)
    for word in [b" unreachable", b"zqzq", "中文".encode()[1:]]:  # not made by merges
        ranks.setdefault(word, len(ranks))
    write(DATA / "tiktoken", ranks, NAMES, PLAIN)
    texts = json.loads((DATA / "tokenizer_expected.json").read_text())["texts"]
    ours = TEXTS + [f"<|reserved_token_{len(ranks) + 9}|>x"]
    model = encoding(ranks, NAMES)
    expected = {"ids": [model.encode(text, allowed_special="all") for text in texts], "texts": ours,
                "ids_of_texts": [model.encode(text, allowed_special="all") for text in ours]}
    (DATA / "tiktoken" / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
