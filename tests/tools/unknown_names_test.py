"""Unknown flags and subcommands: the error names the nearest known one, or what another engine's flag is here."""
import os
import re
import subprocess
import sys
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs")
USAGE = 2  # exit code

NEAREST = [  # command line, flag that is suggested
    ("serve M --modle-path x", "--model-path"), ("serve M --prot 1", "--port"), ("serve M --max-runing-requests 4", "--max-running-requests"),
    ("serve M --tensor-paralel-size 2", "--tensor-parallel-size"), ("serve M --tpsize 2", "--tp-size"),
    ("serve M --max_model_len=4", "--max-model-len"), ("serve M --served_model_name x", "--served-model-name"),
    ("serve M --TP-SIZE 2", "--tp-size"), ("serve M --trust-remote-cod", "--trust-remote-code"),
    ("serve M --disable-radix", "--disable-radix-cache"), ("serve M --max-running 4", "--max-running-requests"),
    ("run M --promt x", "--prompt"), ("run M --temprature 0", "--temperature"), ("plan M --gpu-memroy 80", "--gpu-memory"),
    ("bench latency M --n-promt 4", "--n-prompt"), ("eval --evalname gsm8k", "--eval-name"), ("--verison", "--version"),
]
KNOWN = "--max-model-len 64 --tensor-parallel-size 1 --data-parallel-size 1 --kv-cache-dtype auto --trust-remote-code"


def error_of(*args):
    ended = subprocess.run([BINARY, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    assert ended.returncode == USAGE and ended.stdout == "", (args, ended)
    assert re.fullmatch(r"error: [^\n]*\n", ended.stderr), (args, ended.stderr)
    return ended.stderr


def peer_rows():
    """(names, hint) of each row of the table in docs/flags.md, which flags_document_test compares with the binary."""
    with open(os.path.join(DOCS, "flags.md")) as file:
        section = file.read().split("## Flags of vLLM and llama.cpp")[1].split("\n## ")[0]
    return [(re.findall("`([^`]+)`", row[0]), row[1]) for row in re.findall(r"(?m)^\| (`.*`) \| (.*) \|$", section)]


class UnknownNames(unittest.TestCase):
    def test_nearest_flag(self):
        for line, flag in NEAREST:
            with self.subTest(line):
                self.assertIn(f"(did you mean {flag}?)", error_of(*line.split()))

    def test_nothing_is_near(self):
        for line in ("serve M --frobnicate", "serve M --x", "serve M -z", "eval --ctx-size 4"):
            with self.subTest(line):
                error = error_of(*line.split())
                self.assertNotIn("did you mean", error)
                self.assertRegex(error, r"is not a flag of fp4moe \w+; see `fp4moe \w+ --help-all`")

    def test_each_flag_of_another_engine(self):
        rows = peer_rows()
        known = "".join(subprocess.run([BINARY, subcommand, "--help-all"], capture_output=True, text=True, check=True).stdout
                        for subcommand in ("serve", "run"))
        self.assertGreater(len(rows), 50)
        for names, hint in rows:
            for name in names:
                with self.subTest(name):
                    errors = [error_of(subcommand, "M", f"{name}=1" if name[:2] == "--" else name, "--comm-timeout", "0", "--no-such-flag")
                              for subcommand in ("serve", "run")]
                    self.assertTrue(any(f"{name} is not a flag of fp4moe {subcommand}: {hint};" in error
                                        for subcommand, error in zip(("serve", "run"), errors)), (hint, errors))
                    for flag in re.findall(r"--[a-z0-9-]+", hint.split("(")[0]):
                        self.assertRegex(known, rf"[ ,]{flag}[ ,\n]")

    def test_common_names(self):
        for flag, word in [("--gpu-memory-utilization 0.9", "use --mem-fraction-static"), ("--max-num-seqs 4", "use --max-running-requests"),
                           ("--max-num-batched-tokens 4", "use --max-prefill-tokens"), ("--enable-expert-parallel", "use --ep-size"),
                           ("-ngl 99", "use --device cuda"), ("-c 4096", "use --context-length"), ("--ctx-size 4096", "use --context-length"),
                           ("-np 4", "use --max-running-requests"), ("--parallel 4", "use --max-running-requests"),
                           ("--n-gpu-layers 99", "use --device cuda"), ("-t 8", "use --threads"), ("-fa", "no flag is needed"),
                           ("--jinja", "no flag is needed"), ("--enable-prefix-caching", "no flag is needed"),
                           ("--swap-space 4", "no flag is needed")]:
            for subcommand in ("serve", "run", "plan"):
                self.assertIn(f"{flag.split()[0]} is not a flag of fp4moe {subcommand}: {word}", error_of(subcommand, "M", *flag.split()))
        self.assertIn("-m is not a flag of fp4moe serve: use --model-path", error_of("serve", "-m", "M"))

    def test_known_names(self):
        ended = subprocess.run([BINARY, "plan", "--model", MODEL, "--device", "cpu", *KNOWN.split()], capture_output=True, text=True)
        self.assertEqual(ended.returncode, 0, ended.stderr)

    def test_all_unknown_flags_are_named(self):
        error = error_of("serve", "M", "--max-num-seqs", "4", "--prot", "1", "-ngl", "99")
        for part in ("--max-num-seqs is not a flag", "--prot is not a flag", "-ngl is not a flag"):
            self.assertEqual(error.count(part), 1)

    def test_values_are_not_flags(self):
        self.assertIn("--port: 'abc' must be a decimal integer", error_of("serve", "M", "--port", "abc"))
        self.assertIn("not expected: extra", error_of("serve", "M", "extra"))

    def test_subcommands(self):
        for line, near in [("swerve", "serve"), ("sevre", "serve"), ("bnech", "bench"), ("chat", "run"), ("launch_server", "serve"),
                           ("make_tiny", "make-tiny"), ("bench latncy", "latency")]:
            with self.subTest(line):
                error = error_of(*line.split())
                self.assertIn(f"'{line.split()[-1]}' is not a subcommand of fp4moe", error)
                self.assertIn(f"(did you mean {near}?); use one of: ", error)
        self.assertNotIn("did you mean", error_of("frobnicate"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
