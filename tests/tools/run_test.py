"""fp4moe run: a chat on a pseudo-terminal, the prompt on stdin, and exit codes."""
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
USAGE, UNSUPPORTED = 2, 3  # exit codes
QUESTION = "Mia has 12 apples. Mia buys 5 more and gives 3 to Tom. How many apples does Mia have now?"
GREEDY = ["--temperature", "0", "--device", "cpu"]


def run(*args, stdin=b"", timeout=60):
    return subprocess.run([BINARY, "run", MODEL, *GREEDY, *args], input=stdin, capture_output=True, timeout=timeout)


class Chat:
    """A chat on a pseudo-terminal, which is stdin, stdout and stderr."""

    def __init__(self, *args, stdout=None):
        self.terminal, end = pty.openpty()
        self.process = subprocess.Popen([BINARY, "run", *(args or (MODEL,)), *GREEDY], stdin=end, stdout=stdout or end, stderr=end,
                                        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(end)
        self.text = ""  # unread

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)

    def until(self, pattern, seconds=60):
        """Returns the text before a match of the pattern and the match."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, (pattern, self.text)
            try:
                self.text += os.read(self.terminal, 65536).decode(errors="replace").replace("\r\n", "\n")
            except OSError as error:  # the process has ended
                raise AssertionError((pattern, self.text)) from error
        before, self.text = self.text[:found.start()], self.text[found.end():]
        return before

    def send(self, text):
        os.write(self.terminal, text.encode())

    def ask(self, line):
        """Sends a line and returns what is printed up to the next prompt, without the echo."""
        self.send(line + "\n")
        return self.until("(?m)^> ").split("\n", 1)[1]

    def exit_code(self):
        """The exit code; reads what the process prints at its end."""
        try:
            while data := os.read(self.terminal, 65536):
                self.text += data.decode(errors="replace")
        except OSError:
            pass
        return self.process.wait(timeout=30)


class OnTerminal(unittest.TestCase):
    def test_turns_and_commands(self):
        with Chat() as chat:
            self.assertIn("/help lists the commands", chat.until("(?m)^> "))
            first = chat.ask(QUESTION)
            self.assertIn("#### 14", first)
            self.assertRegex(chat.ask("/help"), r"(?s)/clear.*/system TEXT.*/temperature X.*/regenerate.*/quit")
            error = chat.ask("/cleer")
            for word in ("error: '/cleer' is not a command", "/clear", "/quit"):
                self.assertIn(word, error)
            self.assertEqual(chat.ask("/regenerate"), first)
            self.assertEqual(chat.ask("/clear"), "")
            self.assertIn("error: /regenerate", chat.ask("/regenerate"))
            self.assertEqual(chat.ask(QUESTION), first)
            self.assertEqual(chat.ask("   "), "")
            chat.send("/quit\n")
            self.assertEqual(chat.exit_code(), 0)

    def test_settings(self):
        with Chat() as chat:
            chat.until("(?m)^> ")
            for line, *words in [("/temperature warm", "takes a number", "warm"), ("/temperature -1", "temperature", "-1"),
                                 ("/top-p 2", "top_p"), ("/top-k x", "takes a number"), ("/seed -1", "takes a number"),
                                 ("/max-tokens -5", "max_new_tokens"), ("/reasoning loud", "show or hide")]:
                error = chat.ask(line)
                for word in ("error: ", *words):
                    self.assertIn(word, error, line)
            for line in ("/temperature 0", "/top-p 0.9", "/top-k 5", "/seed 3", "/system Answer.", "/system", "/reasoning hide"):
                self.assertEqual(chat.ask(line), "", line)
            self.assertEqual(chat.ask("/max-tokens 3"), "")
            self.assertIn("(stopped after 3 tokens)", chat.ask(QUESTION))

    def prompt_tokens(self, chat, text):
        answer = chat.ask(text)
        self.assertIn("prompt tokens", answer)
        return int(re.search(r"(\d+) prompt tokens", answer)[1])

    def test_history_is_sent(self):
        with Chat(MODEL, "--stats", "--max-tokens", "4") as chat:
            chat.until("(?m)^> ")
            first, second = (self.prompt_tokens(chat, "Hello") for _ in range(2))
            self.assertGreater(second, first)
            chat.ask("/clear")
            self.assertEqual(self.prompt_tokens(chat, "Hello"), first)
            chat.ask("/clear")
            chat.ask("/system Answer with one word.")
            self.assertGreater(self.prompt_tokens(chat, "Hello"), first)

    def test_several_lines(self):
        with Chat(MODEL, "--stats", "--max-tokens", "1") as chat:
            chat.until("(?m)^> ")
            one_line = self.prompt_tokens(chat, "apples")
            chat.ask("/clear")
            for line in ('"""apples', "and pears", "and plums"):
                chat.send(line + "\n")
                chat.until(r"(?m)^\. ")
            self.assertGreater(self.prompt_tokens(chat, '"""'), one_line + 2)

    def test_interrupt_stops_the_response_and_not_the_program(self):
        # Random weights rarely choose an end token, so the response would fill the context.
        with Chat(MODEL, "--load-format", "dummy", "--self-test", "off") as chat:
            chat.until("(?m)^> ")
            chat.send("Hello\n")
            chat.until("Hello\n.{20}")
            chat.send("\x03")
            self.assertIn("(stopped)\n", chat.until("(?m)^> ", seconds=10))
            chat.send("half a line\x03")  # discards the line
            chat.until("(?m)^> ")
            self.assertIn("/clear", chat.ask("/help"))
            chat.send("\x04")
            self.assertEqual(chat.exit_code(), 0)

    def test_reasoning(self):
        template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                    "{# </think> #}<|im_start|>assistant\n<think>")
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
            file.write(template)
            file.flush()
            for args, shown in [((), True), (("--hide-reasoning",), False)]:
                with Chat(MODEL, "--chat-template", file.name, "--max-tokens", "20", *args) as chat:
                    chat.until("(?m)^> ")
                    for line, is_shown in [("Hello", shown), ("/reasoning hide", None), ("Hello", False),
                                           ("/reasoning show", None), ("Hello", True)]:
                        text = chat.ask(line)
                        if is_shown is not None:
                            self.assertEqual("\x1b[2m" in text, is_shown, (args, line))

    def test_only_the_response_goes_to_stdout(self):
        with tempfile.TemporaryFile() as file, Chat(stdout=file) as chat:
            chat.until("(?m)^> ")
            chat.ask(QUESTION)
            chat.send("\x04")
            self.assertEqual(chat.exit_code(), 0)
            file.seek(0)
            text = file.read().decode()
        self.assertIn("#### 14", text)
        self.assertNotIn("\x1b", text)
        self.assertNotIn(">", text)

    def test_refusals(self):
        for args, code, *words in [((MODEL, "--raw"), USAGE, "--raw requires --prompt"), (("/none/such",), USAGE, "does not exist")]:
            with Chat(*args) as chat:
                self.assertEqual(chat.exit_code(), code)
                for word in words:
                    self.assertIn(word, chat.text)


