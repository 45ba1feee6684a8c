"""Scores of a demo checkpoint behind an address, measured by `fp4moe eval`."""
import json
import os
import subprocess
import tempfile

FORMS = {"gsm8k": "gsm8k_form.jsonl", "gpqa": "gpqa_form.csv"}


def demo_scores(binary, models, url):
    """Returns the score of each form of questions by its name; models: the folder with the demos' questions."""
    scores = {}
    for name, data in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = os.path.join(folder, "report.json")
            subprocess.run([binary, "eval", "--base-url", url, "--eval-name", name, "--data-path",
                            os.path.join(models, "evals", data), "--num-threads", "64", "--max-tokens", "256",
                            "--output-json", report], check=True, stdout=subprocess.DEVNULL)
            with open(report) as file:
                scores[name] = json.load(file)["rounds"][0]["score"]
    return scores
