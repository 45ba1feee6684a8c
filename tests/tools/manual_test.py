"""Help texts, man pages and completions contain every subcommand and flag, and shells and troff accept them."""
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
    help_text = output(BINARY, *subcommand.split(), "--help-all")
    return {name for line in help_text.splitlines() if line.startswith("  -")
            for name in line.split()[0].split(",")}


SUBCOMMANDS = re.findall(r"(?m)^  (\w[\w-]*) ", output(BINARY, "--help").split("Subcommands:")[1])


BENCHES = ["bench " + name for name in re.findall(r"(?m)^  (\w[\w-]*) ", output(BINARY, "bench", "--help").split("Subcommands:")[1])]


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

    def test_help_fits_a_screen(self):
        for subcommand in [s for s in SUBCOMMANDS if s != "bench"] + BENCHES:
            lines = output(BINARY, *subcommand.split(), "--help").splitlines()
            self.assertLessEqual(len(lines), 40, subcommand)
            self.assertLessEqual(max(map(len, lines[2:])), 110, subcommand)
        text = output(BINARY, "serve", "--help")
        for word in ("--config", "--context-length", "--tp-size", "--device", "--port", "{auto,cpu,cuda}", "[30000]",
                     f"All {len(re.findall('(?m)^  -', output(BINARY, 'serve', '--help-all')))} flags: ", "serve --help-all"):
            self.assertIn(word, text)
        for word in ("Env:", "SGLang compatibility", "--grammar-max-steps"):
            self.assertNotIn(word, text)
        self.assertNotIn("--help-all, or", output(BINARY, "doctor", "--help"))  # all flags fit

    def complete(self, *words, folder="/"):
        """Returns bash's completions of the last word."""
        line = " ".join(f"'{w}'" for w in words)
        script = (output(BINARY, "completion", "bash") + f"\ncd {folder}\n"
                  f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _fp4moe; printf '%s\\n' \"${{COMPREPLY[@]}}\"\n")
        return output("bash", "-c", script).splitlines()

    def test_bash(self):
        self.assertEqual(self.complete("fp4moe", "ser"), ["serve"])
        self.assertEqual(set(self.complete("fp4moe", "")) & set(SUBCOMMANDS), set(SUBCOMMANDS))
        self.assertEqual(self.complete("fp4moe", "serve", "--log-fo"), ["--log-format"])
        self.assertEqual(self.complete("fp4moe", "serve", "--log-format", ""), ["text", "json"])
        self.assertEqual(self.complete("fp4moe", "completion", "x"), [""])
        self.assertEqual(self.complete("fp4moe", "bench", "lat"), ["latency"])
        self.assertIn("--json", self.complete("fp4moe", "bench", "moe", "--"))
        self.assertEqual(set(self.complete("fp4moe", "serve", "--")), {f for f in flags("serve") if f[:2] == "--"})

    def test_bash_values(self):
        for flag, choices in [("--device", ["auto", "cpu", "cuda"]), ("--fabric", ["auto", "local", "threads", "mpi"]),
                              ("--self-test", ["fast", "full", "off"])]:
            self.assertEqual(self.complete("fp4moe", "serve", "M", flag, ""), choices)
            self.assertEqual(self.complete("fp4moe", "serve", "M", flag, "="), choices)
            self.assertEqual(self.complete("fp4moe", "run", "M", flag, "=", choices[1][:2]), choices[1:2])
        self.assertIn("sm90", self.complete("fp4moe", "plan", "M", "--moe-runner-backend", "sm"))
        self.assertEqual(self.complete("fp4moe", "completion", ""), ["bash", "zsh", "fish"])
        self.assertEqual(self.complete("fp4moe", "serve", "M", "--port", ""), [""])  # no list of files
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(folder + "/a model")
            with open(folder + "/a file", "w"):
                pass
            for words in [("serve", "a"), ("run", "M", "--weight-cache-dir", "a"), ("inspect", "a"), ("quantize", "in", "a")]:
                self.assertEqual(self.complete("fp4moe", *words, folder=folder), ["a model"], words)
            for words in [("serve", "M", "--config", "a"), ("eval", "--data-path", "a"), ("bench", "moe", "--peers", "a")]:
                self.assertEqual(sorted(self.complete("fp4moe", *words, folder=folder)), ["a file", "a model"], words)

    def test_file_flags_are_completed(self):
        # A flag whose help begins with a file or a folder has that type.
        for subcommand in [s for s in SUBCOMMANDS if s != "bench"] + BENCHES:
            for line in output(BINARY, *subcommand.split(), "--help-all").replace("\n" + " " * 30, " ").splitlines():
                found = re.match(r"  (-[-\w,]+) (\w+)[^ ]*(?: \([^)]*\))?(?: REQUIRED)? +((?:\w+: )?.*)", line)
                if found and re.match(r"(\w+: )?((JSON|HTML|text|safetensors) )?file\b", found[3]):
                    self.assertEqual(found[2], "FILE", line)
                if found and re.match(r"(\w+: )?(checkpoint )?folder\b", found[3]) and "tokenizer" not in line:
                    self.assertEqual(found[2], "FOLDER", line)

    def test_zsh_and_fish_values(self):
        zsh, fish = (output(BINARY, "completion", shell) for shell in ("zsh", "fish"))
        for part in (":(auto cpu cuda)'", ":FILE:_files'", ":FOLDER:_files -/'", "'*:model:_files -/'", ":INT: '"):
            self.assertIn(part, zsh)
        for part in (" -l device -x -a 'auto cpu cuda'", " -l config -r -F -d", " -l port -x -d",
                     " -l weight-cache-dir -x -a '(__fish_complete_directories)'", " -l json -d"):
            self.assertIn(part, fish)

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
