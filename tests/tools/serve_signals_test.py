"""Signals to `fp4moe serve`: the first lets running requests finish, a later one ends the process at once."""
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import unittest
from urllib.parse import urlsplit

from serve_process import Serve

BINARY, MODEL = sys.argv[1:3]
LONGER_THAN_TWINS = 0.8  # seconds; the server treats signals within 0.5 s as one


def connect(url):
    return contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc))


def ask(url, tokens):
    """Starts a request; returns its thread and the list that will hold the response."""
    answers = []

    def run():
        body = {"text": "a", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        with connect(url) as connection, contextlib.suppress(http.client.HTTPException, ConnectionError):
            connection.request("POST", "/generate", json.dumps(body))
            answers.append(json.loads(connection.getresponse().read()))
    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def wait_for_running(url):
    for _ in range(1000):
        with connect(url) as connection:
            connection.request("GET", "/server_info")
            if json.loads(connection.getresponse().read())["num_running_reqs"] == 1:
                return
        time.sleep(0.01)
    raise AssertionError("the request did not start")


class Signals(unittest.TestCase):
    def test_one_ends_well_with_the_running_request_answered(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with Serve(BINARY, MODEL, "--drain-timeout", "60") as serve:
                thread, answers = ask(serve.url, 1000)
                wait_for_running(serve.url)
                serve.process.send_signal(number)
                self.assertEqual(serve.process.wait(timeout=60), 0)
                thread.join()
                self.assertEqual(answers[0]["meta_info"]["completion_tokens"], 1000)

    def test_twins_are_one(self):
        with Serve(BINARY, MODEL) as serve:
            thread, answers = ask(serve.url, 1000)
            wait_for_running(serve.url)
            for _ in range(3):
                serve.process.send_signal(signal.SIGTERM)
                time.sleep(0.03)
            self.assertEqual(serve.process.wait(timeout=60), 0)
            thread.join()
            self.assertEqual(answers[0]["meta_info"]["completion_tokens"], 1000)

    def test_timeout_command(self):
        command = ["timeout", "--preserve-status", "-s", "TERM", "2", BINARY, "serve", MODEL, "--port", "0"]
        self.assertEqual(subprocess.run(command, capture_output=True, timeout=60).returncode, 0)

    def test_a_later_one_forces(self):
        with Serve(BINARY, MODEL) as serve:
            thread, answers = ask(serve.url, 100000)
            wait_for_running(serve.url)
            serve.process.send_signal(signal.SIGTERM)
            time.sleep(LONGER_THAN_TWINS)
            serve.process.send_signal(signal.SIGTERM)
            self.assertEqual(serve.process.wait(timeout=60), 130)
            thread.join()
            self.assertEqual(answers, [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
