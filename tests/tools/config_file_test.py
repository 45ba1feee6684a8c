"""Flags from a file and the environment: the command line takes precedence, then the environment, then the
file."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

from serve_process import Serve, environment

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
USAGE = 2


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        return path

    def refusal(self, *flags):
        done = subprocess.run([BINARY, "serve", MODEL, *flags], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, USAGE, done.stderr)
        return done.stderr


class ConfigFile(Files):
    def info(self, *flags, **environment):
        """Returns /server_info of a server started with this environment and these flags."""
        old = dict(os.environ)
        os.environ.update(environment)
        try:
            with Serve(BINARY, *flags) as serve:
                with urllib.request.urlopen(serve.url + "/server_info") as answer:
                    return json.loads(answer.read())
        finally:
            os.environ.clear()
            os.environ.update(old)

    def test_toml_and_yaml(self):
        forms = {
            "a.toml": f'# a comment\nmodel-path = "{MODEL}"\nserved_model_name = "named"  # and one here\n'
                      '[serve]\ncontext-length = 512\ndisable-autotune = true\n',
            "a.yaml": f'# a comment\nmodel-path: {MODEL}\nserved-model-name: "named"\ncontext-length: 512\n'
                      'disable-autotune: true\ncuda-graph-bs: [1, 2]\n'
                      'cors-allow-origins: [https://a.example, http://b.example:8080]\n',
        }
        for name, text in forms.items():
            with self.subTest(name):
                info = self.info("--config=" + self.write(name, text))
                self.assertEqual((info["served_model_name"], info["context_length"]), ("named", 512))

    def test_order(self):
        path = self.write("a.toml", 'served-model-name = "file"\ncontext-length = 512\nmax-model-len = 300\n')
        first = self.info(MODEL, "--config=" + path, "--served-model-name", "line", FP4MOE_SERVED_MODEL_NAME="variable")
        self.assertEqual((first["served_model_name"], first["context_length"]), ("line", 300))
        self.assertEqual(self.info(MODEL, "--config", path, FP4MOE_SERVED_MODEL_NAME="variable")["served_model_name"],
                         "variable")
        self.assertEqual(self.info(MODEL, "--context-length", "0400")["context_length"], 400, "integers are decimal")
        self.assertEqual(self.info(MODEL, FP4MOE_CONFIG=path)["served_model_name"], "file")

    def test_misspelt_variables_are_reported(self):
        variables = {"FP4MOE_MAX_RUNING_REQUESTS": "FP4MOE_MAX_RUNNING_REQUESTS", "FP4MOE_TENSOR_PARALLEL_SIZE": "FP4MOE_TP_SIZE",
                     "FP4MOE_SERVED_MODEL_NAME": None, "FP4MOE_ISA": None, "FP4MOE_DEMO_MODEL": None, "FP4MOE_RANKS_PER_GPU": None}
        with environment(**{name: "avx2" if name == "FP4MOE_ISA" else "1" for name in variables}), Serve(BINARY, MODEL) as serve:
            log = "".join(serve.lines)
        for name, meant in variables.items():
            self.assertEqual(f"{name} is not read (did you mean {meant}?)" in log, meant is not None, log)
        self.assertEqual(log.count("is not read"), 2, log)

    def test_the_last_value_of_a_repeated_key_wins(self):
        path = self.write("a.toml", 'context-length = 512\ncontext-length = 256\nlog-level = "debug"\ncontext_length = 128\n'
                                    'served-model-name = "a"\nserved-model-name = "b"\n')
        info = self.info(MODEL, "--config", path)
        self.assertEqual((info["context_length"], info["served_model_name"]), (128, "a"))

    def test_errors_name_where_the_value_comes_from(self):
        path = self.write("a.toml", "port = many\n")
        self.assertIn(f"error: --config {path}: --port: 'many' must be", self.refusal("--config", path))
        with environment(FP4MOE_PORT="abc", FP4MOE_LOG_LEVEL="loud"):
            error = self.refusal("--log-level", "error")
            self.assertIn("error: FP4MOE_PORT: 'abc' must be", error)
            self.assertNotIn("--port", error)
            self.assertIn("error: FP4MOE_PORT: 'abc' must be", self.refusal("--config", path, "--log-level", "error"))
            self.assertIn("error: --port: 'x' must be", self.refusal("--port", "x", "--log-level", "error"))
            self.assertIn("error: FP4MOE_LOG_LEVEL: loud not in", self.refusal("--port", "0"))

    def test_every_flag_is_a_variable(self):
        help_text = subprocess.run([BINARY, "serve", "--help-all"], capture_output=True, text=True, check=True).stdout
        flags = [line.split()[0].split(",")[0] for line in help_text.splitlines() if line.startswith("  --")]
        self.assertGreater(len(flags), 80)
        for flag in set(flags) - {"--help-all"}:
            self.assertIn("(Env:FP4MOE_" + flag[2:].replace("-", "_").upper() + ")", help_text)

    def test_refusals(self):
        for text, *words in [("prot = 1\n", "'prot'", "not a flag of fp4moe serve", "did you mean --port?"), ("[http]\nport = 1\n", "'http.port'"),
                             ("config = \"b\"\n", "'config'"), ("help = true\n", "'help'"),
                             ("max-num-seqs = 4\n", "'max-num-seqs'", "use --max-running-requests"), ("help-all = true\n", "'help-all'"), ("port = many\n", "port", "many"), ("log-format = xml\n", "xml", "json")]:
            with self.subTest(text):
                error = self.refusal("--config", self.write("bad.toml", text))
                for word in words:
                    self.assertIn(word, error)
        self.assertIn("none.toml", self.refusal("--config", os.path.join(self.folder, "none.toml")))


class Keys(Files):
    def test_files(self):
        keys = self.write("keys", "# of Ana\nalpha\n\n  beta \r\n")
        admin = self.write("admin", "gamma\n")
        with Serve(BINARY, MODEL, "--api-key-file", keys, "--admin-api-key-file", admin, "--log-level", "debug",
                   "--log-requests", "--log-requests-level", "3") as serve:
            def status(path, key, body=None):
                request = urllib.request.Request(serve.url + path, body, {"Authorization": "Bearer " + key})
                try:
                    with urllib.request.urlopen(request) as answer:
                        return answer.status
                except urllib.error.HTTPError as error:
                    return error.code
            self.assertEqual([status("/v1/models", k) for k in ("alpha", "beta", "gamma", "# of Ana")],
                             [200, 200, 401, 401])
            self.assertEqual([status("/abort_request", k, b'{"rid": "x"}') for k in ("alpha", "gamma")], [401, 200])
            self.assertEqual(status("/generate", "beta", b'{"text": "a"}'), 200)
        log = "".join(serve.lines)
        for key in ("alpha", "beta", "gamma"):
            self.assertNotIn(key, log)

    def test_empty_keys(self):
        for flag in ("--api-key", "--admin-api-key", "--api-key-file", "--admin-api-key-file"):
            self.assertIn(f"{flag}: must not be empty", self.refusal(flag, ""))
            self.assertIn(f"{flag}: must not be empty", self.refusal(flag + "=", "--port", "0"))
            variable = "FP4MOE_" + flag[2:].upper().replace("-", "_")
            with environment(**{variable: ""}):
                self.assertIn(f"{variable} must not be empty", self.refusal())
        self.assertIn("FP4MOE_API_KEY must not be empty", self.refusal("--config", self.write("a.toml", 'api-key = ""\n')))

    def test_bad_files(self):
        self.assertIn("contains no key", self.refusal("--api-key-file", self.write("empty", "# none\n")))
        self.assertIn("/none", self.refusal("--admin-api-key-file", "/none"))
        error = self.refusal("--api-key-file", self.write("spaces", "two words\n"))
        self.assertIn("9 bytes", error)
        self.assertNotIn("two", error)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
