"""Renders templates with Jinja2, configured as in Hugging Face Transformers, and with fp4moe; the results
must be identical.

Usage: chat_template_jinja2_test.py TEMPLATE_DUMP
"""
import json
import pathlib
import random
import subprocess
import sys
import unittest

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

FOLDER = pathlib.Path(__file__).resolve().parent / "data" / "templates"


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template, conversation):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(
        messages=conversation["messages"], tools=conversation.get("tools"), documents=None,
        add_generation_prompt=conversation.get("add_generation_prompt", True), **conversation.get("kwargs", {}))


class Differential(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dump = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def tearDownClass(cls):
        cls.dump.stdin.close()
        cls.dump.stdout.close()
        cls.dump.wait()

    def ours(self, template, conversation):
        print(json.dumps({"template": template, **conversation}), file=self.dump.stdin, flush=True)
        return json.loads(self.dump.stdout.readline())

    def check(self, template, conversation):
        """Both give the same text, or both fail."""
        got = self.ours(template, conversation)
        with self.subTest(template):
            try:
                want = render(template, conversation)
            except Exception as error:
                self.assertIn("error", got, f"Jinja2 fails with {error!r}")
                return
            self.assertEqual(got.get("text"), want, got.get("error"))

    def test_files(self):
        conversations = json.loads((FOLDER / "conversations.json").read_text())
        for path in sorted(FOLDER.glob("*.jinja")):
            stored = json.loads(path.with_suffix(".json").read_text())
            for conversation, text in zip(conversations, stored, strict=True):
                self.assertEqual(render(path.read_text(), conversation), text, f"{path.name}: run expected.py again")
                self.check(path.read_text(), conversation)

    def test_expressions(self):
        """Operators, filters, tests and methods over all pairs of a few values of each type."""
        values = ["0", "-3", "2", "true", "none", "1.5", "-0.0", "1e16", "''", "'aB'", "' x,é '", "[]", "[1, 'a']", "(1, 2)",
                  "{}", "{'a': 1}", "missing", "range(3)", "'<&>'|e"]
        one = ["{}|length", "{}|tojson", "{}|string", "{}|list", "{}|first", "{}|join('-')", "{}|upper", "{}|title", "{}|trim",
               "{}|int", "{}|float", "{}|round", "{}|abs", "{}|sort", "{}|default('d')", "{}|sum", "{}|reverse|list",
               "{}|unique|list", "{}|items|list", "{}|dictsort", "{}|min", "{}|max", "{}|e", "{}|indent", "{}|map('string')|list",
               "{}|select|list", "{}|batch(2)|list", "{}|wordcount", "{}|capitalize", "-({})", "+({})",
               "not {}", "({})[0]", "({})[::-1]", "({})['a']", "({}).a", "({}).b.c", "({}).__class__", "({}).append(1)", "({}).strip()",
               "({}).split(',')", "({}).items()", "({}).get('a')", "({}).title()", "[{}]", "{{'k': {}}}",
               "{} is defined", "{} is string", "{} is mapping", "{} is sequence", "{} is iterable", "{} is number", "{} is integer",
               "{} is float", "{} is boolean", "{} is none", "{} is true", "{} is odd", "{} is lower", "{} is callable"]
        two = [f"({{}}) {op} ({{}})" for op in
               ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or")]
        conversation = {"messages": [], "kwargs": {}}
        for form in one:
            for a in values:
                self.check("{{ " + form.format(a) + " }}", conversation)
        for form in two:
            for a in values:
                for b in values:
                    if form.format(a, b) == "(-3) ** (1.5)":
                        continue  # the result is a complex number
                    self.check("{{ " + form.format(a, b) + " }}", conversation)

    def test_white_space(self):
        """Random sequences of text and tags with every whitespace-control sign."""
        pieces = ["\n", " ", "  ", "a", "\t", "{{ 1 }}", "{{- 1 }}", "{{ 1 -}}", "{# c #}", "{#- c -#}", "{#+ c +#}", "\r\n",
                  "{% set x = 1 %}", "{%- set x = 1 %}", "{% set x = 1 -%}", "{%+ set x = 1 +%}", "{% raw %} {{ r }} {% endraw %}",
                  "{%- raw -%} r {%- endraw -%}"]
        generator = random.Random(1)
        for _ in range(400):
            self.check("".join(generator.choices(pieces, k=8)), {"messages": [], "kwargs": {}})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
