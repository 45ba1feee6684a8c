"""Checks /openapi.json against the server: each route exists, each field is read and has the stated bounds, and
responses match their schema."""
import contextlib
import http.client
import json
import os
import re
import sys
import unittest
import urllib.request
from urllib.parse import urlsplit

import jsonschema

from serve_process import Serve

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
VALID = {  # a minimal body for each route that takes one
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Tom", "max_tokens": 2},
    "/v1/responses": {"input": "Tom", "max_output_tokens": 2},
    "/generate": {"text": "Tom", "sampling_params": {"max_new_tokens": 2}},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Tom has"},
    "/detokenize": {"tokens": [65, 66]},
    "/apply-template": {"messages": [{"role": "user", "content": "Hi"}]},
    "/abort_request": {"rid": "none"},
    "/update_weights_from_disk": {"model_path": MODEL},
}
GENERATING = list(VALID)[:4]
MORE = {  # further bodies whose responses must match the schema
    "/v1/chat/completions": [{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 40},
                             {"logprobs": True, "top_logprobs": 2}, {"n": 2, "stop": "a", "stop_regex": "[0-9]{3}"},
                             {"return_token_ids": True, "rid": "mine", "return_routed_experts": True}],
    "/v1/completions": [{"logprobs": 2, "n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[65], [66, 67]]},
                        {"logprobs": 1, "echo": True, "return_token_ids": True, "return_routed_experts": True}],
    "/v1/responses": [{"tools": [{"type": "function", "name": "f"}], "tool_choice": "required", "max_output_tokens": 40},
                      {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [
                          {"type": "function", "name": "f"}]}], "tool_choice": "required", "max_output_tokens": 40},
                      {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": False, "truncation": "auto"},
                      {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief", "metadata": {"a": "b"}}],
    "/generate": [{"return_logprob": True, "top_logprobs_num": 2}, {"text": ["a", "b"]}, {"text": None, "input_ids": [65]},
                  {"return_logprob": True, "return_text_in_logprobs": True},
                  {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [65, 2]},
                  {"return_logprob": True, "text": ["a", "b"], "token_ids_logprob": [[65], None]},
                  {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "rid": ["mine"],
                   "return_routed_experts": True, "routed_experts_start_len": 1}],
    "/v1/messages": [{"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}, "max_tokens": 40},
                     {"stop_sequences": ["a"], "system": [{"type": "text", "text": "Be brief."}], "thinking": {"type": "adaptive"}},
                     {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"enum": [1]}}}},
                     {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]}],
    "/v1/messages/count_tokens": [{"system": "Be brief."}],
    "/tokenize": [{"prompt": ["a", "b c"]}, {"prompt": None, "content": "a \u2603", "with_pieces": True},
                  {"prompt": ["a"], "return_token_strs": True, "with_pieces": True},
                  {"prompt": None, "messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}],
    "/detokenize": [{"tokens": 65}, {"tokens": [[65], [66]]}, {"tokens": None, "ids": [65]}, {"tokens": None, "prompt": []}],
    "/apply-template": [{"add_generation_prompt": False}],
    "/abort_request": [{"rid": None, "abort_all": True}],
    "/update_weights_from_disk": [{"load_format": "safetensors", "abort_all_requests": True, "flush_cache": True,
                                   "is_async": False, "token_step": 0, "manifest": None}],
}
OTHER_STATUS = {"/v1/responses/{response_id}/cancel": 400,  # no response runs in the background
                "/rebalance_experts": 400,  # there is one rank
                "/slots": 404}
HUGE = {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"}  # valid up to 2^31-1, clamped to the context


def named_field(answer):
    """The field that an error names: OpenAI's in a separate member, Anthropic's at the beginning of the message."""
    return answer["error"].get("param") or re.match(r"[\w.\[\]]*", answer["error"]["message"])[0]


class OpenApi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(BINARY, MODEL, "--context-length", "256", "--served-model-name", "demo").__enter__()
        status, text, _ = cls.ask("GET", "/openapi.json")
        assert status == 200, text
        cls.document = json.loads(text)

    @classmethod
    def tearDownClass(cls):
        cls.serve.__exit__()
        assert cls.serve.exit_code == 0, cls.serve.exit_code

    @classmethod
    def ask(cls, method, path, body=None):
        url = urlsplit(cls.serve.url)
        with contextlib.closing(http.client.HTTPConnection(url.hostname, url.port, timeout=60)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode(), response.getheader("Content-Type")

    def post(self, path, body):
        status, text, _ = self.ask("POST", path, body)
        return status, json.loads(text)

    def stored_id(self):
        status, response = self.post("/v1/responses", VALID["/v1/responses"])
        self.assertEqual(status, 200, response)
        return response["id"]

    def check(self, instance, schema):
        """Checks that the instance matches the schema, whose references refer to the document."""
        whole = {**schema, "components": self.document["components"]}
        jsonschema.Draft202012Validator(whole).validate(instance)

    def resolve(self, schema):
        while "$ref" in schema:
            at = self.document
            for key in schema["$ref"].removeprefix("#/").split("/"):
                at = at[key]
            schema = at
        return schema

    def request_schema(self, path):
        content = self.document["paths"][path]["post"]["requestBody"]["content"]
        return self.resolve(content["application/json"]["schema"])

    def answer_schema(self, path, method, status):
        answer = self.resolve(self.document["paths"][path][method]["responses"][str(status)])
        return answer["content"]["application/json"]["schema"]

    def test_references_resolve_and_schemas_are_legal(self):
        for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(self.document)):
            self.resolve({"$ref": reference})
        for schema in self.document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        self.assertRegex(self.document["info"]["version"], r"^\d+\.\d+\.\d+$")

    def test_routes(self):
        for path, methods in self.document["paths"].items():
            for method in methods:
                if method == "parameters":
                    continue
                expected = OTHER_STATUS.get(path, 200)
                place = path.replace("{model}", "demo").replace("{response_id}", self.stored_id())
                status, text, kind = self.ask(method.upper(), place, VALID.get(path))
                self.assertEqual(status, expected, f"{method} {path}: {text}")
                self.assertIn(kind.split(";")[0], self.resolve(methods[method]["responses"][str(status)])["content"])
                if kind == "application/json":
                    self.check(json.loads(text), self.answer_schema(path, method, status))
        said = next(line for line in self.serve.lines if "endpoints: " in line).split("endpoints: ")[1]
        for path in re.findall(r"(/[a-z_][\w/.]+)(?: |$)", said.strip().replace(self.serve.url, "")):
            self.assertIn(path, self.document["paths"], "add it to src/server/openapi.json")

    def test_answers(self):
        for path, bodies in MORE.items():
            for more in bodies:
                with self.subTest(path, more=more):
                    body = {**VALID[path], **more}
                    self.check(body, self.request_schema(path))
                    status, answer = self.post(path, body)
                    self.assertEqual(status, 200, answer)
                    self.check(answer, self.answer_schema(path, "post", 200))

    def test_errors(self):
        for path in VALID:
            for body in ([], "a", 7, None, {"model": 7}, {"model": "other"}):
                status, answer = self.post(path, body)
                if path == "/abort_request" and status == 400 or path != "/abort_request":
                    self.assertIn(status, (400, 404), (path, body))
                    self.check(answer, self.answer_schema(path, "post", status))

    def fields(self, path):
        """Each field's path (names, outermost first) and schema."""
        def walk(schema, place):
            for name, field in schema.get("properties", {}).items():
                yield place + [name], field
                if "properties" in field:
                    yield from walk(field, place + [name])
        return walk(self.request_schema(path), [])

    def with_field(self, path, place, value):
        body = json.loads(json.dumps(VALID[path]))
        at = body
        for name in place[:-1]:
            at = at.setdefault(name, {})
        at[place[-1]] = value
        return body

    def test_bounds(self):
        """The server accepts exactly the schema's number ranges: both bounds are valid, values beyond them are
        refused."""
        tried = 0
        for path in GENERATING:
            for place, schema in self.fields(path):
                types = schema.get("type", [])
                if not {"integer", "number"} & set(types if isinstance(types, list) else [types]):
                    continue
                step = 1 if "integer" in types else 0.5
                for key, sign in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                    if key not in schema:
                        continue
                    beyond = schema[key] + sign * step
                    status, answer = self.post(path, self.with_field(path, place, beyond))
                    self.assertEqual((status, named_field(answer)), (400, ".".join(place)), answer)
                    if key != "exclusiveMinimum" and place[-1] not in HUGE:
                        status, answer = self.post(path, self.with_field(path, place, schema[key]))
                        # A bound can be refused for another reason, such as a missing field, but not because
                        # it is out of range.
                        self.assertNotRegex(json.dumps(answer), rf"must be in .*got {schema[key]}\b", place)
                    tried += 1
        self.assertGreater(tried, 25)

    def test_types(self):
        """Values that the schema does not allow are refused, and null selects the default."""
        wrong = [True, "a", 7, {"a": 1}, [[{}]]]
        for path in GENERATING:
            for place, schema in self.fields(path):
                if schema.get("type") is None or place[-1] in ("text", "input_ids", "prompt", "messages"):
                    continue
                for value in wrong:
                    whole = {**schema, "components": self.document["components"]}
                    if jsonschema.Draft202012Validator(whole).is_valid(value):
                        continue
                    status, answer = self.post(path, self.with_field(path, place, value))
                    self.assertIn(status, (400, 404), (path, place, value))
                    self.assertTrue(named_field(answer).startswith(place[0]), (place, answer))
                if "null" in schema["type"]:
                    status, answer = self.post(path, self.with_field(path, place, None))
                    self.assertEqual(status, 200, (path, place, answer))

    def test_all_fields_are_known(self):
        """The server reads every field of the document and reports none as unknown."""
        with Serve(BINARY, MODEL) as serve:
            for path in GENERATING:
                body = {}
                for place, _ in self.fields(path):
                    if len(place) == 1:
                        body[place[0]] = None
                request = urllib.request.Request(serve.url + path, json.dumps({**body, **VALID[path]}).encode())
                with urllib.request.urlopen(request) as answer:
                    self.assertEqual(answer.status, 200)
        self.assertNotIn("unknown field", "".join(serve.lines))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
