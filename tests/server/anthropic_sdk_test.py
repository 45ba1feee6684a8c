"""The anthropic package as a client of `fp4moe serve` on the demo checkpoints."""
import os
import sys
import tempfile
import unittest

from demo_templates import TOOLS
from serve_process import SKIPPED, Serve

try:
    import anthropic
except ImportError as error:
    print("SKIPPED:", error, "(scripts/setup --tests installs it)")
    sys.exit(SKIPPED)

BINARY, MODEL = sys.argv[1:3]
DEEPSEEK = os.path.join(os.path.dirname(MODEL), "demo-dsv3-nvfp4")
KEY = "test-key"
QUESTION = "Tom has 12 apples. Tom buys 5 more and gives 3 to Ana. How many apples does Tom have now?"
GREEDY = {"temperature": 0}
ADD = {"name": "add", "description": "Adds two numbers.",
       "input_schema": {"type": "object", "properties": {"a": {"enum": [12, 17]}, "b": {"enum": [5, -3]}},
                        "required": ["a", "b"], "additionalProperties": False}}
# The demo checkpoints don't reason. With thinking on, the whole output is reasoning, because they never end it.
THINKING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""


class Server(unittest.TestCase):
    model = MODEL
    template = None  # the checkpoint's

    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "template.jinja")
            with open(path, "w") as file:
                file.write(cls.template or "")
            flags = ["--chat-template", path] if cls.template else []
            cls.serve = Serve(BINARY, cls.model, "--served-model-name", "demo", "--api-key", KEY,
                              "--context-length", "1024", *flags)
            cls.serve.__enter__()
        cls.client = anthropic.Anthropic(base_url=cls.serve.url, api_key=KEY, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0, cls.serve.exit_code

    @staticmethod
    def request(messages=QUESTION, **more):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        extra = {**GREEDY, **more.pop("extra_body", {})}
        return {"model": "demo", "max_tokens": 120, "messages": messages, "extra_body": extra, **more}

    def create(self, *args, **more):
        return self.client.messages.create(**self.request(*args, **more))

    def streamed(self, *args, **more):
        """The message that the SDK assembles from a stream's events."""
        with self.client.messages.stream(**self.request(*args, **more)) as stream:
            return stream.get_final_message()

    def check_stream(self, whole, *args, **more):
        """Checks that a stream has the same blocks as `whole`, except ids."""
        message = self.streamed(*args, **more)
        blocks = [[{k: v for k, v in block.to_dict().items() if k != "id"} for block in m.content] for m in (whole, message)]
        self.assertEqual(*blocks)
        self.assertEqual((message.stop_reason, message.stop_sequence), (whole.stop_reason, whole.stop_sequence))
        self.assertEqual(message.usage.output_tokens, whole.usage.output_tokens)

    def check_count(self, *args, **more):
        """Checks that count_tokens returns the input tokens of the message."""
        usage = self.create(*args, **more).usage
        body = self.request(*args, **more)
        del body["max_tokens"]
        self.assertEqual(self.client.messages.count_tokens(**body).input_tokens,
                         usage.input_tokens + usage.cache_read_input_tokens)


class Text(Server):
    def test_message(self):
        message = self.create()
        self.assertEqual((message.role, message.type, message.model), ("assistant", "message", "demo"))
        self.assertEqual([block.type for block in message.content], ["text"])
        self.assertIn("14", message.content[0].text)
        self.assertEqual(message.stop_reason, "end_turn")
        self.assertGreater(message.usage.output_tokens, 5)
        self.check_stream(message)
        self.check_count(system="Be brief.")

    def test_cached_tokens(self):
        self.create()
        usage = self.create().usage
        self.assertGreater(usage.cache_read_input_tokens, 0)
        self.assertGreater(usage.input_tokens, 0)

    def test_stream_events(self):
        with self.client.messages.create(**self.request(), stream=True) as stream:
            events = list(stream)
        self.assertEqual([e.type for e in events[:2]], ["message_start", "content_block_start"])
        self.assertEqual([e.type for e in events[-3:]], ["content_block_stop", "message_delta", "message_stop"])
        self.assertEqual({e.type for e in events[2:-3]}, {"content_block_delta"})
        self.assertEqual("".join(e.delta.text for e in events[2:-3]), self.create().content[0].text)

    def test_content_and_system_as_blocks(self):
        cache = {"type": "ephemeral"}
        block = {"type": "text", "text": QUESTION, "cache_control": cache}
        system = "Answer with a number."
        self.assertEqual(self.create([{"role": "user", "content": [block]}],
                                     system=[{"type": "text", "text": system, "cache_control": cache}]).content,
                         self.create(system=system).content)

    def test_stop_and_length(self):
        whole = self.create().content[0].text
        stop = whole[len(whole) // 2:][:2]
        message = self.create(stop_sequences=[stop])
        self.assertEqual(message.content[0].text, whole[:whole.index(stop)])
        self.assertEqual((message.stop_reason, message.stop_sequence), ("stop_sequence", stop))
        self.check_stream(message, stop_sequences=[stop])
        self.assertEqual(self.create(max_tokens=1).stop_reason, "max_tokens")
        full = self.create(max_tokens=5000, extra_body={"ignore_eos": True})
        self.assertEqual(full.stop_reason, "model_context_window_exceeded")

    def test_prefill(self):
        whole = self.create().content[0].text
        start = whole[:len(whole) // 2].rstrip()
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": start}]
        self.assertEqual(start + self.create(messages).content[0].text, whole)

    def test_errors(self):
        with self.assertRaises(anthropic.NotFoundError) as caught:
            self.client.messages.create(**{**self.request(), "model": "claude"})
        self.assertEqual(caught.exception.body["error"]["type"], "not_found_error")
        with self.assertRaisesRegex(anthropic.BadRequestError, "max_tokens: must be in 0"):
            self.create(max_tokens=-1)
        with self.assertRaisesRegex(anthropic.BadRequestError, '"image" is not supported in a user message'):
            self.create([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}])
        with self.assertRaisesRegex(anthropic.BadRequestError, "prompt is too long: .*maximum context length is 1024"):
            self.create("x " * 2000)
        with self.assertRaises(anthropic.APIStatusError) as caught:
            self.create("x" * (33 << 20))
        self.assertEqual((caught.exception.status_code, caught.exception.body["error"]["type"]), (413, "request_too_large"))
        with self.assertRaises(anthropic.AuthenticationError) as caught:
            anthropic.Anthropic(base_url=self.serve.url, api_key="wrong", max_retries=0).messages.create(**self.request())
        self.assertEqual(caught.exception.body["error"]["type"], "authentication_error")

    def test_an_error_within_a_stream(self):
        with self.assertRaisesRegex(anthropic.APIStatusError, "timeout_error"):
            self.streamed(max_tokens=900, extra_body={"ignore_eos": True, "timeout": 0.02})

    def test_bearer_token(self):
        client = anthropic.Anthropic(base_url=self.serve.url, auth_token=KEY, max_retries=0)
        self.assertEqual(client.messages.create(**self.request()).content, self.create().content)


class DeepSeekText(Text):
    model = DEEPSEEK


class Tools(Server):
    template = TOOLS

    def test_round_trip(self):
        forced = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}
        message = self.create(**forced)
        self.assertEqual(message.stop_reason, "tool_use")
        call, = message.content
        self.assertEqual((call.type, call.name, set(call.input)), ("tool_use", "add", {"a", "b"}))
        self.check_stream(message, **forced)
        self.check_count(**forced)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "17"}]}
        history = [{"role": "user", "content": QUESTION}, message.to_param(), {"role": "user", "content": [result]}]
        answer = self.create(history, tools=[ADD], tool_choice={"type": "none"})
        self.assertEqual(answer.content[0].type, "text")
        self.check_stream(answer, history, tools=[ADD], tool_choice={"type": "none"})
        self.check_count(history, tools=[ADD])

    def test_any_and_one_call(self):
        one = {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        message = self.create(**one)
        self.assertEqual([block.type for block in message.content], ["tool_use"])
        self.check_stream(message, **one)

    def test_server_tools_are_refused(self):
        with self.assertRaisesRegex(anthropic.BadRequestError, 'tools\\[0\\].type: "web_search_20250305" is a tool'):
            self.create(tools=[{"type": "web_search_20250305", "name": "web_search"}])

    def test_output_format(self):
        schema = {"type": "object", "properties": {"apples": {"enum": [14, 17]}}, "required": ["apples"],
                  "additionalProperties": False}
        form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        message = self.create(**form)
        self.assertIn(message.content[0].text, ('{"apples":14}', '{"apples":17}'))
        self.check_stream(message, **form)


class Thinking(Server):
    template = THINKING

    def test_thinking(self):
        on = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        message = self.create(**on)
        thought, = message.content
        self.assertEqual(thought.type, "thinking")
        self.assertTrue(thought.thinking and thought.signature)
        self.check_stream(message, **on)
        history = [{"role": "user", "content": QUESTION}, message.to_param(), {"role": "user", "content": "And now?"}]
        self.check_count(history, **on)
        without = [history[0], {"role": "assistant", "content": ""}, history[2]]
        counts = [self.client.messages.count_tokens(model="demo", messages=m).input_tokens for m in (history, without)]
        self.assertGreater(*counts)
        for off in ({}, {"thinking": {"type": "disabled"}}):
            self.assertEqual([block.type for block in self.create(**off).content], ["text"])


del Server  # only a base
if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
