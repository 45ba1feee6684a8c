"""Two processes with a GPU each: with the deterministic flag, their logits have the bits of one process with two GPUs,
over NVLink and over NCCL's sockets, and so have their texts; without it, the norms after sums run in other kernels, and
logits and log-probabilities are near them. A killed process ends the job by name.

  gpu_processes_test.py BINARY MODELS_FOLDER [flags of unittest]

The exit status is 77 unless there are two usable GPUs, mpirun, and the MPI plug-in next to the binary.
"""
import array
import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from urllib.parse import urlsplit

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
sys.dont_write_bytecode = True
from serve_process import Serve, exit_without_gpu, num_gpus  # noqa: E402

BINARY, MODELS = sys.argv[1:3]
DEADLINE = 5.0  # seconds that a rank waits for another
IDS = [(37 * i + 11) % 500 for i in range(96)]
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# A process sees one GPU: its own, or one that all processes see.
PROCESS = ["sh", "-c", 'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK exec "$0" "$@"']
SAME_GPU = ["sh", "-c", 'CUDA_VISIBLE_DEVICES=0 exec "$0" "$@"']
LAYOUTS = [["--tp", "2", "--ep-size", "1"], ["--tp", "2", "--ep-size", "2"],
           ["--tp", "2", "--moe-a2a-backend", "deepep"], ["--tp", "2", "--moe-a2a-backend", "flashinfer"],
           ["--tp", "2", "--tp-reduce-dtype", "bfloat16"]]
DETERMINISTIC = ["--enable-deterministic-inference"]
NEAR = 5e-3  # relative L2 difference of logits
NEAR_LOGPROB = 0.05  # difference of log-probabilities
PROMPTS = ["a", "The answer is", "7 + 5 =", "1 2 3 4 5 6"]
GROUPS = [["--tp", "2", "--dp", "2", "--enable-dp-attention", "--moe-a2a-backend", a2a]
          for a2a in ("none", "deepep", "flashinfer")]


def mpirun(env, process=PROCESS, count=2):
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(count)]
    for name, value in env.items():
        words += ["-x", f"{name}={value}"]
    return words + process


def logits(model, flags, launcher=()):
    """The bytes of the logits' values."""
    with tempfile.TemporaryDirectory() as folder:
        ids, out = os.path.join(folder, "ids.json"), os.path.join(folder, "out.safetensors")
        with open(ids, "w") as file:
            json.dump(IDS, file)
        done = subprocess.run([*launcher, BINARY, "logits", os.path.join(MODELS, model), "--device", "cuda", *flags,
                               "--input-ids", ids, "--output", out], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=180)
        if done.returncode != 0:
            raise AssertionError(done.stdout)
        with open(out, "rb") as file:
            data = file.read()
    length, = struct.unpack("<Q", data[:8])
    return data[8 + length:]


def relative_l2(actual, expected):
    """The relative difference of two byte strings of float32."""
    pairs = list(zip(array.array("f", actual), array.array("f", expected), strict=True))
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / sum(b * b for _, b in pairs))


def largest_difference(tokens, others):
    """Returns the largest difference between the log-probabilities of two greedy answers, (id, log-probability) per
    token, up to the first token that differs: until then, both have the same context, and a token that differs is
    nearly as likely as the other one."""
    largest = 0
    for (id, logprob), (other_id, other) in zip(tokens, others):
        largest = max(largest, abs(logprob - other))
        if id != other_id:
            break
    return largest


def post(url, path, body):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def generate(url, prompt, tokens, **more):
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, **more}
    return post(url, "/generate", body)


def keep_busy(url):
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        while generate(url, "a", 120)[0] == 200:
            pass


