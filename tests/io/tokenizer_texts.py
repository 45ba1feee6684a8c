"""Texts that are hard for tokenizers: fixed ones, and random ones from a seed."""
import random

WORDS = ["The", "quick", "brown", "fox", "don't", "DON'T", "we'LL", "I'm", "it\u017f", "they'\u017f", "\u212Aelvin",
         "HTTPServer", "snake_case", "camelCase", "naïve", "nai\u0308ve", "Straße", "STRASSE", "ﬁn", "Ångström",
         "A\u030angström", "Привет", "мир", "Ελλάδα", "Σίσυφος", "שלום", "עולם", "مرحبا", "العالم", "हिन्दी", "ไทย",
         "日本語", "テスト", "ひらがな", "中文", "汉字", "한국어", "\u1112\u1161\u11ab", "ǅ", "ªº", "ʰʱ", "ⅷ", "Ⓐⓑ",
         "𝔘𝔫𝔦", "𝟘𝟙", "𞤀𞤢", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️", "e\u0301\u0323", "e\u0323\u0301",
         "٣٤٥", "१२३", "123", "1234567", "3.14", "²³", "½", "x\u200dy", "\u200b", "\ufeff", "\ufffd", "\u00ad",
         "\u202eabc\u202c", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end", "|>", "<s>", "<mask>", "é<n>"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\u00a0", "\u3000", "\u2028", "\u2029", "\u0085",
          "\u180e", "\u1680", "\x0b", "\x0c", "\x1c", ""]
MARKS = [".", ",", "!", "?", "...", "'", "\"", "'s", "'T", "'Re", "(", ")", "[]", "{}", "/", "//", "\\", "#", "$", "€",
         "+", "=", "-", "—", "_", "`", "~", "^", "|", "@", "&", "*", "%", "·", "。", "、", "「", "」", "¿", "°"]

FIXED = [
    "", " ", "  ", "a", "\n", "\r\n", " a", "a ", "  a  b  ", "Hello, world!", "Hello  world\n\n\nfoo\r\n\r\nbar\t\tbaz ",
    "I'm you're he'S we'LL they'Ve I'D can't", "'s 't 're 've 'm 'll 'd'S'T'RE'VE'M'LL'D", "it'\u017f it'S 'lL 'L\u0142",
    "\u212Aelvin 'K' '\u212A", "0 12 345 6789 01234567890123456789", "a1b22c333d4444", "१२३४५ ٣٤٥٦ 𝟘𝟙𝟚𝟛 ⅷⅸ ²³½",
    "<|endoftext|>", "a<|endoftext|>b <|im_start|> <|im_end|>\n<|im_start|>user", "<|end<|endoftext|>oftext|>", "<|endoftext|",
    "e\u0301 é e\u0323\u0301 e\u0301\u0323 \u1112\u1161\u11ab 한 A\u030a Å \u212b", "q\u0307\u0323 \u1e9b\u0323 \u0958 \u2126 \ufb1d \U0001d15e",
    "a\u0898\u0323 a\u0323\u0898 \U00011935\U00011930 a\U0001e4ec\u0323",
    "日本語テスト、ひらがな。中文汉字，한국어！", "漢字123かな\n改行\r\nテスト　全角", "Привет, мир! Ελλάδα; שלום עולם مرحبا بالعالم",
    "👍 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️❤ 🏴\U000e0067\U000e0062\U000e007f", "\u0000\u0001\u0002\u001f\u007f\u0080\u009f", "\ufeffBOM \u200bzero\u200c\u200d\u2060",
    "\u1c89\u1c8a \U00010d50\U00010d70 \U0002ebf0\U00031350 \U00016d70\U00016d71\U00016d72\U00016d73 \U0001fae9",
    "tabs\tand\x0bvt\x0cff\x85nel\u00a0nbsp\u2028ls\u2029ps\u3000ideo\u180emvs", "https://example.org/a_b/c?d=e&f=%20#g", "int main() {\n    return 0;\n}\n",
    "camelCaseWord HTTPServer XMLHttpRequest iPhone ABCdef ABC", "ǅungla ǄUNGLA ªº ʰʱʲ ƻǀ", "a\u0300\u0301\u0302b\u0903c\u20ddd",
    "\U0010ffff\U000f0000\ue000\ufdd0\uffff", "x" * 300, "ab" * 200, " " * 100 + "x", "\n" * 50 + " \n" * 20, "é" * 100, "👍" * 60,
    "word" + "!" * 80 + "?\n\n/", "-" * 33 + "\r\n" + "=" * 33, "1" * 100, "''''s's''t", "(a)[b]{c}<d>", "…—–‘’“”", "¡¢£¤¥¦§¨©ª«¬®¯°±²³´µ¶·¸¹º»¼½¾¿×÷",
]


def random_text(rng):
    parts = []
    for _ in range(rng.choice([1, 2, 3, 5, 8, 20])):
        kind = rng.random()
        if kind < 0.35:
            parts.append(rng.choice(WORDS))
        elif kind < 0.55:
            parts.append(rng.choice(SPACES))
        elif kind < 0.7:
            parts.append(rng.choice(MARKS))
        elif kind < 0.8:
            parts.append("".join(rng.choice("abcABC 'sS\n1") for _ in range(rng.randrange(1, 12))))
        elif kind < 0.85:
            parts.append(rng.choice("a \n1!é日👍\u0301") * rng.randrange(1, 60))
        else:
            limit = rng.choice([0x80, 0x250, 0x3000, 0xFFFF, 0x20000, 0x110000])
            parts.append("".join(chr(c) for c in (rng.randrange(limit) for _ in range(rng.randrange(1, 8)))
                                 if not 0xD800 <= c < 0xE000))
    return "".join(parts)


def random_texts(seed, count):
    rng = random.Random(seed)
    return [random_text(rng) for _ in range(count)]
