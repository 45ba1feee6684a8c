"""Random texts of the grammars of JSON schemas are values of the schemas, and schemas that cannot be enforced
are refused by path. pydantic_schemas.json was written by Pydantic 2.14 (TypeAdapter.json_schema());
other_schemas.json has schemas in the style of OpenAI's guide and of zod-to-json-schema, and hard cases.
Usage: schema_texts_test.py SCHEMA_TEXTS"""
import json
import pathlib
import subprocess
import sys

import jsonschema

FOLDER = pathlib.Path(__file__).parent
RAW = ("Check failed", "parsing error", "is not supported", "ongoing")  # xgrammar's messages


def draft_2020(schema):
    """Drafts before 2020-12 have the items of a tuple under `items`."""
    if not isinstance(schema, dict) or not isinstance(schema.get("items"), list):
        return schema
    return {**schema, "prefixItems": schema["items"], "items": schema.get("additionalItems", True)}


def has_order(value, schema):
    """Whether the members of objects are in the order of inline `properties`."""
    if isinstance(value, dict) and isinstance(schema, dict):
        names = list(schema.get("properties", {}))
        found = [n for n in value if n in names]
        return found == [n for n in names if n in value] and all(has_order(v, schema.get("properties", {}).get(n)) for n, v in value.items())
    return True


def check(name, entry, result):
    path = entry.get("refused")
    if path is not None:
        message = result.get("error", "")
        assert message.startswith(path), f"{name}: {message!r} does not start with {path}"
        assert not any(raw in message for raw in RAW), f"{name}: {message}"
        return 0
    assert "error" not in result, f"{name} is refused: {result['error']}"
    validator = jsonschema.Draft202012Validator(draft_2020(entry["schema"]))
    assert len(result["texts"]) >= 10, f"{name}: only {len(result['texts'])} texts end"
    for latin in result["texts"]:
        try:
            text = latin.encode("latin1").decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue  # [^...] also allows bytes that are not UTF-8, which tokens of a real vocabulary rarely form
        try:
            value = json.loads(text)
            validator.validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{name}: {text!r}: {str(error).splitlines()[0]}") from error
        assert has_order(value, entry["schema"]), f"{name}: the order of {text}"
    return len(result["texts"])


def main():
    entries = {}
    for file in ("pydantic_schemas.json", "other_schemas.json"):
        entries |= json.loads((FOLDER / file).read_text())
    lines = "".join(json.dumps(entry["schema"]) + "\n" for entry in entries.values())
    run = subprocess.run([sys.argv[1]], input=lines, capture_output=True, text=True, timeout=600, check=True)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == len(entries), f"{len(results)} results for {len(entries)} schemas"
    texts = sum(check(name, entry, result) for (name, entry), result in zip(entries.items(), results))
    refused = sum("refused" in entry for entry in entries.values())
    print(f"{len(entries)} schemas, {refused} refused by path, {texts} texts are values of their schemas")


if __name__ == "__main__":
    main()