class Processes(Serve):
    """serve in two processes, or `count`."""

    def __init__(self, model, env, *flags, count=2):
        super().__init__(BINARY, os.path.join(MODELS, model), "--device", "cuda", "--max-total-tokens", "4096",
                         "--max-running-requests", "8", "--comm-timeout", str(DEADLINE), *flags)
        self.command = [*mpirun(env, count=count), *self.command]

    def pids(self):
        """By process number."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = dict(v.split(b"=", 1) for v in file.read().split(b"\0") if b"=" in v)
                if (b"OMPI_COMM_WORLD_RANK" in variables and
                        os.readlink(f"/proc/{pid}/exe") == os.path.realpath(BINARY)):
                    found[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(pid)
        return found

    def __exit__(self, *_):
        os.kill(self.pids()[0], signal.SIGTERM)
        self.finish()


class GpuProcesses(unittest.TestCase):
    def check_logits(self, model, flags, env, expected):
        """expected: one process's logits for each list of further flags."""
        for more, values in zip(([], DETERMINISTIC), expected):
            actual = logits(model, [*flags, *more], mpirun(env))
            if more:
                self.assertEqual(actual, values)
                continue
            difference = relative_l2(actual, values)
            print(f"{model} {' '.join(flags)} {env}: {difference:.1e}")
            self.assertLess(difference, NEAR)

    def test_logits_are_those_of_one_process(self):
        for model in ("demo-gptoss-mxfp4", "demo-dsv3-nvfp4"):
            for flags in LAYOUTS:
                # The deterministic flag sends no partial sums, so it refuses their type.
                further = [[]] if "--tp-reduce-dtype" in flags else [[], DETERMINISTIC]
                expected = [logits(model, [*flags, *more]) for more in further]
                for env in ({}, SOCKETS):
                    with self.subTest(model=model, flags=flags, env=env):
                        self.check_logits(model, flags, env, expected)

    def answers(self, serve):
        """Ends the server. Returns its answers to PROMPTS: text, and (id, log-probability) per token."""
        found = []
        with serve:
            for prompt in PROMPTS:
                status, answer = generate(serve.url, prompt, 24, return_logprob=True)
                self.assertEqual(status, 200, answer)
                tokens = answer["meta_info"]["output_token_logprobs"]
                found.append((answer["text"], [(id, logprob) for logprob, id, *_ in tokens]))
        self.assertEqual(serve.exit_code, 0, serve.lines)
        return found

    def answers_of_both(self, flags):
        """Returns the answers of two processes and those of one."""
        model = "demo-gptoss-mxfp4"
        one = Serve(BINARY, os.path.join(MODELS, model), "--device", "cuda", "--max-running-requests", "8", *flags)
        return self.answers(Processes(model, {}, *flags)), self.answers(one)

    def test_texts_are_those_of_one_process(self):
        for layout in [*LAYOUTS[:2], *GROUPS]:
            flags = [*layout, *DETERMINISTIC]
            with self.subTest(flags=flags):
                two, one = self.answers_of_both(flags)
                self.assertEqual([text for text, _ in two], [text for text, _ in one])

    def test_tokens_of_groups_are_nearly_as_likely_as_those_of_one_process(self):
        for flags in GROUPS:
            with self.subTest(flags=flags):
                for (_, two), (_, one) in zip(*self.answers_of_both(flags), strict=True):
                    self.assertEqual(len(two), len(one))
                    self.assertLess(largest_difference(two, one), NEAR_LOGPROB)

    def test_unsupported_flags_are_refused_by_name(self):
        model = "demo-gptoss-mxfp4"
        for flags, process, part in (
                (["--tp", "2"], SAME_GPU, "ranks 0 and 1 have the same GPU"),
                (["--tp", "4"], PROCESS, "legal choice: --tp 2"),
                (["--tp", "2", "--speculative-algorithm", "NGRAM"], PROCESS, "choice: --speculative-algorithm none"),
                (["--tp", "2", "--moe-a2a-backend", "deepep", "--enable-eplb"], PROCESS, "legal choice: one process"),
                (GROUPS[0], PROCESS, "legal choice: --dp 1")):
            with self.subTest(flags=flags), self.assertRaises(AssertionError) as raised:
                logits(model, flags, mpirun({}, process))
            self.assertIn(part, str(raised.exception))

    def test_unsupported_requests_are_refused_and_the_server_goes_on(self):
        model = "demo-gptoss-mxfp4"
        with Processes(model, {}, "--tp", "2") as serve:
            status, answer = post(serve.url, "/update_weights_from_disk", {"model_path": os.path.join(MODELS, model)})
            self.assertEqual(status, 400, answer)
            self.assertIn("legal choice: restart the server", json.dumps(answer))
            status, answer = generate(serve.url, "a", 4, return_routed_experts=True)
            self.assertEqual(status, 400, answer)
            self.assertIn("--fabric mpi", json.dumps(answer))
            self.assertEqual(generate(serve.url, "a", 4)[0], 200)
        self.assertEqual(serve.exit_code, 0, serve.lines)

    def check_kill(self, killed, env, count):
        serve = Processes("demo-gptoss-mxfp4", env, "--tp", str(count), count=count)
        serve.__enter__()
        threads = [threading.Thread(target=keep_busy, args=(serve.url,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        os.kill(serve.pids()[killed], signal.SIGKILL)
        began = time.monotonic()
        serve.finish()
        self.assertLess(time.monotonic() - began, DEADLINE + 1)
        self.assertNotEqual(serve.exit_code, 0)
        for thread in threads:
            thread.join()
        self.assertTrue([line for line in serve.lines if f"rank {killed}" in line], serve.lines)

    def test_a_killed_process_ends_the_job_by_name(self):
        for killed in (0, 1):
            for env in ({}, SOCKETS):
                with self.subTest(killed=killed, env=env):
                    self.check_kill(killed, env, 2)

    def test_a_killed_process_of_four_ends_the_job_by_name(self):
        if num_gpus() < 4:
            self.skipTest("needs four GPUs")
        for killed, env in ((0, {}), (2, {}), (3, SOCKETS)):
            with self.subTest(killed=killed, env=env):
                self.check_kill(killed, env, 4)


if __name__ == "__main__":
    exit_without_gpu(BINARY, os.path.join(MODELS, "demo-gptoss-mxfp4"))
    plugin = os.path.join(os.path.dirname(BINARY), "libfp4moe_mpi.so")
    if num_gpus() < 2 or shutil.which("mpirun") is None or not os.path.exists(plugin):
        print("SKIPPED: this test needs two GPUs, mpirun and libfp4moe_mpi.so")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
