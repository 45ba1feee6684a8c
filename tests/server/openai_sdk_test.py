"""The openai package and curl as clients of `fp4moe serve` on the demo checkpoint."""
import json
import subprocess
import sys
import unittest

import openai

from serve_process import Serve

BINARY, MODEL = sys.argv[1:3]
KEY = "test-key"
QUESTION = "Tom has 12 apples. Tom buys 5 more and gives 3 to Ana. How many apples does Tom have now?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class OpenAiSdk(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(BINARY, MODEL, "--served-model-name", "demo", "--api-key", KEY, "--context-length", "1024")
        cls.serve.__enter__()
        cls.client = openai.OpenAI(base_url=cls.serve.url + "/v1", api_key=KEY, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0, cls.serve.exit_code

    def chat(self, **more):
        return self.client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, **more)

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["demo"])
        self.assertEqual(self.client.models.retrieve("demo").id, "demo")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("other")

    def test_request_ids(self):
        answer = self.chat(max_tokens=1)
        self.assertEqual(answer._request_id, answer.id)
        traced = self.chat(max_tokens=1, extra_headers={"X-Request-Id": "trace-7"})
        self.assertEqual((traced._request_id, traced.id), ("trace-7", "trace-7"))
        with self.assertRaises(openai.BadRequestError) as refused:
            self.chat(max_tokens=-2, extra_headers={"X-Request-Id": "trace-8"})
        self.assertEqual(refused.exception.request_id, "trace-8")

    def test_base_url_without_version(self):
        with openai.OpenAI(base_url=self.serve.url, api_key=KEY, max_retries=0) as client:
            self.assertEqual([m.id for m in client.models.list()], ["demo"])
            answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1)
            self.assertEqual(answer.model, "demo")

    def test_tokenize_counts_what_a_chat_submits(self):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        for more in ({}, {"tools": tools, "tool_choice": "required"}, {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "high"}}}):
            body = {"messages": MESSAGES, **more.get("extra_body", more)}
            tokens = self.client.post("/tokenize", body=body, cast_to=object)
            self.assertEqual(tokens["count"], self.chat(max_tokens=1, **more).usage.prompt_tokens)

    def test_chat(self):
        answer = self.chat()
        self.assertIn("14", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_stream_equals_whole(self):
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual(chunks[-1].choices, [])
        self.assertGreater(chunks[-1].usage.completion_tokens, 0)
        self.assertEqual(chunks[-2].choices[0].finish_reason, "stop")
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        self.assertEqual(text, self.chat().choices[0].message.content)

    def test_stop_and_length(self):
        whole = self.chat().choices[0].message.content
        stop = whole[len(whole) // 2:][:2]
        self.assertEqual(self.chat(stop=[stop]).choices[0].message.content, whole[:whole.index(stop)])
        self.assertEqual(self.chat(max_tokens=1).choices[0].finish_reason, "length")

    def test_prompt_logprobs_are_those_of_generation(self):
        """lm_eval's local-completions request: echo, logprobs, no output tokens. On a CPU the logprobs are
        bitwise equal."""
        made = self.client.completions.create(model="demo", prompt=QUESTION, temperature=0, max_tokens=12, logprobs=2,
                                              extra_body={"return_token_ids": True, "ignore_eos": True}).choices[0]
        ids = made.prompt_token_ids + made.token_ids
        scored = self.client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=0, logprobs=2,
                                                echo=True).choices[0].logprobs
        self.assertEqual(len(scored.tokens), len(ids))
        self.assertIsNone(scored.token_logprobs[0])
        self.assertIsNone(scored.top_logprobs[0])
        self.assertEqual(scored.tokens[-12:], made.logprobs.tokens)
        self.assertEqual(scored.token_logprobs[-12:], made.logprobs.token_logprobs)
        self.assertEqual(scored.top_logprobs[-12:], made.logprobs.top_logprobs)
        for value, top in zip(scored.token_logprobs[-12:], scored.top_logprobs[-12:]):
            self.assertEqual(value, max(top.values()))  # greedy; lm_eval detects it in the same way

    def test_bias_and_penalties(self):
        def ids(**more):
            return self.chat(extra_body={"return_token_ids": True}, **more).choices[0].token_ids

        best = ids(max_tokens=1)[0]
        other = ids(max_tokens=1, logit_bias={str(best): -100})[0]
        self.assertNotEqual(other, best)
        self.assertEqual(ids(max_tokens=3, logit_bias={str(other): 100}), [other] * 3)
        liked = {str(other): 20}  # equal to ten times the penalty of 2
        penalised = ids(max_tokens=40, logit_bias=liked, frequency_penalty=2, presence_penalty=2)
        self.assertLess(2 * penalised.count(other), ids(max_tokens=40, logit_bias=liked).count(other))
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(frequency_penalty=3)
        self.assertEqual(caught.exception.param, "frequency_penalty")

    def test_logprobs(self):
        answer = self.chat(logprobs=True, top_logprobs=3, max_tokens=4)
        content = answer.choices[0].logprobs.content
        self.assertEqual(len(content), 4)
        for position in content:
            self.assertEqual(len(position.top_logprobs), 3)
            self.assertLessEqual(position.logprob, 0)
            self.assertEqual(position.top_logprobs[0].token, position.token)  # greedy
        self.assertEqual(b"".join(bytes(p.bytes) for p in content).decode(), answer.choices[0].message.content)

    def test_completion(self):
        answer = self.client.completions.create(model="demo", prompt=[f"Question: {QUESTION}\nAnswer:", "Question:"],
                                                temperature=0, max_tokens=8)
        self.assertEqual([c.index for c in answer.choices], [0, 1])
        chunks = self.client.completions.create(model="demo", prompt="Question:", temperature=0, max_tokens=8, stream=True)
        self.assertEqual("".join(c.choices[0].text for c in chunks), answer.choices[1].text)

    def test_errors(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="other", messages=MESSAGES)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(top_p=7)
        self.assertEqual(caught.exception.param, "top_p")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x " * 2000}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.serve.url + "/v1", api_key="wrong", max_retries=0).models.list()

    def test_curl(self):
        body = json.dumps({"model": "demo", "messages": MESSAGES, "temperature": 0})
        out = subprocess.run(["curl", "-sS", self.serve.url + "/v1/chat/completions", "-H", "Authorization: Bearer " + KEY,
                              "-H", "Content-Type: application/json", "-d", body], check=True, capture_output=True)
        self.assertEqual(json.loads(out.stdout)["choices"][0]["message"]["content"], self.chat().choices[0].message.content)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
