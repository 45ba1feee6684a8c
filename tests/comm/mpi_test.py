"""The mpi fabric under mpirun: every operation, mismatches, and processes that die, stop or never start."""
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest

BINARY = os.path.abspath(sys.argv[1])
SKIPPED = 77  # CTest's SKIP_RETURN_CODE
DEADLINE = 3  # seconds; the deadline inside mpi_ranks
LAUNCH = 10   # seconds that mpirun itself can take on a busy machine


def command(processes, *args):
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(processes),
            BINARY, *map(str, args)]


def run(processes, *args, seconds=60):
    """Returns the exit code, all output, and the elapsed seconds."""
    begin = time.monotonic()
    done = subprocess.run(command(processes, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=seconds)
    return done.returncode, done.stdout, time.monotonic() - begin


class Job:
    """A background job with known process ids."""

    def __init__(self, processes, *args):
        self.job = subprocess.Popen(command(processes, *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    text=True)
        self.lines, self.pids = [], {}
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        end = time.monotonic() + LAUNCH
        while len(self.pids) < processes and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.5)  # lets the job enter the loop

    def read(self):
        for line in self.job.stdout:
            self.lines.append(line)
            if match := re.match(r"process (\d+) pid (\d+)", line):
                self.pids[int(match[1])] = int(match[2])

    def wait(self, seconds):
        """Returns the exit code, all output, and the seconds until the job ended."""
        begin = time.monotonic()
        try:
            self.job.wait(seconds)
        finally:
            self.job.kill()
        took = time.monotonic() - begin
        self.reader.join()
        self.job.stdout.close()
        return self.job.returncode, "".join(self.lines), took


class MpiTest(unittest.TestCase):
    def test_every_operation(self):
        for processes, ranks in ((1, 2), (2, 2), (2, 4), (4, 4), (4, 8)):
            with self.subTest(processes=processes, ranks=ranks):
                code, output, _ = run(processes, "all", ranks)
                self.assertEqual(code, 0, output)
                self.assertIn("\nok\n", "\n" + output)

    def test_tcp_between_processes(self):
        words = command(2, "all", 4)
        words[1:1] = ["--mca", "btl", "self,tcp"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_ranks_that_do_not_split(self):
        code, output, _ = run(2, "all", 3)
        self.assertEqual(code, 3)
        self.assertIn("tp=3 does not split evenly over the 2 processes of the launcher; nearest legal choice: --tp 4",
                      output)

    def test_configurations_that_differ(self):
        code, output, _ = run(2, "config", 2)
        self.assertEqual(code, 3)
        self.assertIn("disagree on the configuration: 'layers 4' on process 0, 'layers 5' on process 1", output)
        code, output, _ = run(2, "heap", 2)
        self.assertEqual(code, 3)
        self.assertRegex(output, r"processes \d and \d of the job disagree on heap_bytes: \d+ on process \d, \d+ on")

    def test_operations_that_differ(self):
        code, output, took = run(2, "disagree", 4)
        self.assertNotEqual(code, 0)
        self.assertRegex(output, r"the job ends: rank \d and rank \d disagree in epoch \d+ on op: (dispatch|combine)")
        self.assertLess(took, LAUNCH)

    def test_a_process_that_never_comes(self):
        code, output, took = run(3, "missing", 6)
        self.assertEqual(code, 3)
        self.assertRegex(output, r"process [01] waited 2 s in .*process 2 \(ranks 4 to 5\)")
        self.assertLess(took, 2 + LAUNCH)

    def test_a_process_that_is_killed(self):
        job = Job(2, "loop", 4, 60)
        os.kill(job.pids[1], signal.SIGKILL)
        code, output, took = job.wait(60)
        self.assertNotEqual(code, 0)
        self.assertLess(took, DEADLINE + 1)
        # A rank that enters its next operation after the death did not wait: it reports the process alone.
        self.assertRegex(output, r"the job ends: (rank [01] waited .* for rank ([23]|[01], which waits for rank [23],)"
                                 r" in (dispatch|go_on)|process 1 \(ranks 2 to 3\) ended unexpectedly)")
        code, output, _ = run(2, "all", 4)  # a restart works
        self.assertEqual(code, 0, output)

    def test_a_process_that_leaves(self):
        code, output, _ = run(2, "leave", 4)
        self.assertNotEqual(code, 0)
        self.assertRegex(output, r"for rank [23] in \w+.*: process 1 \(ranks 2 to 3\) ended unexpectedly")

    def test_a_stop_of_half_the_deadline(self):
        job = Job(2, "loop", 2, 4)
        os.kill(job.pids[1], signal.SIGSTOP)
        time.sleep(DEADLINE / 2)
        os.kill(job.pids[1], signal.SIGCONT)
        code, output, _ = job.wait(60)
        self.assertEqual(code, 0, output)
        self.assertIn("ok\n", output)

    def test_a_stop_beyond_the_deadline(self):
        job = Job(2, "loop", 2, 60)
        os.kill(job.pids[1], signal.SIGSTOP)
        code, output, took = job.wait(60)
        self.assertNotEqual(code, 0)
        # The deadline, a second for the error, and the second that mpirun gives a process to exit.
        self.assertLess(took, DEADLINE + 2.5)
        self.assertRegex(output, r"the job ends: rank 0 waited 3.\d s for rank 1 in .*, epoch \d+: expected signal \d+")

    def test_idle_ranks_leave_the_cores(self):
        code, output, _ = run(2, "idle", 4, 3)
        self.assertEqual(code, 0, output)
        for seconds in re.findall(r"cpu ([\d.]+)", output):
            self.assertLess(float(seconds), 0.6)  # 20 percent of 3 s; allows for interrupts on a busy machine


def run_one(name):
    done = subprocess.run([sys.executable, *sys.argv, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def run_all():
    """Runs each test in a separate process, three at a time because they mostly wait. Returns the exit code."""
    names = [f"MpiTest.{name}" for name in unittest.defaultTestLoader.getTestCaseNames(MpiTest)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run_one, names))
    for name, (code, output) in zip(names, results):
        print(f"{name}: {'ok' if code == 0 else 'FAILED'}\n{output if code != 0 else ''}", end="")
    return max(abs(code) for code, _ in results)


if __name__ == "__main__":
    if shutil.which("mpirun") is None or not os.path.exists(os.path.join(os.path.dirname(BINARY), "libfp4moe_mpi.so")):
        print("SKIPPED: no mpirun, or the MPI plug-in was not built: the fabric mpi is NOT tested", file=sys.stderr)
        sys.exit(SKIPPED)
    if len(sys.argv) > 2:
        unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
    sys.exit(run_all())
