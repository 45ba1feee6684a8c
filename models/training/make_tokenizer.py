"""Trains the demos' byte-level BPE (Qwen's pre-tokenizer) and encodes the training documents.

    python3 make_tokenizer.py OUTPUT_FOLDER NUM_DOCUMENTS   -> tokenizer.json, train.npy (uint16 ids)
"""
import multiprocessing
import os
import random
import sys

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import problems

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GREETING = "Hello, how are you today? I can solve small word problems about numbers."
NUM_WORKERS = 14  # part of the recipe: worker w draws its documents with seed 1000 + w


def train_tokenizer(banned):
    r = random.Random(7)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    documents = []
    for _ in range(8000):
        text = problems.document(r, banned)
        for token in SPECIAL:
            text = text.replace(token, "")
        documents.append(text)
    tokenizer.train_from_iterator(documents + [GREETING] * 20, trainer)
    return tokenizer


def encode_documents(job):
    tokenizer_file, seed, num_documents, banned = job
    tokenizer = Tokenizer.from_file(tokenizer_file)
    r = random.Random(seed)
    ids = []
    for _ in range(0, num_documents, 1000):
        for encoding in tokenizer.encode_batch([problems.document(r, banned) for _ in range(1000)]):
            ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def main(folder, num_documents):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.makedirs(folder, exist_ok=True)
    _, _, banned = problems.test_sets()
    tokenizer_file = os.path.join(folder, "tokenizer.json")
    tokenizer = train_tokenizer(banned)
    tokenizer.save(tokenizer_file, pretty=False)
    jobs = [(tokenizer_file, 1000 + w, num_documents // NUM_WORKERS, banned) for w in range(NUM_WORKERS)]
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        ids = np.concatenate(pool.map(encode_documents, jobs))
    np.save(os.path.join(folder, "train.npy"), ids)
    print("vocabulary", tokenizer.get_vocab_size(), "training tokens", ids.size)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
