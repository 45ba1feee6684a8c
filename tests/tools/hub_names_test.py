"""Models named by their Hugging Face repository id, in a local hub cache; and the names that a server accepts."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
USAGE = 2
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubNames(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.cache = cls.folder.name
        cls.repository = os.path.join(cls.cache, "models--acme--tiny")
        cls.snapshot = os.path.join(cls.repository, "snapshots", COMMIT)
        for folder in ("blobs", "refs", "snapshots/" + COMMIT):
            os.makedirs(os.path.join(cls.repository, folder))
        for name in os.listdir(MODEL):
            blob = os.path.join(cls.repository, "blobs", "of-" + name)
            shutil.copyfile(os.path.join(MODEL, name), blob)
            os.symlink(os.path.join("../../blobs", "of-" + name), os.path.join(cls.snapshot, name))
        with open(os.path.join(cls.repository, "refs/main"), "w") as file:
            file.write(COMMIT)
        os.environ["HF_HUB_CACHE"] = cls.cache

    def run_tool(self, *arguments, **environment):
        return subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **environment})

    def refusal(self, *arguments):
        done = self.run_tool(*arguments)
        self.assertEqual(done.returncode, USAGE, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        return done.stderr

    def ask(self, serve, path, body=None):
        """Status and JSON of a response."""
        request = urllib.request.Request(serve.url + path, None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def test_every_subcommand(self):
        ids = os.path.join(self.cache, "ids.json")
        with open(ids, "w") as file:
            file.write("[1, 2]")
        for command in (["inspect", "acme/tiny", "--json"], ["plan", "acme/tiny", "--json"], ["doctor", "--model", "acme/tiny"],
                        ["backends", "--model", "acme/tiny", "--json"], ["run", "acme/tiny", "-p", "Hi", "-n", "1"],
                        ["logits", "acme/tiny", "--input-ids", ids, "--output", os.path.join(self.cache, "o.safetensors")],
                        ["bench", "latency", "acme/tiny", "-p", "4", "-n", "1", "-r", "1"]):
            done = self.run_tool(*command)
            self.assertEqual(done.returncode, 0, (command, done.stderr))
            self.assertEqual(self.run_tool(*[a.replace("acme", "absent") for a in command]).returncode, USAGE, command)

    def test_revisions_and_caches(self):
        for flags in (["acme/tiny", "--revision", COMMIT], ["acme/tiny", "--revision=main"], [self.repository],
                      [self.snapshot], ["--model-path", "acme/tiny"]):
            plan = self.run_tool("plan", "--json", *flags)
            self.assertEqual(json.loads(plan.stdout)["model"], self.snapshot, plan.stderr)
        home = os.path.join(self.cache, "home")
        os.makedirs(home)
        os.symlink(self.cache, os.path.join(home, "hub"))
        moved = self.run_tool("plan", "--json", "acme/tiny", HF_HUB_CACHE="", HF_HOME=home)
        self.assertEqual(moved.returncode, 0, moved.stderr)

    def test_refusals(self):
        for flags, words in ((["absent/here"], ["models--absent--here", "`hf download absent/here`"]),
                             (["acme/tiny", "--revision", "v2"], ["refs/v2", "`hf download acme/tiny --revision v2`"]),
                             ([MODEL, "--revision", "main"], ["--revision main", MODEL]),
                             (["acme/tiny", "--tokenizer-path", "absent/tok"], ["`hf download absent/tok`"])):
            for word in words:
                self.assertIn(word, self.refusal("plan", *flags))

    def test_served_under_the_repository_id(self):
        with Serve(BINARY, "acme/tiny", "--context-length", "256") as serve:
            status, models = self.ask(serve, "/v1/models")
            self.assertEqual([card["id"] for card in models["data"]], ["acme/tiny"])
            self.assertEqual(models["data"][0]["root"], self.snapshot)
            for path in ("/v1/models/acme%2Ftiny", "/v1/models/acme/tiny", "/models/acme%2ftiny/"):
                self.assertEqual(self.ask(serve, path), (200, models["data"][0]), path)
            body = {"model": "acme/tiny", "prompt": "Tom", "max_tokens": 1}
            self.assertEqual(self.ask(serve, "/v1/completions", body)[1]["model"], "acme/tiny")
            self.assertEqual(self.ask(serve, "/v1/completions", {**body, "model": COMMIT})[0], 404)

    def served(self, *flags):
        with Serve(BINARY, *flags, "--context-length", "256", "--disable-autotune") as serve:
            names = [card["id"] for card in self.ask(serve, "/v1/models")[1]["data"]]
            for name in names:
                answer = self.ask(serve, "/v1/completions", {"model": name, "prompt": "Tom", "max_tokens": 1})[1]
                self.assertEqual(answer["model"], names[0])
            unknown = self.ask(serve, "/v1/completions", {"model": "gpt-4o", "prompt": "Tom", "max_tokens": 1})
            return names, unknown

    def test_several_names(self):
        names, unknown = self.served(MODEL, "--served-model-name", "a", "b/c", "--served-model-name", "d")
        self.assertEqual(names, ["a", "b/c", "d"])
        self.assertEqual(unknown[0], 404)
        for name in names:
            self.assertIn(f'"{name}"', unknown[1]["error"]["message"])

    def test_the_model_after_its_name(self):
        names, unknown = self.served("--disable-autotune", "--served-model-name", "a", MODEL, "--accept-any-model-name")
        self.assertEqual(names, ["a"])
        self.assertEqual((unknown[0], unknown[1]["model"]), (200, "a"))

    def test_an_empty_name(self):
        self.assertIn("--served-model-name is empty", self.refusal("plan", MODEL, "--served-model-name", ""))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
