"""lm_eval: generate_until and loglikelihood tasks on a few questions, through local-completions."""
import os

os.environ["HF_HOME"] = os.getcwd()  # a temporary folder, for the copies of the questions

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from demo import URL  # noqa: E402

MODEL = os.environ["DEMO_MODEL"]
MODELS = os.path.dirname(MODEL)
ARGUMENTS = {"model": "demo", "base_url": URL + "/completions", "tokenizer": MODEL, "tokenizer_backend": "huggingface",
             "num_concurrent": 4, "max_length": 1024}
os.chdir(os.path.dirname(MODELS))  # the tasks name their files from there
tasks = TaskManager(include_path=os.path.join(MODELS, "evals", "lm_eval"))
for task, metric, with_template in (("gsm8k_form", "exact_match", True), ("gsm8k_form_choice", "acc", False)):
    results = simple_evaluate(model="local-completions", model_args=ARGUMENTS, tasks=[task], task_manager=tasks, limit=8,
                              apply_chat_template=with_template, log_samples=False, bootstrap_iters=0)["results"][task]
    scores = [value for name, value in results.items() if name.split(",")[0] == metric]
    assert scores and min(scores) >= 7 / 8, results
