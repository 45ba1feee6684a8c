"""guidellm: a benchmark of 5 seconds with two concurrent streams."""
import json
import os
import subprocess
import sys

from demo import QUESTION, URL

with open("prompts.jsonl", "w") as file:
    for k in range(5000):
        file.write(json.dumps({"prompt": f"{k}. {QUESTION}"}) + "\n")
target = f"kind=openai_http,target={URL.removesuffix('/v1')},api_key={os.environ['OPENAI_API_KEY']},model=demo"
subprocess.run([os.path.join(os.path.dirname(sys.executable), "guidellm"), "run", "--backend", target,
                "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_duration,seconds=5",
                "--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=report.json",
                "--disable-console"], check=True)
with open("report.json") as file:
    requests = json.load(file)["benchmarks"][0]["metrics"]["request_totals"]
assert requests["successful"] > 0 and requests["errored"] == 0, requests
