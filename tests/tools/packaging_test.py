"""Each file under packaging/ parses, and each flag, key and metric in it exists."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import yaml

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FOLDER = os.path.join(ROOT, "packaging")
EXIT_CODES = {2, 3, 4, 5}  # a restart does not help after these


def read(*names):
    with open(os.path.join(FOLDER, *names)) as file:
        return file.read()


def help_text():
    return subprocess.run([BINARY, "serve", "--help-all"], capture_output=True, text=True, check=True).stdout


class Packaging(unittest.TestCase):
    def test_every_file_is_listed(self):
        listed = read("README.md")
        for folder, _, names in os.walk(FOLDER):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), FOLDER)
                if path != "README.md":
                    self.assertTrue(path in listed or name in listed, path)

    def test_metrics_of_dashboard_and_alerts(self):
        dashboard = json.loads(read("monitoring", "grafana-dashboard.json"))
        alerts = yaml.safe_load(read("monitoring", "alerts.yml"))
        expressions = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
        expressions += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
        expressions += [r["expr"] for g in alerts["groups"] for r in g["rules"]]
        wanted = {name for e in expressions for name in re.findall(r"\b(?:sglang:|process_)\w+", e)}
        self.assertGreater(len(wanted), 15)
        with Serve(BINARY, MODEL) as serve:
            with urllib.request.urlopen(serve.url + "/metrics") as answer:
                text = answer.read().decode()
        served = set(re.findall(r"^(\S+?)(?:\{| )", text, re.MULTILINE)) - {"#"}
        self.assertEqual(wanted - served - {"sglang:http_responses_total"}, set())
        self.assertIn("# TYPE sglang:http_responses_total counter", text)
        # Each has exactly one type and one help line.
        for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
            self.assertEqual(text.count(f"# TYPE {name} "), 1)
            self.assertRegex(text, rf"(?m)^# HELP {re.escape(name)} .+\.$")

    def test_scrape(self):
        job = yaml.safe_load(read("monitoring", "prometheus.yml"))
        self.assertEqual(job["scrape_configs"][0]["job_name"], "fp4moe")
        self.assertTrue(os.path.exists(os.path.join(FOLDER, "monitoring", job["rule_files"][0])))

    def test_configuration_is_accepted(self):
        """All keys of the sample exist: a server starts with it, with only the model replaced."""
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(re.sub(r'model-path = ".*"', f'model-path = "{MODEL}"', read("fp4moe.toml")))
            file.flush()
            with Serve(BINARY, "--config=" + file.name) as serve:
                self.assertEqual(json.loads(serve.lines[0])["level"], "info")

    def test_unit(self):
        unit = read("fp4moe.service")
        entries = re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE)
        values = dict(entries)
        self.assertEqual(values["Type"], "notify")
        for variable in re.findall(r"FP4MOE_[A-Z_]+", unit):
            self.assertIn(f"(Env:{variable})", help_text())
        self.assertEqual({int(c) for c in values["RestartPreventExitStatus"].split()}, EXIT_CODES)
        self.assertRegex(values["ExecStart"], r"^/usr/local/bin/fp4moe serve --config /etc/fp4moe/fp4moe\.toml$")
        drain = int(re.search(r"drain-timeout = (\d+)", read("fp4moe.toml")).group(1))
        self.assertGreater(int(values["TimeoutStopSec"]), drain)
        if shutil.which("systemd-analyze"):
            with tempfile.TemporaryDirectory() as folder:
                with open(folder + "/fp4moe.service", "w") as file:
                    file.write(unit.replace("/usr/local/bin/fp4moe", BINARY))
                done = subprocess.run(["systemd-analyze", "verify", "--man=no", file.name], capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_kubernetes(self):
        deployment, service = yaml.safe_load_all(read("kubernetes", "fp4moe.yaml"))
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        known = help_text()
        for argument in container["args"]:
            if argument.startswith("--"):
                self.assertRegex(known, rf"(?m)^  (--[\w,-]+,)?{argument}\b")
        self.assertFalse(pod["enableServiceLinks"])  # otherwise FP4MOE_PORT would be the Service's address
        for probe in ("startupProbe", "readinessProbe"):
            self.assertEqual(container[probe]["httpGet"]["path"], "/health")
        self.assertIn("livenessProbe", container)
        drain = int(container["args"][container["args"].index("--drain-timeout") + 1])
        self.assertGreater(pod["terminationGracePeriodSeconds"], drain)
        self.assertEqual(service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"])
        mounted = {m["name"] for m in container["volumeMounts"]}
        self.assertEqual(mounted, {v["name"] for v in pod["volumes"]})

    def test_container(self):
        text = read("Containerfile")
        known = help_text()
        for variable in re.findall(r"FP4MOE_[A-Z_]+(?==)", text.split("FROM debian:12-slim")[1]):
            self.assertIn(f"(Env:{variable})", known)
        for path in re.findall(r"scripts/\w+", text):
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)

    def test_proxies_do_not_hold_streams_back(self):
        self.assertIn("proxy_buffering off;", read("proxy", "nginx.conf"))
        self.assertIn("flush_interval -1", read("proxy", "Caddyfile"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
