"""scripts/check_words finds each of its patterns in each kind of file and accepts plain sentences.

  check_words_test.py REPOSITORY
"""
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = sys.argv.pop()
SCRIPT = os.path.join(ROOT, "scripts", "check_words")


def load():
    loader = importlib.machinery.SourceFileLoader("check_words", SCRIPT)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_words", loader))
    loader.exec_module(module)
    return module


check_words = load()

# A sentence that must fail for each pattern.
BAD = {
    "who": "The thread who waits is woken.",
    "lie": "The scales lie behind the codes.",
    "asked of": "All of it is asked of the current stream.",
    "is said": "A node that is down is said once.",
    "tells": "Nothing tells that the client waits.",
    "news": "The loop waits for news.",
    "is none": "A word or number that is none.",
    "is no noun": "The field is no URL.",
    "nominal clause": "The answer depends on the rest of what is kept.",
    "sentence with Of": "Two workers share a CPU. Of two on one CPU the second moves.",
    "N for M": "It takes 50 for 55 cycles.",
    "latter": "A page or a slab; the latter is freed.",
    "all the same": "The request fails all the same.",
    "as set": "The limit is 30 s as set.",
    "dear": "Pinned memory is dear to make.",
    "stays away": "A node that stays away fails its requests.",
    "come and go": "Clients come and go.",
    "to be had": "0: not to be had.",
    "so many": "At most so many bytes are kept.",
    "such a one": "Requests are queued; such a one is dropped.",
    "that is one": "The text is the one that it is without a grammar.",
    "nobody": "Nobody waits for it.",
    "verb": "The verbs that serve until a signal.",
    "has gone": "The client has gone.",
}
GOOD = """The scheduler evicts the oldest page. If two workers share a CPU, the higher-numbered one migrates. Of course the
kernel reads each row once. There is no file to read. None of the rows is valid. It is so much faster that the queue is empty.
The shapes are all the same size. The request takes 50 ms for 55 tokens. Users who call the API see an error in 3 for 4 ranks.
""".replace("Users who call", "Users that call")


class CheckWords(unittest.TestCase):
    def test_each_pattern_has_an_example(self):
        self.assertEqual(sorted(BAD), sorted(check_words.PATTERNS))

    def test_each_pattern_finds_its_example(self):
        for name, sentence in BAD.items():
            with self.subTest(name):
                self.assertIn(name, [found for _, found, _ in check_words.find([(1, sentence)])])

    def test_plain_sentences_pass(self):
        self.assertEqual(list(check_words.find([(1, GOOD)])), [])

    def test_a_sentence_over_two_lines_is_found_at_its_line(self):
        text = check_words.cpp_texts("int a;\n\n// The kernel is fast and is\n// said once.\n")
        self.assertEqual([(line, name) for line, name, _ in check_words.find(text)], [(3, "is said")])

    def test_every_kind_of_file_is_read(self):
        files = {"a.h": "int nobody; // nobody\n", "b.cc": 'const char* nobody = "nobody";\n', "c.py": '"""nobody"""\nnobody = 1  # nobody\n',
                 "d.md": "nobody `nobody`\n\n    nobody\n", "e.cmake": "# nobody\nset(nobody 1)\n", "f.cu": "/* nobody\n */ int nobody;\n"}
        wanted = {"a.h": 1, "b.cc": 1, "c.py": 2, "d.md": 1, "e.cmake": 1, "f.cu": 1}
        with tempfile.TemporaryDirectory() as folder:
            for name, source in files.items():
                path = os.path.join(folder, name)
                with open(path, "w") as file:
                    file.write(source)
                run = subprocess.run([SCRIPT, path], capture_output=True, text=True)
                self.assertEqual(run.returncode, 1, name)
                self.assertEqual(len(run.stderr.splitlines()), wanted[name], run.stderr)

    def test_code_is_not_read(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.cc")
            with open(path, "w") as file:
                file.write("int nobody = 'w';\nint lies_in(int told);\n#include \"nobody.h\"\n")
            self.assertEqual(subprocess.run([SCRIPT, path], capture_output=True).returncode, 0)


if __name__ == "__main__":
    unittest.main()
