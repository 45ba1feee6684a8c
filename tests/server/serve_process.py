"""Starts `fp4moe serve` on a free port and ends it again."""
import re
import signal
import subprocess
import sys

NO_DEVICE = 3  # a command's exit status where the machine has no such device
SKIPPED = 77  # a test's


def exit_without_gpu(binary, model):
    """Ends the test as skipped, saying why, where `--device cuda` is not to be had."""
    probe = subprocess.run([binary, "plan", model, "--device", "cuda"], capture_output=True, text=True)
    if probe.returncode == NO_DEVICE:
        print("SKIPPED:", probe.stderr.strip())
        sys.exit(SKIPPED)


class Serve:
    """with Serve(binary, model) as s: ... s.url ...; afterwards s.exit_code and s.lines."""

    def __init__(self, binary, model, *flags, launcher=()):
        place = [] if "--host" in flags else ["--host", "127.0.0.1"]
        self.command = [*launcher, binary, "serve", model, *place, "--port", "0", *flags]
        self.lines = []

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"endpoints: (http://\S+?:\d+)/", line)
            if found:
                self.url = found.group(1)
            if "The server is fired up and ready to roll!" in line:
                return self
        raise RuntimeError(f"serve ended with {self.process.wait()}:\n" + "".join(self.lines))

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.lines += self.process.stdout.read().splitlines(keepends=True)
        self.process.stdout.close()
        self.exit_code = self.process.wait(timeout=60)
