"""Structured output and forced tool calls against `fp4moe serve` on the demo checkpoint. Its template has no
tools and it was not trained on JSON, so the structure comes from the grammar alone."""
import concurrent.futures
import json
import pathlib
import random
import re
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import jsonschema
import openai

import demo_templates
from serve_process import Serve

BINARY, MODEL = sys.argv[1:3]
PYDANTIC = pathlib.Path(__file__).parents[1] / "engine/grammar/pydantic_schemas.json"
FUNCTION_TAGS = pathlib.Path(__file__).parents[1] / "io/data/templates/function_tags.jinja"
NUM_SCHEMAS, MAX_TOKENS, PLENTY = 200, 600, 3500
MESSAGES = [{"role": "user", "content": "Tom has 12 apples and eats 3. Describe what is left."}]


def random_schema(rng, depth=0):
    """A random schema in which every part is bounded."""
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "null", "const"] + ["array", "object"] * 2 * (depth < 3))
    if depth == 0:
        kind = "object"
    if kind == "string":
        most = rng.randint(0, 12)
        return rng.choice([{"type": "string", "maxLength": most, "minLength": rng.randint(0, most)},
                           {"type": "string", "pattern": rng.choice([r"^[a-z]{1,8}$", r"^\d{3}-\d{2}$", r"^(yes|no)[!?]{0,2}$"])}])
    if kind in ("integer", "number"):
        least = rng.randint(-1000, 1000)
        return {"type": kind, "minimum": least, "maximum": least + rng.randint(0, 5000)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, None, True, "a \"b\" \\", 1.5, "ä"], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["x", 3, None, [1, "a"], {"k": "v"}])}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 3)}
    if kind == "object":
        names = rng.sample(["name", "age", "x", "y_1", "tags", "is \"it\"", "größe"], rng.randint(1, 4))
        return {"type": "object", "properties": {n: random_schema(rng, depth + 1) for n in names},
                "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}
    return {"type": kind}


def free_space(text):
    """Whether there is white space outside strings."""
    return re.sub(r'"(\\.|[^"\\])*"', "", text).strip() != re.sub(r"\s", "", re.sub(r'"(\\.|[^"\\])*"', "", text))


class StructuredOutput(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(BINARY, MODEL, "--served-model-name", "demo", "--context-length", "4096")
        cls.serve.__enter__()
        cls.client = openai.OpenAI(base_url=cls.serve.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0, cls.serve.exit_code

    def chat(self, **fields):
        return self.client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS, **fields})

    def schema_answer(self, schema, **fields):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        return self.chat(response_format=form, **fields).choices[0]

    def test_random_schemas(self):
        rng = random.Random(7)
        schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
        settings = [{"temperature": 0 if i % 2 else 1.0, "seed": i} for i in range(NUM_SCHEMAS)]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda i: self.schema_answer(schemas[i], **settings[i]), range(NUM_SCHEMAS)))
            # The same requests with too few tokens give prefixes of texts that the grammar accepts.
            cut = list(pool.map(lambda i: self.schema_answer(schemas[i], **settings[i], max_tokens=5), range(0, NUM_SCHEMAS, 4)))
        for schema, answer in zip(schemas, answers):
            if answer.finish_reason == "stop":
                self.check(schema, answer.message.content)
        stops = [answer.finish_reason for answer in answers].count("stop")
        self.assertGreaterEqual(stops, 0.95 * NUM_SCHEMAS)
        # A response that ends with `length` is a prefix of the response with more tokens, which the grammar
        # accepts.
        beginnings = list(zip(range(0, NUM_SCHEMAS, 4), cut)) + [(i, a) for i, a in enumerate(answers) if a.finish_reason != "stop"]
        for i, short in beginnings:
            whole = answers[i]
            if whole.finish_reason != "stop":
                whole = self.schema_answer(schemas[i], **settings[i], max_tokens=PLENTY)
                self.assertEqual(whole.finish_reason, "stop")
                self.check(schemas[i], whole.message.content)
            beginning = short.message.content.rstrip("\ufffd")  # an incomplete character
            self.assertTrue(whole.message.content.startswith(beginning), (whole, short))
            if beginning != whole.message.content:
                self.assertEqual(short.finish_reason, "length")
        print(f"{NUM_SCHEMAS} schemas: {stops} responses ended with finish_reason stop")

    def test_constraints_under_other_servers_names(self):
        """vLLM's and llama-server's fields constrain the output as SGLang's do."""
        choices = ["yes \"sir\"", "n\\o\n\tit is", "grün 漢字"]
        for extra in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
            texts = {self.chat(extra_body=extra, temperature=1, seed=seed).choices[0].message.content for seed in range(8)}
            self.assertLessEqual(texts, set(choices))
        for extra in ({"guided_regex": "[a-c]{3}"}, {"structured_outputs": {"regex": "[a-c]{3}"}},
                      {"grammar": "root ::= [a-c] [a-c] [a-c]"}, {"guided_grammar": "root ::= [a-c]{3}"}):
            self.assertRegex(self.chat(extra_body=extra).choices[0].message.content, r"\A[a-c]{3}\Z")
        schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
        for extra in ({"guided_json": schema}, {"structured_outputs": {"json": schema}},
                      {"response_format": {"type": "json_object", "schema": schema}}):
            self.check(schema, self.chat(extra_body=extra).choices[0].message.content)

    def check(self, schema, text):
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
        self.assertFalse(free_space(text), text)

    def test_schemas_of_pydantic(self):
        """Discriminated unions, recursion, constraints: every second response ends within the tokens."""
        entries = json.loads(PYDANTIC.read_text())
        schemas = {name: entry["schema"] for name, entry in entries.items() if "refused" not in entry}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = dict(zip(schemas, pool.map(lambda name: self.schema_answer(schemas[name], temperature=1.0, seed=5), schemas)))
        stopped = {name: answer for name, answer in answers.items() if answer.finish_reason == "stop"}
        for name, answer in stopped.items():
            with self.subTest(name):
                self.check(schemas[name], answer.message.content)
        self.assertGreaterEqual(len(stopped), len(schemas) // 2, sorted(set(schemas) - set(stopped)))

    def test_a_refused_schema_names_the_path(self):
        cats = {"type": "object", "properties": {"lives": {"type": "number", "multipleOf": 0.5}}, "required": ["lives"]}
        schema = {"type": "object", "properties": {"items": {"type": "array", "items": {"anyOf": [{"type": "null"}, cats]}}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            self.schema_answer(schema)
        self.assertIn("$.properties.items.items.anyOf[1].properties.lives.multipleOf 0.5 cannot be enforced", caught.exception.message)
        self.assertIn('use "type": "integer"', caught.exception.message)

    def test_a_refused_schema_of_a_tool_names_the_path_in_the_request(self):
        lives = {"type": "object", "properties": {"lives": {"type": "number", "multipleOf": 0.5}}, "required": ["lives"]}
        good = {"type": "object"}
        own = {"/v1/chat/completions": lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
               "/v1/responses": lambda name, schema: {"type": "function", "name": name, "parameters": schema},
               "/v1/messages": lambda name, schema: {"name": name, "input_schema": schema}}
        choices = {"/v1/messages": {"type": "any"}}
        places = {"/v1/chat/completions": "tools[1].function.parameters", "/v1/responses": "tools[1].parameters",
                  "/v1/messages": "tools[1].input_schema"}
        for path, tool in own.items():
            with self.subTest(path):
                body = {"model": "demo", "max_tokens": 8, "tool_choice": choices.get(path, "required"),
                        "tools": [tool("go", good), tool("stay", lives)]}
                body |= {"input": "Hi", "max_output_tokens": 8} if path == "/v1/responses" else {"messages": MESSAGES}
                if path == "/v1/responses":
                    del body["max_tokens"]
                request = urllib.request.Request(self.serve.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
                with self.assertRaises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(request, timeout=60)
                self.assertEqual(caught.exception.code, 400)
                message = json.loads(caught.exception.read())["error"]["message"]
                self.assertIn(places[path] + ".properties.lives.multipleOf 0.5 cannot be enforced", message)

    def test_json_object_and_stream(self):
        form = {"type": "json_object"}
        answer = self.chat(response_format=form, max_tokens=64).choices[0]
        if answer.finish_reason == "stop":
            self.assertIsInstance(json.loads(answer.message.content), dict)
        self.assertEqual(answer.message.content[0], "{")
        chunks = list(self.chat(response_format=form, max_tokens=64, stream=True))
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks), answer.message.content)

    def test_regex_and_ebnf(self):
        for _ in range(2):  # the second time from the cache
            answer = self.chat(extra_body={"regex": "[A-Z]{3}-[0-9]{2,4}"}).choices[0]
            self.assertRegex(answer.message.content, r"\A[A-Z]{3}-[0-9]{2,4}\Z")
            self.assertEqual(answer.finish_reason, "stop")
        rules = 'root ::= item (", " item){2}\nitem ::= ("apple" | "pear") [0-9]'
        answer = self.chat(extra_body={"ebnf": rules}, n=2, temperature=1, seed=3)
        for choice in answer.choices:
            self.assertRegex(choice.message.content, r"\A(apple|pear)\d(, (apple|pear)\d){2}\Z")
        completion = self.client.completions.create(model="demo", prompt="Say", max_tokens=20, extra_body={"regex": "(ab){3}"})
        self.assertEqual(completion.choices[0].text, "ababab")

    def test_ignored_eos_ends_with_the_grammar(self):
        answer = self.chat(extra_body={"regex": "yes|no", "ignore_eos": True}).choices[0]
        self.assertIn(answer.message.content, ("yes", "no"))
        self.assertEqual(answer.finish_reason, "stop")

    def test_bad_grammars(self):
        for fields, words in [({"regex": "a(b"}, ""), ({"regex": "(" * 5000}, "deeper"), ({"ebnf": "root ::= other"}, ""),
                              ({"json_schema": {"type": "text"}}, ""), ({"json_schema": "{"}, "json_schema"),
                              ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
                              ({"regex": "a" * 300_000}, "300000 bytes"), ({"structural_tag": {"type": "none"}}, "")]:
            with self.assertRaises(openai.BadRequestError) as caught:
                self.chat(extra_body=fields)
            self.assertIn(words, caught.exception.message)
        with self.assertRaises(openai.BadRequestError):  # before the stream starts
            self.chat(extra_body={"ebnf": "root ::= other"}, stream=True)

    def test_nested_repetition_stalls_nobody(self):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            slow = pool.submit(self.chat, max_tokens=4, extra_body={"regex": "((a{1,50}b{1,50}){1,50}c?){1,50}"})
            self.assertIn("#### ", self.chat(max_tokens=200).choices[0].message.content)
            self.assertRegex(slow.result().choices[0].message.content, r"\Aa*b*")

    def test_forced_calls(self):
        point = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x"]}
        tools = [{"type": "function", "function": {"name": name, "parameters": point}} for name in ("go", "stay")]
        answer = self.chat(tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0]
        self.assertEqual(answer.finish_reason, "tool_calls")
        self.assertEqual(len(answer.message.tool_calls), 1)
        function = answer.message.tool_calls[0].function
        self.assertIn(function.name, ("go", "stay"))
        jsonschema.validate(json.loads(function.arguments), point)
        named = {"type": "function", "function": {"name": "stay"}}
        chunks = list(self.chat(tools=tools, tool_choice=named, stream=True))
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        self.assertEqual([c.function.name for c in calls if c.function.name], ["stay"])
        jsonschema.validate(json.loads("".join(c.function.arguments for c in calls)), point)
        self.assertEqual(chunks[-1].choices[0].finish_reason, "tool_calls")
        with self.assertRaises(openai.BadRequestError) as caught:  # the demo's template does not render tools
            self.chat(tools=tools)
        self.assertIn("has no place for tools", caught.exception.message)

    def test_forced_calls_with_function_tags(self):
        """Parameters are plain text between tags, typed by the schema; results go back through the template."""
        schema = {"type": "object", "additionalProperties": False, "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}, "s": {"type": "string", "maxLength": 12},
            "e": {"enum": ["red", "two words", "3"]}, "p": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "o": {"type": "object", "properties": {"k": {"enum": [None, "a", 2]}}, "required": ["k"], "additionalProperties": False}}}
        schema["required"] = list(schema["properties"])
        tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
        with Serve(BINARY, MODEL, "--chat-template", str(FUNCTION_TAGS), "--context-length", "1024") as serve:
            with openai.OpenAI(base_url=serve.url + "/v1", api_key="none", max_retries=0) as client:
                def chat(seed, **fields):
                    return client.chat.completions.create(
                        model="default", messages=MESSAGES, tools=tools, tool_choice="required", seed=seed, max_tokens=300,
                        parallel_tool_calls=False, extra_body={"chat_template_kwargs": {"enable_thinking": False}}, **fields)

                for seed in range(12):
                    choice = chat(seed).choices[0]
                    self.assertEqual((choice.finish_reason, choice.message.content), ("tool_calls", None))
                    function = choice.message.tool_calls[0].function
                    self.assertEqual(function.name, "look")
                    jsonschema.validate(json.loads(function.arguments), schema)
                deltas = [c for chunk in chat(0, stream=True) for c in chunk.choices[0].delta.tool_calls or []]
                whole = chat(0).choices[0].message.tool_calls[0].function.arguments
                self.assertEqual("".join(d.function.arguments for d in deltas), whole)
                call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"s": "x\\n", "n": 2, "o": {"k": null}}'}}
                turns = [*MESSAGES, {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "a", "content": "done"}]
                rendered = client.post(serve.url + "/apply-template", body={"messages": turns, "tools": tools}, cast_to=object)["prompt"]
                self.assertIn("<think>\nHm.\n</think>\n\n<tool_call>\n<function=look>\n<parameter=s>\nx\n\n</parameter>\n"
                              '<parameter=n>\n2\n</parameter>\n<parameter=o>\n{"k": null}\n</parameter>\n</function>\n</tool_call>', rendered)
                self.assertIn("<tool_response>\ndone\n</tool_response>", rendered)

    def test_a_format_or_a_call(self):
        """With tools, a format constrains the text of a response that calls none."""
        def one_of(name):
            return {"type": "object", "properties": {name: {"enum": [1, 2]}}, "required": [name], "additionalProperties": False}

        tools = [{"type": "function", "function": {"name": "look", "parameters": one_of("x")}}]
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": one_of("r")}}
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
            template.write(demo_templates.TOOLS)
            template.flush()
            with Serve(BINARY, MODEL, "--chat-template", template.name, "--context-length", "1024") as serve:
                with openai.OpenAI(base_url=serve.url + "/v1", api_key="none", max_retries=0) as client:
                    def chat(**fields):
                        return client.chat.completions.create(
                            model="default", messages=MESSAGES, tools=tools, response_format=form, temperature=0,
                            max_tokens=100, parallel_tool_calls=False, **fields).choices[0]

                    first = client.post("/tokenize", body={"prompt": "<tool_call>", "add_special_tokens": False},
                                        cast_to=object, options={})["tokens"][0]
                    for fields in ({"logit_bias": {str(first): -100}}, {"tool_choice": "none"}):
                        self.check(one_of("r"), chat(**fields).message.content)
                    call = chat(logit_bias={str(first): 100})
                    self.assertIsNone(call.message.content)
                    function = call.message.tool_calls[0].function
                    self.assertEqual(function.name, "look")
                    if call.finish_reason == "tool_calls":
                        self.assertIsInstance(json.loads(function.arguments), dict)


class WithoutBackend(unittest.TestCase):
    def test_refused_by_name(self):
        with Serve(BINARY, MODEL, "--grammar-backend", "none") as serve:
            with openai.OpenAI(base_url=serve.url + "/v1", api_key="none", max_retries=0) as client:
                with self.assertRaises(openai.BadRequestError) as caught:
                    client.chat.completions.create(model="demo-gptoss-mxfp4", messages=MESSAGES, response_format={"type": "json_object"})
                self.assertIn("--grammar-backend", caught.exception.message)
        self.assertEqual(serve.exit_code, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
