"""Starts `fp4moe serve` on a free port and stops it; sends requests and waits for conditions in server tests."""
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

NO_DEVICE = 3  # exit status of a command if the machine lacks the device
SKIPPED = 77  # exit status of a skipped test


def num_gpus():
    """The number of GPUs that the driver shows to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def exit_without_gpu(binary, model):
    """Ends the test as skipped, with the reason, if `--device cuda` is not available."""
    probe = subprocess.run([binary, "plan", model, "--device", "cuda"], capture_output=True, text=True)
    if probe.returncode == NO_DEVICE:
        print("SKIPPED:", probe.stderr.strip())
        sys.exit(SKIPPED)


@contextlib.contextmanager
def environment(**variables):
    """Sets variables of the environment, also for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def ranks_share_gpus(ranks):
    """Lets as many ranks share a GPU as there are too few GPUs for."""
    return environment(FP4MOE_RANKS_PER_GPU=str(-(-ranks // num_gpus())))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def read_metrics(text):
    """Returns gauges and counters by name without the prefix."""
    return {name: float(value) for name, value in re.findall(r"^(?:\w+:)?(\w+)\{[^}]*\} (\S+)$", text, re.M)}


def metrics(url):
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)) as connection:
        connection.request("GET", "/metrics")
        return read_metrics(connection.getresponse().read().decode())


def metric(url, name):
    return metrics(url)[name]


def eventually(condition, seconds=20):
    """Whether the condition becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class Serve:
    """with Serve(binary, model) as s: ... s.url ...; s.exit_code is set afterwards. s.lines is the output so far."""

    def __init__(self, binary, model, *flags, launcher=()):
        place = [] if "--host" in flags else ["--host", "127.0.0.1"]
        self.command = [*launcher, binary, "serve", model, *place, "--port", "0", *flags]

    def __enter__(self):
        self.lines = []
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"endpoints: (http://\S+?:\d+)/", line)
            if found:
                self.url = found.group(1)
            if "The server is fired up and ready to roll!" in line:
                # Read continuously, so that the process never blocks on a full pipe.
                self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
                self.reader.start()
                return self
        raise RuntimeError(f"serve ended with {self.process.wait()}:\n" + "".join(self.lines))

    def status(self, name):
        """A number from /proc/PID/status, such as Threads or VmRSS (KiB)."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))

    def num_descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.finish()

    def kill(self):
        self.process.kill()
        self.finish()

    def finish(self):
        """Waits for the process to end; kills it after 60 s."""
        try:
            self.exit_code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.reader.join()
            self.process.stdout.close()
