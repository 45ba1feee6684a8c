"""Every subcommand reports output that stdout did not take; a closed pipe is no error."""
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
FAILURE, UNSUPPORTED = 1, 3  # exit codes
COMMANDS = [["inspect", MODEL], ["inspect", MODEL, "--json"], ["plan", MODEL, "--device", "cpu"], ["backends"],
            ["backends", "--json"], ["doctor", "--json"], ["completion", "bash"], ["manual", "--markdown"], ["--help"], ["--version"],
            ["serve", "--help-all"], ["run", MODEL, "--prompt", "Hello", "--device", "cpu", "--max-tokens", "4"]]


def no_bytes():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


class StandardStreams(unittest.TestCase):
    def failure(self, command, reason, **how):
        done = subprocess.run([BINARY, *command], stderr=subprocess.PIPE, text=True, timeout=60, **how)
        self.assertEqual((done.returncode, done.stderr.splitlines()[-1:]),
                         (FAILURE, [f"error: cannot write all output to stdout: {reason}"]), command)

    def test_a_file_takes_no_bytes(self):
        for command in COMMANDS:
            with self.subTest(command), tempfile.TemporaryFile() as file:
                self.failure(command, "File too large", stdout=file, preexec_fn=no_bytes)

    def test_a_full_device(self):
        with tempfile.TemporaryDirectory() as folder:
            full = os.path.join(folder, "full")
            try:
                os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
                device = open(full, "wb")
            except PermissionError:
                self.skipTest("device nodes cannot be created or opened")
            with device:
                for command in COMMANDS:
                    with self.subTest(command):
                        self.failure(command, "No space left on device", stdout=device)

    def test_stdout_is_closed(self):
        for command in COMMANDS:
            with self.subTest(command):
                self.failure(command, "Bad file descriptor", preexec_fn=lambda: os.close(1))

    def test_other_errors_keep_their_exit_codes(self):
        done = subprocess.run([BINARY, "plan", MODEL, "--quantization", "fp8"], stderr=subprocess.PIPE, text=True,
                              timeout=60, preexec_fn=lambda: os.close(1))
        self.assertEqual(done.returncode, UNSUPPORTED, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, "nothing was printed, so nothing was lost")

    def test_a_closed_pipe_is_quiet(self):
        for ignored, code in [(False, -signal.SIGPIPE), (True, 0)]:
            reader, writer = os.pipe()
            os.close(reader)
            done = subprocess.run([BINARY, "inspect", MODEL, "--json"], stdout=writer, stderr=subprocess.PIPE, text=True,
                                  timeout=60, restore_signals=not ignored)  # Python ignores SIGPIPE
            os.close(writer)
            self.assertEqual((done.returncode, done.stderr), (code, ""))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
