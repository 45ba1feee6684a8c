"""Untouched client packages against `fp4moe serve` on the demo checkpoints. The scripts in clients/ have one
package each. A script runs in the Python that has the newest version of its package: this one, or a virtual
environment in the folder FP4MOE_CLIENT_PYTHONS. It is skipped if none has the package."""
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

from demo_templates import TOOLS
from serve_process import SKIPPED, Serve

BINARY, MODEL = sys.argv[1:3]
DEEPSEEK = os.path.join(os.path.dirname(MODEL), "demo-dsv3-nvfp4")
SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "clients")
VENVS = os.environ.get("FP4MOE_CLIENT_PYTHONS", "")
KEY = "test-key"
# Each script's packages; the first is the one that it tests.
PACKAGES = {
    "anthropic": ["anthropic", "pydantic"],
    "guidellm": ["guidellm"],
    "inspect_ai": ["inspect-ai", "openai", "anthropic"],
    "instructor": ["instructor", "openai"],
    "langchain_openai": ["langchain-openai"],
    "litellm": ["litellm"],
    "lm_eval": ["lm-eval", "transformers"],
    "openai": ["openai", "pydantic"],
    "openai_agents": ["openai-agents"],
    "pydantic_ai": ["pydantic-ai-slim", "openai", "anthropic"],
}
LIST_PACKAGES = """
import importlib.metadata, json
print(json.dumps({(d.metadata["Name"] or "").lower().replace("_", "-"): d.version
                  for d in importlib.metadata.distributions()}))"""


def interpreters():
    """The Pythons to choose from, with the versions of their packages."""
    venvs = glob.glob(os.path.join(glob.escape(VENVS), "*", "bin", "python")) if VENVS else []
    pythons = [sys.executable, *sorted(venvs)]
    listings = [subprocess.run([python, "-c", LIST_PACKAGES], check=True, capture_output=True).stdout for python in pythons]
    return {python: json.loads(listing) for python, listing in zip(pythons, listings)}


def newest(pythons, packages):
    """The Python that has all packages and the newest version of the first one; None: no Python has them."""
    def version(python):
        return [int(number) for number in re.findall(r"\d+", pythons[python][packages[0]])]
    return max((python for python in pythons if set(packages) <= set(pythons[python])), key=version, default=None)


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pythons = interpreters()
        cls.folder = tempfile.TemporaryDirectory()
        template = os.path.join(cls.folder.name, "template.jinja")
        with open(template, "w") as file:
            file.write(TOOLS)
        cls.serves = [Serve(BINARY, model, "--served-model-name", "demo", "--api-key", KEY, "--context-length", "1024",
                            "--chat-template", template).__enter__() for model in (MODEL, DEEPSEEK)]

    @classmethod
    def tearDownClass(cls):
        for serve in cls.serves:
            serve.__exit__()
            assert serve.exit_code == 0, serve.exit_code
            assert "unknown field" not in "".join(serve.lines)
        cls.folder.cleanup()

    def environment(self, url, model):
        """The variables that these packages read, and those that keep them off the network."""
        kept = {name: value for name, value in os.environ.items() if not re.match("OPENAI_|ANTHROPIC_|PYTHONPATH", name)}
        return {**kept, "OPENAI_BASE_URL": url + "/v1", "OPENAI_API_KEY": KEY, "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": KEY, "PYTHONDONTWRITEBYTECODE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                "DO_NOT_TRACK": "1", "DEMO_MODEL": os.path.abspath(model)}

    def check(self, name):
        packages = PACKAGES[name]
        python = newest(self.pythons, packages)
        if python is None:
            folder = VENVS or "FOLDER"
            print(f"SKIPPED: {packages[0]} is not installed: python3 -m venv {folder}/{name} && {folder}/{name}/bin/pip "
                  f"install {' '.join(packages)}, then set FP4MOE_CLIENT_PYTHONS={folder}", flush=True)
            self.skipTest(packages[0] + " is not installed")
        print(packages[0], self.pythons[python][packages[0]], "in", python, flush=True)
        for serve, model in zip(self.serves, (MODEL, DEEPSEEK)):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run([python, os.path.join(SCRIPTS, name + "_client.py")], cwd=folder, timeout=300, text=True,
                                      env=self.environment(serve.url, model), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertEqual(done.returncode, 0, done.stdout)


for name in PACKAGES:
    setattr(Clients, "test_" + name, lambda self, name=name: self.check(name))

if __name__ == "__main__":
    result = unittest.main(argv=sys.argv[:1], verbosity=2, exit=False).result
    if len(result.skipped) == result.testsRun:
        sys.exit(SKIPPED)
    sys.exit(not result.wasSuccessful())
