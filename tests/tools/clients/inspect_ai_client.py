"""inspect-ai: an evaluation of two questions through each of its providers that have OpenAI's or Anthropic's API."""
import os

from inspect_ai import Task, eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

from demo import QUESTION, URL

os.environ["DEMO_BASE_URL"], os.environ["DEMO_API_KEY"] = URL, os.environ["OPENAI_API_KEY"]  # of openai-api/demo
task = Task(dataset=[Sample(input=QUESTION, target="14"), Sample(input=QUESTION, target="no such text")],
            solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=120))
for model in ("openai/demo", "openai-api/demo/demo", "anthropic/demo"):
    log, = evaluate(task, model=model, display="none")
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 0.5, log.results