class OnePrompt(unittest.TestCase):
    def test_an_unknown_instruction_set_is_not_ignored_silently(self):
        ended = subprocess.run([BINARY, "run", MODEL, *GREEDY, "--prompt", "Hello", "--max-tokens", "1"], capture_output=True,
                               text=True, timeout=60, env={**os.environ, "FP4MOE_ISA": "avx-512"})
        self.assertEqual(ended.returncode, 0)
        self.assertIn("FP4MOE_ISA is ignored: unknown instruction set 'avx-512'; use scalar, avx2,", ended.stderr)

    def test_prompt_on_stdin(self):
        flag = run("--prompt", QUESTION)
        self.assertEqual((flag.returncode, flag.stderr), (0, b""))
        self.assertIn(b"#### 14", flag.stdout)
        for text in (QUESTION, QUESTION + "\n"):
            self.assertEqual(run(stdin=text.encode()).stdout, flag.stdout)
        self.assertEqual(run("--prompt", QUESTION, stdin=b"not read").stdout, flag.stdout)
        raw = run("--raw", "--max-tokens", "2", stdin=b"Hello")
        self.assertEqual((raw.returncode, raw.stdout), (0, run("--raw", "--max-tokens", "2", "--prompt", "Hello").stdout))

    def test_exit_codes(self):
        for args, stdin, code, *words in [((), b"", USAGE, "stdin contains no prompt", "--prompt"), ((), b"\n", USAGE, "no prompt"),
                                          ((), b"a" * ((16 << 20) + 1), USAGE, "longer than 16777216 bytes"),
                                          (("--temperature", "-1"), b"a", USAGE, "temperature"),
                                          (("--device", "cuda"), b"a", UNSUPPORTED, "cuda")]:
            with self.subTest(args=args, words=words):
                ended = run(*args, stdin=stdin)
                self.assertEqual((ended.returncode, ended.stdout), (code, b""))
                error = ended.stderr.decode()
                self.assertRegex(error, r"\Aerror: [^\n]*\n\Z")
                for word in words:
                    self.assertIn(word, error)

    def test_prompt_flag_on_a_terminal(self):
        with Chat(MODEL, "--prompt", QUESTION) as chat:
            self.assertEqual(chat.exit_code(), 0)
            self.assertIn("#### 14", chat.text)
            self.assertNotIn("/help", chat.text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
