"""A server with far more clients than slots: overload_test.py BINARY MODEL.

Requests that do not fit in the queue get 503 with Retry-After. Requests that wait too long get 503, and
requests that run too long get 504. All others get the same responses as alone. The server is idle again
afterwards, and KV pages are reused and never lost.
"""
import concurrent.futures
import contextlib
import http.client
import json
import sys
import time
import unittest
from urllib.parse import urlsplit

from serve_process import Serve, metrics

BINARY, MODEL = sys.argv[1:3]
RUNNING, QUEUED = 4, 4
CLIENTS = 10 * (RUNNING + QUEUED)
QUESTION = "Tom has 3 apples and buys 4. How many apples does he have now? Think about it, and then say it once more."


def call(serve, path, body=None, method="POST"):
    """Returns the status, headers and text of a response."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(serve.url).netloc, timeout=120)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


def complete(serve, prompt, max_tokens=24, **more):
    status, headers, text = call(serve, "/v1/completions", {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more})
    return status, headers, json.loads(text)


class OverloadTest(unittest.TestCase):
    def check_idle(self, serve):
        deadline = time.time() + 20
        while (now := metrics(serve.url))["num_running_reqs"] + now["num_queue_reqs"] > 0:
            self.assertLess(time.time(), deadline, now)
            time.sleep(0.05)
        self.assertEqual(now["kv_used_tokens"], 0)
        self.assertEqual(now["num_leaked_pages"], 0)
        self.assertEqual(now["kv_evictable_tokens"] + now["kv_available_tokens"], now["max_total_num_tokens"])
        return now

    def test_ten_times_over_capacity(self):
        flags = ["--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED), "--max-total-tokens", "1024"]
        with Serve(BINARY, MODEL, *flags) as serve:
            prompts = [f"{QUESTION} {i % 5}" for i in range(CLIENTS)]
            alone = {prompt: complete(serve, prompt)[2]["choices"][0]["text"] for prompt in set(prompts)}

            def persist(prompt):
                """Retries on 503 until served; returns the number of retries."""
                for attempt in range(600):
                    status, headers, answer = complete(serve, prompt)
                    if status == 200:
                        self.assertEqual(answer["choices"][0]["text"], alone[prompt])
                        return attempt
                    self.assertEqual(status, 503, answer)
                    self.assertGreaterEqual(int(headers["Retry-After"]), 1)
                    self.assertIn("--max-queued-requests", answer["error"]["message"])
                    time.sleep(0.05)
                self.fail("the request was never served")

            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                attempts = list(pool.map(persist, prompts))
            self.assertGreater(sum(attempts), 0, "the queue was never full")
            now = self.check_idle(serve)
            self.assertEqual(now["num_failed_requests_total"], 0)
            self.assertGreater(now["cached_tokens_total"], 0)
            self.assertEqual(complete(serve, prompts[0])[2]["choices"][0]["text"], alone[prompts[0]])
        self.assertEqual(serve.exit_code, 0)

    def test_cached_tokens_and_flush(self):
        with Serve(BINARY, MODEL) as serve:
            cold = complete(serve, QUESTION)[2]
            warm = complete(serve, QUESTION)[2]
            self.assertEqual(warm["choices"][0]["text"], cold["choices"][0]["text"])
            self.assertEqual(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
            length = warm["usage"]["prompt_tokens"]
            self.assertEqual(warm["usage"]["prompt_tokens_details"]["cached_tokens"], (length - 1) // 16 * 16)
            self.assertEqual(call(serve, "/flush_cache")[0], 200)
            self.assertEqual(metrics(serve.url)["kv_evictable_tokens"], 0)
            self.assertEqual(complete(serve, QUESTION)[2]["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        with Serve(BINARY, MODEL, "--disable-radix-cache") as serve:
            for _ in range(2):
                self.assertEqual(complete(serve, QUESTION)[2]["usage"]["prompt_tokens_details"]["cached_tokens"], 0)

    def test_time_limits(self):
        with Serve(BINARY, MODEL, "--max-running-requests", "1", "--req-waiting-timeout", "0.3") as serve:
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                running = pool.submit(complete, serve, QUESTION, 100000, timeout=1.5)
                time.sleep(0.3)
                status, headers, answer = pool.submit(complete, serve, "b", 4).result()
                self.assertEqual(status, 503, answer)
                self.assertIn("--req-waiting-timeout", answer["error"]["message"])
                self.assertIn("Retry-After", headers)
                status, _, answer = running.result()
                if status != 200:  # a fast machine can fill the context first
                    self.assertEqual(status, 504, answer)
                    self.assertEqual(answer["error"]["type"], "timeout")
            self.check_idle(serve)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
