"""`fp4moe serve` on several ranks, in one process and under mpirun, gives the same text as one rank and handles a
killed or stopped process."""
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from urllib.parse import urlsplit

from serve_process import Serve, metrics

BINARY, MODEL = sys.argv[1:3]
LIMITS = ["--max-total-tokens", "512", "--max-running-requests", "8", "--self-test", "off"]
DP = ["--tp", "4", "--ep-size", "4", "--dp", "4", "--enable-dp-attention", "--moe-a2a-backend", "deepep"]
PLACED = [*DP, "--enable-eplb", "--ep-num-redundant-experts", "4"]  # experts move between the ranks
DEADLINE = 3.0  # seconds that a rank waits for another
PROMPTS = ["Tom has 3 apples and buys 4.", "a", "The answer is", "7 + 5 =", "1 2 3 4 5 6"]
MPIRUN = shutil.which("mpirun")
needs_mpi = unittest.skipUnless(MPIRUN, "mpirun is not installed: NOT TESTED")


def launched(processes, command):
    """The command in `processes` processes under mpirun; one process runs without mpirun."""
    if processes == 1:
        return command
    return [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(processes), *command]


class Ranks(Serve):
    """Serve in `processes` processes under mpirun; one process runs without mpirun."""

    def __init__(self, processes, *flags):
        super().__init__(BINARY, MODEL, *LIMITS, "--comm-timeout", str(DEADLINE), "--threads", "4", *flags)
        self.command = launched(processes, self.command)
        self.processes = processes

    def __exit__(self, *_):
        if self.processes == 1:
            return super().__exit__()
        os.kill(ranks_of(self.process)[0], signal.SIGTERM)  # mpirun itself would exit with the signal's code
        self.finish()


def post(url, path, body):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def generate(url, prompt, tokens=24, **more):
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}, **more}
    return post(url, "/generate", body)


def texts(url, prompts=PROMPTS):
    """Generates for all prompts concurrently, so that they are spread over the groups. Returns the texts and the
    log-probabilities of their tokens."""
    answers = [None] * len(prompts)

    def ask(i):
        answer = generate(url, prompts[i], return_logprob=True, top_logprobs_num=4)[1]
        answers[i] = [answer["text"], answer["meta_info"]["output_top_logprobs"]]
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def refused(url, path):
    """The answer of a server that fails, or None if it ends the connection."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        return post(url, path, {})
    return None


def keep_busy(url):
    """Sends requests until the server fails. Several such threads keep a step running at all times."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        while generate(url, "a", 120)[0] == 200:
            pass


