"""Serves random models with delta nets: chunks of prompts, prefix reuse from snapshots, retraction, cancelled requests,
several choices, several ranks, and drafts by n-grams or the model's layer for multi-token prediction change no bit of the
log-probabilities, with 1 and with 32 requests at once. A template in the manner of Qwen3.5 selects the syntax of
reasoning and calls.

    python3 state_serve_test.py FP4MOE_BINARY CHAT_TEMPLATE [grammars]
"""
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import unittest

from serve_process import Serve, eventually, metrics
from state_requests import DRAFTS, LENGTHS, NUM_REQUESTS, NUM_TOKENS, RANKS, begin_and_cancel, generate, generate_all, outputs, post, prompts

BINARY, TEMPLATE = sys.argv[1:3]
HAS_GRAMMARS = "grammars" in sys.argv[3:]
MODELS = {"qwen3.5-moe-tiny": "modelopt", "qwen3-next-tiny": "compressed-nvfp4"}
FLAGS = ["--self-test", "off", "--context-length", "512", "--max-running-requests", str(NUM_REQUESTS)]


class States:
    @classmethod
    def setUpClass(cls):
        cls.asked = prompts()
        cls.folder = tempfile.TemporaryDirectory()
        cls.model = os.path.join(cls.folder.name, "m")
        subprocess.run([BINARY, "make-tiny", cls.model, "--like", cls.like, "--dialect", MODELS[cls.like],
                        "--vocab-size", "300", "--num-nextn-predict-layers", "1"], check=True, capture_output=True)
        with cls.serve(cls, "--disable-radix-cache") as serve:
            cls.expected = outputs(generate_all(serve.url, cls.asked, at_once=1))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def serve(self, *flags):
        return Serve(BINARY, self.model, *FLAGS, *flags)

    def check_idle(self, serve):
        """All slots but those of snapshots are free, and none is lost."""
        self.assertTrue(eventually(lambda: metrics(serve.url)["num_running_reqs"] == 0))
        now = metrics(serve.url)
        self.assertGreater(now["mamba_num_slots"], 0)
        self.assertEqual((now["mamba_num_used_slots"], now["num_leaked_pages"]), (0, 0))

    def test_outputs_depend_on_the_prompt(self):
        self.assertGreater(len({tuple(output) for output in self.expected}), NUM_REQUESTS - 4)

    def test_chunks(self):
        for chunk in (7, 63, 64, 65, 512):
            with self.serve("--chunked-prefill-size", str(chunk)) as serve:
                for at_once in (NUM_REQUESTS, 1):
                    self.assertEqual(outputs(generate_all(serve.url, self.asked, at_once)), self.expected, (chunk, at_once))
                self.check_idle(serve)

    def test_prefixes_are_reused(self):
        with self.serve() as serve:
            generate_all(serve.url, self.asked)
            again = generate_all(serve.url, self.asked, at_once=1)
            self.assertEqual(outputs(again), self.expected)
            for ids, (_, cached) in zip(self.asked, again):
                self.assertEqual(cached % 16, 0)
                self.assertLess(cached, len(ids))
            longest = max(range(len(LENGTHS)), key=lambda i: LENGTHS[i])
            self.assertEqual(again[longest][1], (LENGTHS[longest] - 1) // 16 * 16, "the prompt itself was there")
            # A conversation goes on: the prompt has the output of the one before.
            turns = [ids + [token for _, token in output] + [5, 6, 7] for ids, output in zip(self.asked, self.expected)]
            more = generate_all(serve.url, turns)
            self.assertGreater(sum(cached for _, cached in more), 0)
            self.check_idle(serve)
        with self.serve("--disable-radix-cache") as serve:
            self.assertEqual(outputs(generate_all(serve.url, turns)), outputs(more))

    def test_retraction(self):
        with self.serve("--max-total-tokens", "640", "--schedule-conservativeness", "0") as serve:
            for _ in range(2):
                self.assertEqual(outputs(generate_all(serve.url, self.asked)), self.expected)
            self.assertGreater(metrics(serve.url)["num_retracted_requests_total"], 0)
            self.check_idle(serve)

    def test_few_slots(self):
        with self.serve("--max-mamba-cache-size", "3") as serve:
            for _ in range(2):
                self.assertEqual(outputs(generate_all(serve.url, self.asked)), self.expected)
            self.assertLessEqual(metrics(serve.url)["mamba_num_slots"], 4)
            self.check_idle(serve)

    def test_cancelled_requests(self):
        with self.serve("--max-mamba-cache-size", "8") as serve:
            with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
                for i, ids in enumerate(self.asked):
                    pool.submit(begin_and_cancel, serve.url, ids, i % 5)
                self.assertEqual(outputs(pool.map(lambda ids: generate(serve.url, ids), self.asked)), self.expected)
            self.check_idle(serve)

    def test_several_choices(self):
        sampling = {"temperature": 0.9, "sampling_seed": 5}
        body = {"sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "n": 4, **sampling}, "return_logprob": True}
        ids = self.asked[LENGTHS.index(129)]
        several = []
        for flags in ((), ("--disable-radix-cache",), DRAFTS[0]):
            with self.serve(*flags) as serve:
                several.append([[entry[:2] for entry in choice["meta_info"]["output_token_logprobs"]]
                                for choice in post(serve.url, "/generate", {"input_ids": ids, **body})])
                self.check_idle(serve)
        self.assertEqual(several[0], several[1])
        self.assertEqual(several[0], several[2])
        self.assertEqual(len(several[0]), 4)

    def test_drafts(self):
        """Snapshots are taken while drafts are verified, and the texts that continue from them are right."""
        turns = [ids + [token for _, token in output] + [5, 6, 7] for ids, output in zip(self.asked, self.expected)]
        with self.serve("--disable-radix-cache") as serve:
            continued = outputs(generate_all(serve.url, turns))
        few_pages = ["--max-total-tokens", "640", "--schedule-conservativeness", "0"]
        for drafts in DRAFTS:
            with self.serve(*drafts, "--mamba-track-interval", "16") as serve:
                for at_once in (NUM_REQUESTS, 1):
                    self.assertEqual(outputs(generate_all(serve.url, self.asked, at_once)), self.expected, (drafts, at_once))
                more = generate_all(serve.url, turns)
                self.assertEqual(outputs(more), continued, drafts)
                longer = [cached > len(ids) for ids, (_, cached) in zip(self.asked, more)]
                self.assertGreater(sum(longer), 0, "no turn continues from a snapshot in an output")
                self.assertGreater(metrics(serve.url)["spec_verify_calls_total"], 0)
                self.check_idle(serve)
            with self.serve(*drafts, *few_pages) as serve:
                retracted = lambda: metrics(serve.url)["num_retracted_requests_total"]
                for _ in range(10):  # requests that arrive slowly have room
                    self.assertEqual(outputs(generate_all(serve.url, self.asked)), self.expected, drafts)
                    if retracted() > 0:
                        break
                self.assertGreater(retracted(), 0)
                self.check_idle(serve)

    def test_ranks(self):
        for protocol, layouts in RANKS.items():
            flags = ["--moe-a2a-backend", protocol, "--enable-deterministic-inference"]
            with self.serve("--disable-radix-cache", *flags) as serve:
                expected = outputs(generate_all(serve.url, self.asked))
            for layout in layouts:
                for drafts in ([], DRAFTS[len(layout) % 2]):
                    with self.serve(*layout, *flags, *drafts) as serve:
                        for _ in range(2):
                            self.assertEqual(outputs(generate_all(serve.url, self.asked)), expected, (layout, drafts))
                        self.check_idle(serve)


class Qwen35(States, unittest.TestCase):
    like = "qwen3.5-moe-tiny"

    def chat(self, serve, **more):
        question = {"messages": [{"role": "user", "content": "Look."}], "temperature": 0}
        return post(serve.url, "/v1/chat/completions", {**question, **more})["choices"][0]

    def test_reasoning_and_calls(self):
        with self.serve("--chat-template", TEMPLATE) as serve:
            thought = self.chat(serve, max_tokens=20, ignore_eos=True)["message"]
            self.assertTrue(thought["reasoning_content"], "the template opens the reasoning")
            self.assertFalse(thought["content"])
            answer = self.chat(serve, max_tokens=20, ignore_eos=True, chat_template_kwargs={"enable_thinking": False})["message"]
            self.assertFalse(answer["reasoning_content"])
            self.assertTrue(answer["content"])
            if HAS_GRAMMARS:
                self.check_forced_call(serve)

    def check_forced_call(self, serve):
        schema = {"type": "object", "properties": {"at": {"enum": ["sky", "sea"]}}, "required": ["at"], "additionalProperties": False}
        look = {"type": "function", "function": {"name": "look", "parameters": schema}}
        choice = self.chat(serve, tools=[look], tool_choice="required", parallel_tool_calls=False, max_tokens=200,
                           chat_template_kwargs={"enable_thinking": False})
        self.assertEqual(choice["finish_reason"], "tool_calls", choice)
        call = choice["message"]["tool_calls"][0]["function"]
        self.assertEqual(call["name"], "look")
        self.assertIn(json.loads(call["arguments"]).get("at"), ("sky", "sea"))


class Qwen3Next(States, unittest.TestCase):
    like = "qwen3-next-tiny"


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
