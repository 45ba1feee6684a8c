"""If an allocation fails at any point of the start, the program prints one error line and exits; it never crashes."""
import json
import os
import resource
import subprocess
import sys
import tempfile
import unittest

BINARY, MODEL = sys.argv[1:3]
FLAG_SETS = [[], ["--tp", "4", "--ep-size", "4", "--dp", "2", "--enable-dp-attention"],
             ["--tp", "2", "--moe-a2a-backend", "deepep"]]


def limited(command, megabytes):
    limit = megabytes << 20
    return subprocess.run(command, capture_output=True, text=True, timeout=60,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))


def least_limit():
    """Returns the MiB that the system's loader needs to start the program. Errors below it are the loader's."""
    return next(m for m in range(16, 160, 2) if limited([BINARY, "--version"], m).returncode == 0)


class MemoryLimit(unittest.TestCase):
    def run_with(self, megabytes, flags, folder):
        ids = os.path.join(folder, "ids.json")
        with open(ids, "w") as file:
            json.dump([1, 2, 3], file)
        command = [BINARY, "logits", MODEL, "--input-ids", ids, "--output", os.path.join(folder, "out"),
                   "--threads", "2", "--max-total-tokens", "64", *flags]
        return limited(command, megabytes)

    def test_every_step(self):
        for flags in FLAG_SETS:
            codes = set()
            with tempfile.TemporaryDirectory() as folder:
                for megabytes in [*range(least_limit(), 160, 6), *range(160, 1200, 80)]:
                    done = self.run_with(megabytes, flags, folder)
                    what = f"{megabytes} MiB, {flags}: {done.returncode} {done.stderr}"
                    codes.add(done.returncode)
                    self.assertIn(done.returncode, (0, 1, 4), what)
                    self.assertEqual(done.returncode != 0, "error: " in done.stderr, what)
                    self.assertLessEqual(len(done.stderr.splitlines()), 2, what)
            self.assertIn(0, codes, flags)
            self.assertGreater(len(codes), 1, "no limit was low enough")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
