"""Writes a .json next to each template: Jinja2's result for every conversation in conversations.json."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from chat_template_jinja2_test import render  # noqa: E402

folder = pathlib.Path(__file__).resolve().parent
conversations = json.loads((folder / "conversations.json").read_text())
for template in sorted(folder.glob("*.jinja")):
    texts = [render(template.read_text(), conversation) for conversation in conversations]
    template.with_suffix(".json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
