"""fp4moe doctor on this machine: the form of its report, and the checks of a model and a port in use."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from serve_process import free_port

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
MODEL_CHECKS = ["config", "plan", "tokenizer", "chat_template", "weights", "tensors", "fits", "disk"]


def doctor(*flags):
    ended = subprocess.run([BINARY, "doctor", "--json", *flags], capture_output=True, text=True, timeout=120)
    report = json.loads(ended.stdout)
    return ended.returncode, {check["name"]: check for check in report["checks"]}


class Doctor(unittest.TestCase):
    def test_this_machine(self):
        code, checks = doctor("--port", str(free_port()))
        for name in ("cpu", "cores", "numa", "frequency", "memory", "huge_pages", "memlock", "open_files", "cache",
                     "port", "mpi", "gpu", "cublaslt", "cudnn", "nccl"):
            self.assertIn(checks[name]["level"], ("ok", "warn", "fail"))
            self.assertTrue(checks[name]["detail"])
            self.assertEqual(checks[name]["level"] == "ok", not checks[name]["fix"], checks[name])
        self.assertEqual(code, any(check["level"] == "fail" for check in checks.values()))
        self.assertEqual(checks["port"]["level"], "ok")

    def test_a_port_that_is_taken(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            code, checks = doctor("--port", str(s.getsockname()[1]))
        self.assertEqual((code, checks["port"]["level"]), (1, "fail"))
        self.assertIn("--port", checks["port"]["fix"])

    def test_a_model(self):
        _, checks = doctor("--model", MODEL, "--port", str(free_port()))
        for name in MODEL_CHECKS:
            self.assertEqual(checks[name]["level"], "ok", checks[name])

    def test_what_is_wrong_with_a_model(self):
        with tempfile.TemporaryDirectory() as temp:
            folder = os.path.join(temp, "model")
            shutil.copytree(MODEL, folder)
            with open(os.path.join(folder, "tokenizer_config.json"), "r+") as file:
                config = json.load(file)
                config["chat_template"] = "{% for m in messages %}"
                file.seek(0)
                file.truncate()
                json.dump(config, file)
            with open(os.path.join(folder, "model.safetensors"), "r+b") as file:
                file.truncate(os.path.getsize(file.name) - 1)
            code, checks = doctor("--model", folder, "--port", str(free_port()))
            self.assertEqual(code, 1)
            self.assertEqual([name for name in MODEL_CHECKS if checks.get(name, {}).get("level") == "fail"],
                             ["chat_template", "weights"])
            code, checks = doctor("--model", os.path.join(temp, "absent"), "--port", str(free_port()))
            self.assertEqual((code, checks["config"]["level"]), (1, "fail"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
