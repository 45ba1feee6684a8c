"""Measures the task accuracy of every legal row of the MoE table with `fp4moe serve` and `fp4moe eval`.

  accuracy_matrix.py BINARY MODELS_FOLDER sample           # in CI: a few rows, 16 questions each
  accuracy_matrix.py BINARY MODELS_FOLDER matrix --output scores.json [--fabrics threads,mpi] [--jobs N]
  accuracy_matrix.py BINARY MODELS_FOLDER named --output scores.json

matrix: every runner x a2a x ranks for each format, 64 questions in one form. named: 24 rows, all questions
in both forms. A row below LEAST_SCORE fails the run. The output is the table in docs/backends.md.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
sys.dont_write_bytecode = True
from serve_process import Serve  # noqa: E402

LEAST_SCORE = 0.98
NVFP4, MXFP4, DELTA = "demo-dsv3-nvfp4", "demo-gptoss-mxfp4", "demo-qwen35-nvfp4"
RUNNERS = {
    NVFP4: ["flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_trtllm", "marlin", "auto"],
    MXFP4: ["flashinfer_mxfp4", "triton_kernel", "marlin", "auto"],
}
# A row of the output has the columns of the table in docs/backends.md.
COLUMNS = ("model", "runner", "a2a", "tp", "ep", "dp", "fabric", "flags", "form", "questions", "score")
FORMS = {"gsm8k": "gsm8k_form.jsonl", "gpqa": "gpqa_form.csv"}
DP = ["--enable-dp-attention", "--enable-dp-lm-head"]


def row(model, runner, a2a, tp, ep, dp=1, fabric="threads", flags=()):
    return {"model": model, "runner": runner, "a2a": a2a, "tp": tp, "ep": ep, "dp": dp,
            "fabric": "local" if tp == 1 and fabric == "threads" else fabric, "flags": list(flags)}


def matrix(fabrics):
    """Every combination that must be legal; DP attention on every second multi-rank row."""
    for fabric in fabrics:
        for model, runners in RUNNERS.items():
            for runner in runners:
                yield row(model, runner, "none", 1, 1, fabric=fabric)
                yield row(model, runner, "deepep", 1, 1, fabric=fabric)
                yield row(model, runner, "flashinfer", 1, 1, fabric=fabric)
                for tp in (2, 4):
                    yield row(model, runner, "none", tp, 1, dp=1 if tp == 2 else 2, fabric=fabric)
                    yield row(model, runner, "none", tp, tp, dp=tp if tp == 2 else 1, fabric=fabric)
                    yield row(model, runner, "deepep", tp, tp, dp=1 if tp == 2 else tp, fabric=fabric)
                    yield row(model, runner, "flashinfer", tp, tp, dp=tp if tp == 2 else 1, fabric=fabric)


def named():
    """Every runner name, protocol and payload at least once, on four ranks. With --dp 4, some ranks are
    sometimes idle."""
    deepep, flashinfer = "--deepep-dispatcher-output-dtype", "--flashinfer-dispatcher-output-dtype"
    yield row(NVFP4, "auto", "none", 4, 1)
    yield row(NVFP4, "marlin", "none", 4, 4)
    yield row(NVFP4, "flashinfer_cutedsl", "none", 4, 1)
    yield row(NVFP4, "flashinfer_cutedsl", "none", 4, 4, dp=4)
    yield row(NVFP4, "flashinfer_cutedsl", "deepep", 4, 4, dp=4, flags=[deepep, "bf16"])
    yield row(NVFP4, "flashinfer_cutedsl", "deepep", 4, 4, dp=4, flags=[deepep, "nvfp4"])
    yield row(NVFP4, "flashinfer_cutedsl", "flashinfer", 4, 4, dp=4, flags=[flashinfer, "nvfp4"])
    yield row(NVFP4, "flashinfer_cutlass", "flashinfer", 4, 4, dp=4, flags=[flashinfer, "bf16"])
    yield row(NVFP4, "flashinfer_cutlass", "none", 4, 4, dp=4)
    yield row(NVFP4, "flashinfer_trtllm", "deepep", 4, 4, dp=2, flags=[deepep, "fp8"])
    yield row(NVFP4, "flashinfer_trtllm", "none", 4, 1, dp=2)
    yield row(NVFP4, "auto", "flashinfer", 4, 4, flags=["--enable-deterministic-inference"])
    yield row(NVFP4, "auto", "deepep", 4, 4, dp=4, flags=["--fp4-compute", "w4a8"])
    yield row(NVFP4, "auto", "none", 4, 4, flags=["--fp4-compute", "w4a4", "--fp4-act-scales", "per_token"])
    yield row(MXFP4, "flashinfer_mxfp4", "none", 4, 1)
    yield row(MXFP4, "triton_kernel", "none", 4, 4, dp=4)
    yield row(MXFP4, "marlin", "deepep", 4, 4, dp=4, flags=[deepep, "fp8"])
    yield row(MXFP4, "auto", "flashinfer", 4, 4, dp=4, flags=["--flashinfer-combine-dtype", "fp8"])
    yield row(MXFP4, "auto", "deepep", 4, 4, dp=4, flags=["--fp4-compute", "w4a8"])
    yield row(DELTA, "auto", "none", 1, 1)
    yield row(DELTA, "auto", "none", 4, 4)
    yield row(DELTA, "auto", "deepep", 4, 4, dp=4)
    yield row(DELTA, "auto", "flashinfer", 4, 4, dp=4, flags=["--fp4-compute", "w4a8"])
    yield row(NVFP4, "flashinfer_cutedsl", "deepep", 4, 4, dp=4, fabric="mpi", flags=[deepep, "nvfp4"])


def sample():
    yield row(NVFP4, "flashinfer_cutedsl", "deepep", 4, 4, dp=4, flags=["--deepep-dispatcher-output-dtype", "nvfp4"])
    yield row(NVFP4, "flashinfer_cutlass", "flashinfer", 2, 2, dp=2)
    yield row(MXFP4, "flashinfer_mxfp4", "none", 4, 4)
    for model in (MXFP4, NVFP4):
        for quant in ("q8", "fp8"):
            yield row(model, "auto", "none", 1, 1, flags=["--dense-quant", quant])
    yield row(MXFP4, "auto", "none", 2, 1, flags=["--dense-quant", "q8"])
    yield row(DELTA, "auto", "none", 1, 1)
    yield row(DELTA, "auto", "deepep", 4, 4, dp=4)


def describe(r):
    return (f"{r['model']} {r['runner']} a2a={r['a2a']} tp={r['tp']} ep={r['ep']} dp={r['dp']} {r['fabric']} "
            + " ".join(r["flags"])).rstrip()


def serve_flags(r):
    flags = ["--moe-runner-backend", r["runner"], "--moe-a2a-backend", r["a2a"], "--tp", str(r["tp"]), "--ep-size",
             str(r["ep"]), "--dp", str(r["dp"]), "--fabric", r["fabric"], "--max-total-tokens", "16384", *r["flags"]]
    return flags + (DP if r["dp"] > 1 else [])


def launcher(r):
    if r["fabric"] != "mpi":
        return []
    # Two processes with half the ranks each, to use both in-process and MPI transfers.
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(min(2, r["tp"]))]


def score(binary, models, r, form, questions):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        flags = serve_flags(r)
        with Serve(binary, os.path.join(models, r["model"]), *flags, launcher=launcher(r)) as serve:
            subprocess.run([binary, "eval", "--base-url", serve.url, "--eval-name", form, "--data-path",
                            os.path.join(models, "evals", FORMS[form]), "--num-examples", str(questions), "--num-threads",
                            "32", "--max-tokens", "256", "--output-json", report], check=True, capture_output=True, text=True)
        with open(report) as file:
            answers = json.load(file)["rounds"][0]
    return {**r, "form": form, "questions": len(answers["answers"]), "score": answers["score"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("models")
    parser.add_argument("rows", choices=["sample", "matrix", "named"])
    parser.add_argument("--output")
    parser.add_argument("--fabrics", default="threads,mpi")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--commit", default="")
    a = parser.parse_args()
    if a.rows == "matrix":
        # Alternate the forms, so that half of the rows run each.
        tasks = [(r, list(FORMS)[i % 2], 64) for i, r in enumerate(matrix(a.fabrics.split(",")))]
    elif a.rows == "named":
        tasks = [(r, form, 256) for r in named() for form in FORMS]
    else:
        tasks = [(r, list(FORMS)[i % 2], 16) for i, r in enumerate(sample())]
    if shutil.which("mpirun") is None:
        skipped = [t for t in tasks if t[0]["fabric"] == "mpi"]
        tasks = [t for t in tasks if t[0]["fabric"] != "mpi"]
        if skipped:
            print(f"SKIPPED {len(skipped)} rows of fabric mpi: mpirun is not installed", flush=True)
    results, failed = [], []
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        futures = {pool.submit(score, a.binary, a.models, *task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            r, form, _ = futures[future]
            try:
                result = future.result()
                results.append(result)
                ok = result["score"] >= LEAST_SCORE
                print(f"{'ok    ' if ok else 'BELOW '} {result['score']:.3f} of {result['questions']} {form}: {describe(r)}",
                      flush=True)
            except Exception as error:  # noqa: BLE001: report the row, continue with the others
                ok = False
                print(f"FAILED {form}: {describe(r)}: {error}", flush=True)
            if not ok:
                failed.append((r, form))
    results.sort(key=lambda x: (describe(x), x["form"]))
    if a.output:
        with open(a.output, "w") as file:
            head = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "machine": platform.machine(),
                    "commit": a.commit}
            rows = [json.dumps([x[column] for column in COLUMNS], separators=(",", ":")) for x in results]
            file.write(json.dumps(head, separators=(",", ":"))[:-1] + ',"rows":[\n' + ",\n".join(rows) + "]}\n")
    print(f"{len(results)} of {len(tasks)} rows ran, {len(failed)} failed; lowest score "
          f"{min((x['score'] for x in results), default=0):.3f}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
