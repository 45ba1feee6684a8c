"""Broken models and flags: each is refused quickly, with one clear line and the right exit code."""
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
CORRUPT, USAGE, UNSUPPORTED, TOO_BIG = 1, 2, 3, 4  # exit codes
SECONDS = 10  # far more than any refusal takes
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALES, NORM = "model.layers.1.mlp.experts.down_proj_scales", "model.norm.weight"
DROP = object()


# ---- Ways to break a copy of the model. Each returns a function that takes the copy's folder.

def put(folder, name, content):
    path = os.path.join(folder, name)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)  # a link: does not change the original
    if content is not None:
        with open(path, "wb") as file:
            file.write(content if isinstance(content, (bytes, bytearray)) else content.encode())


def write(name, content):
    return lambda folder: put(folder, name, content)


def edit(name, change):
    """Applies change(text) -> text to the JSON file `name`."""
    def apply(folder):
        with open(os.path.join(folder, name)) as file:
            put(folder, name, change(file.read()))
    return apply


def keys(name, **values):
    """Sets keys of the JSON file `name`; `a__b` is key b of object a."""
    def change(text):
        root = json.loads(text)
        for path, value in values.items():
            *outer, last = path.split("__")
            at = root
            for key in outer:
                at = at[key]
            at[last] = value
            if value is DROP:
                del at[last]
        return json.dumps(root)
    return edit(name, change)


def config(**values):
    return keys("config.json", **values)


def tokenizer(**values):
    return keys("tokenizer.json", **values)


