"""The Responses API of the openai package as a client of `fp4moe serve` on the demo checkpoint."""
import json
import os
import sys
import tempfile
import unittest

import openai
import pydantic

from serve_process import Serve

BINARY, MODEL = sys.argv[1:3]
KEY, OTHER_KEY = "test-key", "other-key"
QUESTION = "Tom has 12 apples. Tom buys 5 more and gives 3 to Ana. How many apples does Tom have now?"
# The demo's own template knows neither tools nor reasoning. {{ think }} puts the model inside its reasoning.
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>{% else %}<think></think>{% endif %}{% endif %}"""
TOOL = {"type": "function", "name": "add", "description": "Adds two digits.", "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
                       "required": ["a", "b"], "additionalProperties": False}}


class Fruit(pydantic.BaseModel):
    name: bool
    ripe: bool


class ResponsesSdk(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as keys:
            keys.write(f"{KEY}\n{OTHER_KEY}\n")
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as template:
            template.write(TEMPLATE)
        cls.files = [keys.name, template.name]
        flags = ["--served-model-name", "demo", "--api-key-file", keys.name, "--context-length", "1024"]
        cls.serve = Serve(BINARY, MODEL, *flags).__enter__()
        cls.thinking = Serve(BINARY, MODEL, *flags, "--chat-template", template.name).__enter__()
        cls.client = openai.OpenAI(base_url=cls.serve.url + "/v1", api_key=KEY, max_retries=0)
        cls.thinker = openai.OpenAI(base_url=cls.thinking.url + "/v1", api_key=KEY, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.thinker.close()
        for serve in (cls.serve, cls.thinking):
            serve.__exit__()
            assert serve.exit_code == 0, serve.exit_code
        for name in cls.files:
            os.unlink(name)
        assert "unknown field" not in "".join(cls.serve.lines + cls.thinking.lines)

    def create(self, given=QUESTION, client=None, **more):
        return (client or self.client).responses.create(model="demo", input=given, temperature=0, **more)

    def test_text(self):
        response = self.create(metadata={"a": "b"})
        self.assertIn("14", response.output_text)
        self.assertEqual((response.status, response.object, response.model), ("completed", "response", "demo"))
        self.assertEqual(response.metadata, {"a": "b"})
        self.assertRegex(response.id, "^resp_")
        self.assertRegex(response.output[0].id, "^msg_")
        usage = response.usage
        self.assertEqual(usage.total_tokens, usage.input_tokens + usage.output_tokens)
        self.assertEqual(usage.output_tokens_details.reasoning_tokens, 0)
        chat = self.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": QUESTION}],
                                                   temperature=0)
        self.assertEqual(response.output_text, chat.choices[0].message.content)
        self.assertEqual(usage.input_tokens, chat.usage.prompt_tokens)

    def test_stream(self):
        events = list(self.create(stream=True))
        self.assertEqual([e.type for e in events[:4]], ["response.created", "response.in_progress",
                                                        "response.output_item.added", "response.content_part.added"])
        self.assertEqual([e.type for e in events[-4:]], ["response.output_text.done", "response.content_part.done",
                                                         "response.output_item.done", "response.completed"])
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual(text, self.create().output_text)
        self.assertEqual(text, events[-1].response.output_text)
        self.assertEqual({e.item_id for e in events[2:-1] if hasattr(e, "item_id")}, {events[2].item.id})
        with self.client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
            self.assertEqual(stream.get_final_response().output_text, text)

    def test_length(self):
        response = self.create(max_output_tokens=3)
        self.assertEqual((response.status, response.incomplete_details.reason), ("incomplete", "max_output_tokens"))
        self.assertEqual(response.usage.output_tokens, 3)
        self.assertEqual(list(self.create(max_output_tokens=3, stream=True))[-1].type, "response.incomplete")

    def test_logprobs(self):
        response = self.create(include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=6)
        content = response.output[0].content[0]
        self.assertEqual("".join(p.token for p in content.logprobs), content.text)
        for position in content.logprobs:
            self.assertEqual(len(position.top_logprobs), 2)
            self.assertEqual(position.top_logprobs[0].token, position.token)  # greedy

    def test_reasoning(self):
        more = {"max_output_tokens": 12, "extra_body": {"chat_template_kwargs": {"think": True}}}
        response = self.create(client=self.thinker, **more)
        self.assertEqual([item.type for item in response.output], ["reasoning"])
        text = response.output[0].content[0].text
        self.assertTrue(text)
        self.assertEqual(response.output[0].content[0].type, "reasoning_text")
        self.assertEqual(response.usage.output_tokens_details.reasoning_tokens, 12)
        events = list(self.create(client=self.thinker, stream=True, **more))
        self.assertEqual("".join(e.delta for e in events if e.type == "response.reasoning_text.delta"), text)
        self.assertEqual(events[-1].response.usage.output_tokens_details.reasoning_tokens, 12)
        # The grammar admits reasoning before the response.
        more["extra_body"]["regex"] = "[0-9]"
        more["max_output_tokens"] = 400
        both = self.create(client=self.thinker, **more)
        if both.status == "completed":
            self.assertEqual([item.type for item in both.output], ["reasoning", "message"])
            self.assertRegex(both.output_text, r"^[0-9]$")

    def test_tools(self):
        """A call, its output, and the response to it: as input items and by previous_response_id."""
        given = [{"role": "user", "content": "1 + 3?"}]
        called = self.create(given, self.thinker, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        calls = [item for item in called.output if item.type == "function_call"]
        self.assertEqual({call.name for call in calls}, {"add"})
        arguments = json.loads(calls[0].arguments)
        self.assertIn(arguments["a"], (1, 2))
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
        replayed = self.create(given + called.output + outputs, self.thinker, tools=[TOOL], tool_choice="none")
        continued = self.create(outputs, self.thinker, tools=[TOOL], tool_choice="none", previous_response_id=called.id)
        self.assertTrue(replayed.output_text)
        self.assertEqual(replayed.output_text, continued.output_text)
        self.assertEqual(replayed.usage.input_tokens, continued.usage.input_tokens)
        named = self.create(given, self.thinker, tools=[TOOL], tool_choice={"type": "function", "name": "add"}, stream=True)
        events = list(named)
        done = next(e for e in events if e.type == "response.function_call_arguments.done")
        self.assertEqual("".join(e.delta for e in events if e.type == "response.function_call_arguments.delta"),
                         done.arguments)
        json.loads(done.arguments)

    def test_namespaces(self):
        """Codex sends the functions of an MCP server in a namespace, and web_search."""
        space = {"type": "namespace", "name": "mcp__sums", "description": "Sums.", "tools": [TOOL]}
        more = {"client": self.thinker, "tools": [{"type": "web_search"}, space], "tool_choice": "required",
                "parallel_tool_calls": False}
        given = [{"role": "user", "content": "1 + 3?"}]
        called = self.create(given, **more)
        call = next(item for item in called.output if item.type == "function_call")
        self.assertEqual((call.name, call.namespace), ("add", "mcp__sums"))
        self.assertEqual(len(called.tools), 1)
        output = [{"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
        more["tool_choice"] = "none"
        replayed = self.create(given + called.output + output, **more)
        continued = self.create(output, previous_response_id=called.id, **more)
        self.assertEqual(replayed.output_text, continued.output_text)
        self.assertEqual(replayed.usage.input_tokens, continued.usage.input_tokens)
        more["tool_choice"] = {"type": "function", "name": "add"}
        items = [e.item for e in self.create(given, stream=True, **more) if e.type.startswith("response.output_item")]
        self.assertEqual({(i.name, i.namespace) for i in items if i.type == "function_call"}, {("add", "mcp__sums")})

    def test_structured_text(self):
        parsed = self.client.responses.parse(model="demo", input=QUESTION, temperature=0, text_format=Fruit)
        self.assertIsInstance(parsed.output_parsed, Fruit)
        any_json = self.create(text={"format": {"type": "json_object"}}, max_output_tokens=200)
        if any_json.status == "completed":
            json.loads(any_json.output_text)

    def test_previous_response(self):
        first = self.create(instructions="Answer briefly.")
        second = self.create("And if Ana gives 2 back?", previous_response_id=first.id)
        replayed = self.create([{"role": "user", "content": QUESTION}, *first.output,
                                {"role": "user", "content": "And if Ana gives 2 back?"}])
        self.assertEqual(second.output_text, replayed.output_text)
        self.assertEqual(second.usage.input_tokens, replayed.usage.input_tokens)
        self.assertEqual(second.previous_response_id, first.id)
        self.assertEqual(self.client.responses.retrieve(second.id), second)
        items = list(self.client.responses.input_items.list(second.id))
        self.assertEqual([item.content[0].text for item in items], ["And if Ana gives 2 back?"])
        self.client.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.retrieve(first.id)
        self.create("More?", previous_response_id=second.id)  # its conversation stays

    def test_store(self):
        unstored = self.create(store=False)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.retrieve(unstored.id)
        stored = self.create()
        with openai.OpenAI(base_url=self.serve.url + "/v1", api_key=OTHER_KEY, max_retries=0) as other:
            for ask in (lambda: other.responses.retrieve(stored.id), lambda: other.responses.delete(stored.id),
                        lambda: other.responses.input_items.list(stored.id),
                        lambda: self.create(client=other, previous_response_id=stored.id)):
                with self.assertRaises(openai.NotFoundError):
                    ask()
        with self.assertRaises(openai.BadRequestError):
            self.client.responses.cancel(stored.id)

    def test_errors(self):
        for more, param in (({"background": True}, "background"), ({"truncation": "middle"}, "truncation"),
                            ({"top_p": 7}, "top_p"), ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
                            ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
                             "input[0].content[0].type")):
            with self.assertRaises(openai.BadRequestError) as caught:
                self.create(**more)
            self.assertEqual(caught.exception.param, param)
        with self.assertRaises(openai.NotFoundError) as caught:
            self.create(previous_response_id="resp_unknown")
        self.assertEqual(caught.exception.param, "previous_response_id")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.create("x " * 2000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
