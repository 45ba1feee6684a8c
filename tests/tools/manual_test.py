"""Man pages and completions contain every subcommand and flag, and shells and troff accept them."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY = os.path.abspath(sys.argv[1])


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def flags(subcommand):
    help_text = output(BINARY, *subcommand.split(), "--help")
    return {name for line in help_text.splitlines() if line.startswith("  -")
            for name in line.split()[0].split(",")}


SUBCOMMANDS = re.findall(r"(?m)^  (\w[\w-]*) ", output(BINARY, "--help").split("Subcommands:")[1])


class Manual(unittest.TestCase):
    def test_subcommands(self):
        self.assertIn("serve", SUBCOMMANDS)
        self.assertIn("completion", SUBCOMMANDS)
        self.assertNotIn("manual", SUBCOMMANDS)

    def test_pages(self):
        with tempfile.TemporaryDirectory() as folder:
            output(BINARY, "manual", folder)
            pages = os.listdir(folder + "/man/man1")
            for subcommand in SUBCOMMANDS:
                self.assertIn(f"fp4moe-{subcommand}.1", pages)
            self.assertIn("fp4moe-bench-latency.1", pages)
            with open(folder + "/man/man1/fp4moe-serve.1") as file:
                page = file.read()
            for flag in flags("serve"):
                self.assertIn("\\fB" + flag.replace("-", "\\-") + "\\fR", page)
            self.assertIn("FP4MOE_MAX_RUNNING_REQUESTS", page)
            with open(folder + "/man/man1/fp4moe.1") as file:
                self.assertEqual(re.findall(r"\\fBfp4moe\\-([\w-]+)\\fR\(1\)", file.read().replace("make\\-", "make-")), SUBCOMMANDS)
            if shutil.which("groff"):
                for name in pages:
                    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", f"{folder}/man/man1/{name}"],
                                          capture_output=True, text=True, check=True)
                    self.assertEqual(done.stderr, "", name)
            for name in ("bash-completion/completions/fp4moe", "zsh/site-functions/_fp4moe",
                         "fish/vendor_completions.d/fp4moe.fish"):
                self.assertTrue(os.path.exists(f"{folder}/{name}"))

    def complete(self, *words):
        """Returns bash's completions of the last word."""
        line = " ".join(f"'{w}'" for w in words)
        script = (output(BINARY, "completion", "bash") +
                  f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _fp4moe; echo \"${{COMPREPLY[@]}}\"\n")
        return output("bash", "-c", script).split()

    def test_bash(self):
        self.assertEqual(self.complete("fp4moe", "ser"), ["serve"])
        self.assertEqual(set(self.complete("fp4moe", "")) & set(SUBCOMMANDS), set(SUBCOMMANDS))
        self.assertEqual(self.complete("fp4moe", "serve", "--log-fo"), ["--log-format"])
        self.assertEqual(self.complete("fp4moe", "serve", "--log-format", ""), ["text", "json"])
        self.assertEqual(self.complete("fp4moe", "completion", "x"), [])
        self.assertEqual(self.complete("fp4moe", "bench", "lat"), ["latency"])
        self.assertIn("--json", self.complete("fp4moe", "bench", "moe", "--"))
        self.assertEqual(set(self.complete("fp4moe", "serve", "--")), {f for f in flags("serve") if f[:2] == "--"})

    def test_zsh_and_fish(self):
        for shell, form in (("zsh", "'{}["), ("fish", " -l {} ")):
            script = output(BINARY, "completion", shell)
            for subcommand in ("serve", "run", "bench latency"):
                for flag in flags(subcommand):
                    if flag.startswith("--"):
                        self.assertIn(form.format(flag if shell == "zsh" else flag[2:]), script, subcommand)
            if shutil.which(shell):
                subprocess.run([shell, "-n"], input=script, text=True, check=True)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