def ranks_of(launcher):
    """Returns the process ids of the engine's processes by process number."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{pid}/environ", "rb") as environ:
                variables = dict(v.split(b"=", 1) for v in environ.read().split(b"\0") if b"=" in v)
        except (OSError, ValueError):
            continue
        rank = variables.get(b"OMPI_COMM_WORLD_RANK")
        if parent == launcher.pid and rank is not None:
            found[int(rank)] = int(pid)
    return found


class Parallel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with Serve(BINARY, MODEL, *LIMITS, "--moe-a2a-backend", "deepep") as serve:
            cls.alone = texts(serve.url)

    def check(self, processes, flags=DP):
        with Ranks(processes, *flags) as serve:
            self.assertEqual(texts(serve.url), self.alone)
            self.assertEqual(sum("ready to roll" in line for line in serve.lines), 1)
        self.assertEqual(serve.exit_code, 0)

    def test_threads(self):
        self.check(1)

    @needs_mpi
    def test_two_processes(self):
        self.check(2)

    @needs_mpi
    def test_two_processes_with_drafts(self):
        self.check(2, (*DP, "--speculative-algorithm", "NGRAM"))

    @needs_mpi
    def test_two_processes_with_a_draft_model(self):
        self.check(2, (*DP, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", MODEL))

    @needs_mpi
    def test_logits_of_two_processes_are_those_of_one(self):
        with tempfile.TemporaryDirectory() as folder:
            ids, outputs = os.path.join(folder, "ids.json"), []
            with open(ids, "w", encoding="utf-8") as file:
                json.dump(list(range(1, 40)), file)
            for processes in (1, 2):
                output = os.path.join(folder, f"{processes}.safetensors")
                command = [BINARY, "logits", MODEL, "--device", "cpu", *DP, "--input-ids", ids, "--output", output]
                done = subprocess.run(launched(processes, command), capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                with open(output, "rb") as file:
                    outputs.append(file.read())
            self.assertEqual(*outputs)

    @needs_mpi
    def test_ranks_in_several_processes_do_not_report_experts(self):
        with Ranks(2, *DP) as serve:
            status, answer = generate(serve.url, "a", return_routed_experts=True)
            self.assertEqual(status, 400)
            self.assertIn("return_routed_experts: ranks in other processes (--fabric mpi)", answer["error"]["message"])
            self.assertEqual(generate(serve.url, "a")[0], 200)

    @needs_mpi
    def test_four_processes(self):
        self.check(4)

    @needs_mpi
    def test_a_killed_process_ends_the_job_by_name_and_a_restart_answers_the_same(self):
        serve = Ranks(2, *DP)
        serve.__enter__()
        threads = [threading.Thread(target=keep_busy, args=(serve.url,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        os.kill(ranks_of(serve.process)[1], signal.SIGKILL)
        killed = time.monotonic()
        serve.finish()
        self.assertLess(time.monotonic() - killed, DEADLINE + 1)
        self.assertNotEqual(serve.exit_code, 0)
        for thread in threads:
            thread.join()
        self.assertTrue([line for line in serve.lines if "ranks 2 to 3" in line and "op " in line], serve.lines)
        self.check(2)

    @needs_mpi
    def test_rebalances_under_load_in_two_processes(self):
        with Ranks(2, *PLACED, "--eplb-rebalance-num-iterations", "3") as serve:
            for _ in range(3):
                thread = threading.Thread(target=lambda: answers.extend(texts(serve.url)))
                answers, moves = [], []
                thread.start()
                while thread.is_alive():
                    status, moved = post(serve.url, "/rebalance_experts", {})
                    self.assertEqual(status, 200, moved)
                    moves.append(moved)
                thread.join()
                self.assertEqual(answers, self.alone)
            now = metrics(serve.url)
            self.assertGreater(now["eplb_rebalances_total"], len(moves))  # some were due by themselves
            self.assertGreater(now["eplb_moved_experts_total"], 0)
            self.assertGreater(now["eplb_moved_bytes_total"], 0)
            self.assertEqual(now["eplb_rebalance_seconds_count"], now["eplb_rebalances_total"])
            self.assertEqual((now["num_failed_requests_total"], now["num_aborted_requests_total"]), (0, 0))
        self.assertEqual(serve.exit_code, 0)

    @needs_mpi
    def test_a_process_killed_during_a_rebalance_ends_the_job_by_name(self):
        serve = Ranks(2, *PLACED, "--eplb-rebalance-num-iterations", "0")
        serve.__enter__()
        texts(serve.url)
        pid = ranks_of(serve.process)[1]
        os.kill(pid, signal.SIGSTOP)  # its ranks then take no part in the rebalance
        moves = []
        thread = threading.Thread(target=lambda: moves.append(refused(serve.url, "/rebalance_experts")))
        thread.start()
        time.sleep(0.5)
        self.assertEqual(moves, [])
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        serve.finish()
        thread.join()
        self.assertLess(time.monotonic() - killed, DEADLINE + 1)
        self.assertNotEqual(serve.exit_code, 0)
        self.assertTrue([line for line in serve.lines if "ranks 2 to 3" in line], serve.lines)
        status, answer = moves[0] or (503, {"error": {"message": "ranks 2 to 3"}})  # the job may end before the answer
        self.assertEqual(status, 503)
        self.assertIn("ranks 2 to 3", answer["error"]["message"])

    @needs_mpi
    def test_a_process_stopped_for_half_the_deadline_is_waited_for(self):
        with Ranks(2, *DP) as serve:
            pid = ranks_of(serve.process)[1]
            answers = []
            thread = threading.Thread(target=lambda: answers.extend(texts(serve.url)))
            thread.start()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(DEADLINE / 2)
            os.kill(pid, signal.SIGCONT)
            thread.join()
            self.assertEqual(answers, self.alone)
        self.assertEqual(serve.exit_code, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