def weights(change):
    """Applies change(header, data) to the safetensors file in place; a returned text replaces the header."""
    def apply(folder):
        with open(os.path.join(folder, WEIGHTS), "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            data = bytearray(file.read())
        text = (change(header, data) or json.dumps(header)).encode()
        text += b" " * (-len(text) % 8)  # keeps the tensors aligned
        put(folder, WEIGHTS, struct.pack("<Q", len(text)) + text + data)
    return apply


def tensor(**values):
    """Sets fields of the tensor NORM in the header."""
    return weights(lambda header, _: header[NORM].update(values))


def scale_byte(byte, expert):
    def change(header, data):
        _, rows, blocks = header[SCALES]["shape"]
        data[header[SCALES]["data_offsets"][0] + expert * rows * blocks] = byte
    return weights(change)


def header_length(length):
    def apply(folder):
        with open(os.path.join(folder, WEIGHTS), "rb") as file:
            put(folder, WEIGHTS, struct.pack("<Q", length) + file.read()[8:])
    return apply


def truncated(folder):
    with open(os.path.join(folder, WEIGHTS), "rb") as file:
        put(folder, WEIGHTS, file.read()[:-1000])


def index(file_name):
    def apply(folder):
        put(folder, WEIGHTS, None)
        put(folder, INDEX, json.dumps({"weight_map": {NORM: file_name}}))
    return apply


no_weights = write(WEIGHTS, None)

# ---- Cases: name, the change (or the flags, or both), exit code, required text of the line.

WEIGHT_CASES = [
    ("header length 0", header_length(0), CORRUPT, "header's length is 0", "legal: 2 to"),
    ("header length huge", header_length(2**64 - 1), CORRUPT, "18446744073709551615", "legal: 2 to"),
    ("header past the end", header_length(10_000_000), CORRUPT, "10000000", "legal: 2 to"),
    ("header is not JSON", weights(lambda h, d: "{" * 10), CORRUPT, "header", "JSON at byte"),
    ("header nests deep", weights(lambda h, d: '{"a":' * 99), CORRUPT, "header", "deeper than 64"),
    ("header is not an object", weights(lambda h, d: "[1]"), CORRUPT, "header is not a JSON object"),
    ("empty file", write(WEIGHTS, b""), CORRUPT, "0 bytes", "at least 8"),
    ("overlap", tensor(data_offsets=[2762900, 2763412]), CORRUPT, NORM, "inside tensor", "v_proj.weight"),
    ("hole", weights(lambda h, d: h.pop(NORM) and None), CORRUPT, "leaving a hole", "v_proj.weight"),
    ("size overflow", tensor(shape=[2**62, 2**62]), CORRUPT, NORM, "overflows"),
    ("size wraps to the right one", tensor(shape=[2**56 + 1, 256]), CORRUPT, NORM, "overflows"),
    ("negative dimension", tensor(shape=[-1]), CORRUPT, NORM, "-1", "from 0"),
    ("offsets backwards", tensor(data_offsets=[512, 0]), CORRUPT, NORM, "[512, 0]"),
    ("offset beyond 64 bits", tensor(data_offsets=[0, 2**70]), CORRUPT, NORM, "data_offsets", "2^63-1"),
    ("unknown dtype", tensor(dtype="F13"), UNSUPPORTED, NORM, "F13"),
    ("wrong dtype", tensor(dtype="F16"), USAGE, NORM, "F16 [256]", "BF16 [256]"),
    ("wrong shape", tensor(shape=[2, 128]), USAGE, NORM, "[2, 128]", "[256]"),
    ("truncated data", truncated, CORRUPT, "ends at data byte", "truncated"),
    ("missing tensor", weights(lambda h, d: h.update({"mtp.norm.weight": h.pop(NORM)})), USAGE, f"no tensor '{NORM}'"),
    ("NaN scale", scale_byte(0xFF, 3), CORRUPT, SCALES, "0xFF", "expert 3,", "0x00 to 0xFE"),
    ("no weights", no_weights, USAGE, WEIGHTS, INDEX),
    ("missing shard", index("model-00001-of-00002.safetensors"), USAGE, "model-00001-of-00002.safetensors", NORM),
    ("index points up", index("../x.safetensors"), USAGE, NORM, "'../x.safetensors'", "same folder"),
    ("index is absolute", index("/etc/x.safetensors"), USAGE, NORM, "'/etc/x.safetensors'", "same folder"),
    ("index is not JSON", lambda f: (no_weights(f), put(f, INDEX, "{")), CORRUPT, INDEX, "JSON at byte"),
]

CONFIG_CASES = [  # on copies without weights: must be refused before weights are opened
    ("no config", write("config.json", None), USAGE, "config.json"),
    ("config is not JSON", write("config.json", "{"), CORRUPT, "config.json", "JSON at byte"),
    ("config is a list", write("config.json", "[]"), USAGE, "config.json", "object"),
    ("no experts", config(num_local_experts=0), USAGE, "num_local_experts = 0", "from 1"),
    ("top-k beyond the experts", config(num_experts_per_tok=17), USAGE, "num_experts_per_tok = 17", "num_local_experts = 16"),
    ("hidden size cuts a block", config(hidden_size=240), USAGE, "hidden_size = 240", "multiples of 32"),
    ("negative size", config(intermediate_size=-256), USAGE, "intermediate_size = -256", "from 1"),
    ("size is a text", config(hidden_size="256"), USAGE, 'hidden_size = "256"', "whole numbers"),
    ("size is missing", config(vocab_size=DROP), USAGE, "vocab_size"),
    ("1e18 layers", config(num_hidden_layers=10**18), USAGE, f"num_hidden_layers = {10**18}", "from 1 to"),
    ("vocabulary of 1e18", config(vocab_size=10**18), USAGE, f"vocab_size = {10**18}", "from 1 to"),
    ("vocabulary of 1e30", config(vocab_size=10**30), USAGE, "vocab_size = 1e+30", "from 1 to"),
    ("unknown architecture", config(architectures=["LlamaForCausalLM"], model_type="llama"), UNSUPPORTED,
     "'LlamaForCausalLM'", "GptOssForCausalLM"),
    ("unknown quant_method", config(quantization_config__quant_method="awq"), UNSUPPORTED, "quant_method 'awq'", "'mxfp4'"),
]

FLAG_CASES = [  # also on copies without weights
    ("unknown runner", "--moe-runner-backend fast", USAGE, "'fast'", "marlin"),
    ("ep 3 of 16 experts", "--tp 3 --ep-size 3", UNSUPPORTED, "ep=3", "num_experts=16", "--ep 1"),
    ("tp 0", "--tp 0", USAGE, "tp=0", "1 and 1024"),
    ("tp two", "--tp two", USAGE, "--tp-size: 'two' must be a decimal integer"),
    ("deepep", "--moe-a2a-backend deepep --tp 3", UNSUPPORTED, "ep=3 (raised to tp by a2a=deepep)", "--tp 2"),
    ("float16", "--dtype float16", USAGE, "--dtype float16", "bfloat16"),
    ("wrong scheme", "--quantization modelopt_fp4", UNSUPPORTED, "modelopt_fp4", "which is mxfp4"),
    ("cuda", "--device cuda", UNSUPPORTED, "device=cuda", "--device cpu"),
    ("unknown device", "--device tpu", USAGE, "'tpu'", "cpu"),
    ("page of 0 tokens", "--page-size 0", USAGE, "--page-size 0", "1 to 4096"),
    ("negative threads", "--threads -3", USAGE, "--threads -3", "0 to"),
    ("share of memory above 1", "--mem-fraction-static 7", USAGE, "--mem-fraction-static 7", "at most 1"),
    ("negative context", "--context-length -1", USAGE, "--context-length -1", "at least 0"),
    ("unknown flag", "--frobnicate", USAGE, "--frobnicate", "--help"),
]

SIZE_CASES = [  # on a copy with a NaN scale: must be refused before it is read
    ("context beyond the model's", "--context-length 131073", TOO_BIG, "131073", "131072 tokens"),
    ("absurd context", f"--context-length {10**18}", TOO_BIG, str(10**18), "131072 tokens"),
    ("absurd pool", f"--max-total-tokens {10**18}", TOO_BIG, str(10**18), "available", "would do"),
    ("absurd share of memory", "--mem-fraction-static 1e-7", TOO_BIG, "weights take 9.01 MiB", "--mem-fraction-static"),
]

SPLIT = {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}
TEXT_CASES = [  # tokenizer and chat template
    ("no tokenizer", write("tokenizer.json", None), "", USAGE, "tokenizer.json"),
    ("truncated tokenizer", edit("tokenizer.json", lambda t: t[:9999]), "", CORRUPT, "tokenizer.json", "JSON at byte"),
    ("tokenizer is a list", write("tokenizer.json", "[]"), "", USAGE, "tokenizer.json", "expected an object"),
    ("vocab is a number", tokenizer(model__vocab=3), "", USAGE, "model.vocab is 3", "expected"),
    ("ids are texts", tokenizer(model__vocab={"a": "b"}), "", USAGE, "model.vocab", '"b"', "expected"),
    ("id beyond 2^31", tokenizer(model__vocab={"a": 2**40}), "", USAGE, "model.vocab", str(2**40), "expected"),
    ("merges of absent tokens", tokenizer(model__merges=[["qqq", "zzz"]]), "", USAGE, "model.merges[0]", "qqq"),
    ("merges are numbers", tokenizer(model__merges=[7]), "", USAGE, "model.merges[0] is 7", "expected"),
    ("regex does not compile", tokenizer(pre_tokenizer__pretokenizers=[SPLIT]), "", USAGE, "pre_tokenizer", "of (a"),
    ("unknown model type", tokenizer(model__type="Unigram"), "", UNSUPPORTED, "Unigram", "BPE"),
    ("no template at all", lambda folder: None, "--chat-template /none.jinja", USAGE, "/none.jinja"),
    ("template with a syntax error", write("a.jinja", "{% if x %}"), "--chat-template {folder}/a.jinja", USAGE,
     "a.jinja", "line 1", "expected 'endif'"),
    ("template nests deep", write("a.jinja", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}"),
     "--chat-template {folder}/a.jinja", TOO_BIG, "a.jinja", "line 1", "deep"),
]


class StartUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = tempfile.TemporaryDirectory()
        cls.ids = os.path.join(cls.base.name, "ids.json")

    @classmethod
    def tearDownClass(cls):
        cls.base.cleanup()

    @contextlib.contextmanager
    def copy(self, *breaks):
        folder = tempfile.mkdtemp(dir=self.base.name)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS):
            os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
        for apply in breaks:
            apply(folder)
        yield folder
        shutil.rmtree(folder)

    def logits(self, folder, ids="[1, 2, 3]"):
        put(self.base.name, "ids.json", ids)
        return ["logits", folder, "--input-ids", self.ids, "--output", os.path.join(self.base.name, "logits.safetensors")]

    def subcommands(self, folder):
        """Every subcommand that loads a model."""
        return [self.logits(folder), ["run", folder, "--prompt", "Hi"], ["serve", folder, "--port", "0"]]

    def refused(self, command, code, *words):
        ended = subprocess.run([BINARY, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(ended.returncode, code, (command, ended.stdout, ended.stderr))
        self.assertRegex(ended.stderr, r"\Aerror: [^\n]*\n\Z", command)
        for word in words:
            self.assertIn(word, ended.stderr, command)

    def all_refused(self, name, breaks, flags, code, *words, subcommands=slice(None)):
        with self.subTest(name), self.copy(*breaks) as folder:
            for command in self.subcommands(folder)[subcommands]:
                self.refused(command + flags.format(folder=folder).split(), code, *words)

    def test_weights(self):
        for name, broken, code, *words in WEIGHT_CASES:
            self.all_refused(name, [broken], "", code, *words)

    def test_config(self):
        for name, broken, code, *words in CONFIG_CASES:
            self.all_refused(name, [broken, no_weights], "", code, *words)

    def test_flags(self):
        for name, flags, code, *words in FLAG_CASES:
            self.all_refused(name, [no_weights], flags, code, *words)

    def test_sizes(self):
        for name, flags, code, *words in SIZE_CASES:
            self.all_refused(name, [scale_byte(0xFF, 0)], flags, code, *words)

    def test_tokenizer_and_template(self):
        for name, broken, flags, code, *words in TEXT_CASES:
            self.all_refused(name, [broken], flags, code, *words, subcommands=slice(1, None))

    def test_folder_that_does_not_exist(self):
        for command in [*self.subcommands("/none/such"), ["inspect", "/none/such"]]:
            self.refused(command, USAGE, "'/none/such'", "does not exist")

    def test_command_line(self):
        for line, *words in [("", "subcommand", "serve"), ("swerve", "'swerve'", "serve"), ("run", "--model-path"),
                             (f"run {MODEL}", "stdin contains no prompt", "--prompt"), (f"serve {MODEL} --port 70000", "70000", "65535"),
                             (f"serve {MODEL} --port 0 --max-connections 0", "max_connections=0", "1"),
                             (f"serve {MODEL} --port 0 --max-body-bytes -1", "max_body_bytes=-1", "1"),
                             (f"serve {MODEL} --port 0 --host none.invalid", "none.invalid")]:
            with self.subTest(line):
                self.refused(line.split(), USAGE, *words)

    def test_input_ids(self):
        for text, *words in [("[5, 1024]", "1024 at index 1", "0 to 1023"), ("[-1]", "-1 at index 0"), ("[1.5]", "1.5"),
                             ('["a"]', '"a"'), ("[18446744073709551615]", "18446744073709551615"), ("[]", "non-empty"),
                             ("", "non-empty"), ("{", "JSON"), ('{"a": 1}', "JSON array"), ("[" * 100000, "JSON")]:
            with self.subTest(text[:40]):
                self.refused(self.logits(MODEL, text), USAGE, self.ids, *words)
        self.refused(self.logits(MODEL, None), USAGE, self.ids, "No such file")

    def test_inspect_shows_what_is_wrong(self):
        for broken, word in [(config(hidden_size=-1), "hidden_size = -1"), (truncated, "truncated"), (no_weights, WEIGHTS)]:
            with self.copy(broken) as folder:
                ended = subprocess.run([BINARY, "inspect", folder], capture_output=True, text=True, timeout=SECONDS)
                self.assertEqual(ended.returncode, 0, ended.stderr)
                self.assertIn(word, ended.stdout)
        with self.copy(scale_byte(0xFF, 5)) as folder:
            self.refused(["inspect", folder, "--experts"], CORRUPT, SCALES, "expert 5,")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
