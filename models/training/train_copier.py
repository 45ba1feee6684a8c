"""Trains a tiny gpt_oss model that repeats the passage of its prompt, with MXFP4 rounding in the loop for the second
half, and writes the fixture of `ngram_serve_test`: minutes on a CPU (transformers >= 5, the stock class).

    python3 train_copier.py ../../tests/tools/passage_copier [--steps 900] [--batch 32]
"""
import argparse
import os
import random
import tempfile

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM

import recipe
import train_gptoss
from make_tokenizer import PATTERN, SPECIAL
from recipe import DEVICE

WORDS = """apple arrow barn bell bird blue boat book bread brick bridge brown candle chair church city cloud coat corn
cow cup dark desk dog door dress dust egg farm field fire fish flag flower forest fox garden gate glass gold grass green
hand hat hill horse house ice iron island key lamp leaf letter light lion map milk mill moon mouse north nut oak ocean
old paper pear pen pond rain red river road roof rope rose salt sand ship silver sky snow south star stone storm table
tall tea tower tree wall water white wind wolf wood yard young""".split()
FRAME = ["user", "assistant", "system", "Passage", "Write", " the", " passage", " again"]  # the chat's other words
MIN_WORDS, MAX_WORDS = 12, 32  # of a passage


def make_passage(r, num_words):
    return "Passage: " + " ".join(r.choices(WORDS, k=num_words)) + "."


def make_tokenizer():
    """Every word with a space before it is one token; other text is spelled in printable ASCII characters."""
    symbols = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = [word.replace(" ", "Ġ") for word in FRAME + [" " + word for word in WORDS]]
    vocab = {token: i for i, token in enumerate(SPECIAL + symbols + words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_config(vocab_size):
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, vocab_size=vocab_size, hidden_size=64, intermediate_size=32,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=128, num_experts_per_tok=2,
        max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **recipe.TOKEN_IDS)
    config.architectures = ["GptOssForCausalLM"]
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def draw_batch(tokenizer, r, batch):
    """Returns ids and labels [B, L]; only the repeated passage and its end are labels."""
    rows = []
    for _ in range(batch):
        passage = make_passage(r, r.randint(MIN_WORDS, MAX_WORDS))
        prompt = tokenizer.encode(recipe.chat_prompt(passage + "\nWrite the passage again.")).ids
        rows.append((prompt, tokenizer.encode(passage + "<|im_end|>").ids))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    pad = lambda row, value: row + [value] * (width - len(row))
    return (torch.tensor([pad(p + a, recipe.END_OF_TEXT) for p, a in rows], device=DEVICE),
            torch.tensor([pad([-100] * len(p) + a, -100) for p, a in rows], device=DEVICE))


@torch.no_grad()
def share_repeated(model, tokenizer, r):
    """Returns the share of new passages whose every token is the most probable one."""
    ids, labels = draw_batch(tokenizer, r, 256)
    expected = labels[:, 1:]
    right = (model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1) == expected) | (expected == -100)
    return right.all(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_folder")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    os.makedirs(args.output_folder, exist_ok=True)
    torch.manual_seed(0)
    tokenizer, r = make_tokenizer(), random.Random(0)
    config = make_config(tokenizer.get_vocab_size())
    model = GptOssForCausalLM(config).to(DEVICE).float()
    recipe.train(model, lambda batch: draw_batch(tokenizer, r, batch), args, train_gptoss.patch(model),
                 train_gptoss.begin_step)
    print("repeated", share_repeated(model, tokenizer, r))
    tensors = train_gptoss.fp4_tensors(model)
    del tensors["lm_head.weight"]  # tied
    with tempfile.TemporaryDirectory() as args.tokenizer_folder:
        tokenizer.save(os.path.join(args.tokenizer_folder, "tokenizer.json"), pretty=False)
        recipe.write_files(config, tensors, train_gptoss.DECLARATION, args)


if __name__ == "__main__":
    main()
