"""Writes data/tokenizer_*.json and data/tokenizer_expected.json with Hugging Face tokenizers.

The pre-tokenizers are those of the named models; vocabularies are small and trained on the text below.
    python3 make_tokenizer_fixtures.py
"""
import json
import pathlib
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import tokenizer_texts

DATA = pathlib.Path(__file__).parent / "data"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"]

CORPUS = """The quick brown fox doesn't jump over the lazy dog; it's resting. They're sure we'll see 123 or 4567 of them.
THE HTTPServer IS RUNNING, I'M TOLD. return the value of x in range(10):\n    if x == 3:\n        print("three")\n\n
Der schnelle Fuchs springt über den Zaun. Le garçon naïf préfère l'été. Быстрая лиса прыгает через забор. שלום עולם.
مرحبا بالعالم. 日本語のテキストとひらがな、カタカナ。中文的文本和汉字。한국어 텍스트입니다. नमस्ते दुनिया. สวัสดีชาวโลก. 👍🏽 👨‍👩‍👧 ❤️ 𝟘𝟙
""".split("\n")


def added(content, id_, special=True, **flags):
    return {"id": id_, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": special, **flags}


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **options}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def train(pre_tokenizer, num_merges=220):
    """A tokenizer.json as a dictionary, with the 256 bytes, the most frequent merges and no added tokens."""
    skeleton = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": byte_level(),
                "model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(skeleton))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS * 2, trainers.BpeTrainer(
        vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False))
    return json.loads(tokenizer.to_str())


def append_added(config, *tokens):
    next_id = len(config["model"]["vocab"])
    for i, (content, flags) in enumerate(tokens):
        config["added_tokens"].append(added(content, next_id + i, **flags))


def gpt2():
    config = train(byte_level(use_regex=True))
    config["model"]["merges"] = [" ".join(pair) for pair in config["model"]["merges"]]
    append_added(config, ("<|endoftext|>", {}))
    return config


def llama3():
    config = train(sequence(split(LLAMA3), byte_level()))
    config["model"]["ignore_merges"] = True
    for word in ["Ġunreachable", "zqzq", "日本".encode().decode("latin-1")]:  # not made by merges
        config["model"]["vocab"].setdefault(word, len(config["model"]["vocab"]))
    append_added(config, ("<|begin_of_text|>", {}), ("<|endoftext|>", {}), ("<|im_start|>", {}))
    begin = config["added_tokens"][0]
    text = [{"SpecialToken": {"id": begin["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    config["post_processor"] = {"type": "Sequence", "processors": [byte_level(), {
        "type": "TemplateProcessing", "single": text, "pair": text + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin["content"]: {"id": begin["content"], "ids": [begin["id"]], "tokens": [begin["content"]]}}}]}
    return config


def qwen():
    config = train(sequence(split(QWEN), byte_level()))
    config["normalizer"] = {"type": "NFC"}
    append_added(config, ("<|endoftext|>", {}), ("<|im_start|>", {}), ("<|im_end|>", {}), ("<mask>", {"special": False}),
                 ("e\u0301<n>", {"normalized": True, "special": False}), ("\u212a", {"special": False}))
    return config


def gpt_oss():
    config = train(sequence(split(O200K), byte_level()))
    config["model"]["ignore_merges"] = True
    append_added(config, ("<|startoftext|>", {}), ("<|endoftext|>", {}), ("<|start|>", {}), ("<|end|>", {}))
    return config


def deepseek():
    config = train(sequence(*[split(pattern) for pattern in DEEPSEEK], byte_level()))
    config["normalizer"] = {"type": "Sequence", "normalizers": []}
    config["post_processor"] = byte_level(add_prefix_space=True, trim_offsets=False, use_regex=True)
    append_added(config, ("<｜begin▁of▁sentence｜>", {}), ("<|endoftext|>", {"normalized": True}),
                 ("<|im_start|>", {"normalized": True, "special": False}))
    return config


def flags():
    """Every flag of added tokens, overlapping contents and a prefix space."""
    config = train(byte_level(use_regex=True, add_prefix_space=True))
    append_added(config, ("<s>", {"lstrip": True}), ("<mask>", {"rstrip": True}), ("<|im_end|>", {"lstrip": True, "rstrip": True}),
                 ("fox", {"single_word": True, "special": False}), ("foxes", {"special": False}),
                 ("<|end", {"special": False}), ("<|endoftext|>", {"normalized": True}), ("  ", {"special": False}),
                 ("日", {"single_word": True, "normalized": True}), ("e\u0301", {"special": False, "single_word": True}))
    return config


CONFIGS = {"gpt2": gpt2, "llama3": llama3, "qwen": qwen, "gpt_oss": gpt_oss, "deepseek": deepseek, "flags": flags}


def random_ids(rng, tokenizer):
    return [rng.randrange(tokenizer.get_vocab_size() + 3) for _ in range(rng.randrange(12))]


def main():
    texts = tokenizer_texts.FIXED + tokenizer_texts.random_texts(7, 60)
    expected = {"texts": texts, "tokenizers": {}}
    for name, make in CONFIGS.items():
        path = DATA / f"tokenizer_{name}.json"
        path.write_text(json.dumps(make(), separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")
        tokenizer = Tokenizer.from_file(str(path))
        rng = random.Random(11)
        decoded = [(ids, tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True))
                   for ids in (random_ids(rng, tokenizer) for _ in range(40))]
        expected["tokenizers"][name] = {
            "ids": [tokenizer.encode(text).ids for text in texts], "decoded": decoded}
    (DATA / "tokenizer_expected.json").write_text(
        json.dumps(expected, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
