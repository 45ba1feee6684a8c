"""fp4moe bench peak, moe and latency on a CPU: the content and consistency of their JSON. The test does not
judge speed."""
import json
import os
import subprocess
import sys
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
QUICK = "--device cpu -r 5 --cold-mib 16 --json".split()


def bench(*flags, isa=None):
    environment = dict(os.environ, **({"FP4MOE_ISA": isa} if isa else {}))
    ended = subprocess.run([BINARY, "bench", *flags, *QUICK], capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


class Peak(unittest.TestCase):
    def test_one_thread_and_all(self):
        report = bench("peak", "-t", "2")
        self.assertEqual([row["threads"] for row in report["rows"]], [1, 2])
        self.assertEqual(report["read_bytes"], 16 << 20)
        self.assertIn("2 of ", report["machine"])
        for row in report["rows"]:
            self.assertGreaterEqual(row["read_gbps"], row["read_gbps_median"])
            self.assertGreater(row["read_gbps_median"], 0)
            self.assertIn(f"widest dots {row['dots'][0]['isa']},", report["machine"])
            for dot in row["dots"]:
                for kind in ("bf16", "int8") if dot["isa"] == "cpu_amx" else ("f32", "bf16", "int8"):
                    self.assertTrue(dot[kind + "_instruction"])
                    self.assertGreaterEqual(dot[kind + "_gflops"], dot[kind + "_gflops_median"])
                    self.assertGreater(dot[kind + "_gflops_median"], 0)

    def test_one_thread_is_one_row(self):
        self.assertEqual([row["threads"] for row in bench("peak", "-t", "1")["rows"]], [1])

    def test_isa_lowers_what_is_measured(self):
        report = bench("peak", "-t", "1", isa="scalar")
        self.assertEqual([dot["isa"] for dot in report["rows"][0]["dots"]], ["cpu_scalar"])


class Moe(unittest.TestCase):
    def check(self, row, tokens, active):
        calls = 1 + -(-240_000_000 // (8 * 3 * 2048 * 768 * (17 / 32 if row["format"] == "mxfp4" else 9 / 16)))  # 20 MB each
        self.assertEqual((row["shape"], row["tokens"], row["device"], row["calls"], row["threads"]),
                         ("qwen3_30b", tokens, "cpu", calls, 2))
        self.assertEqual(row["active_experts"], active)
        weights = 3 * 2048 * 768
        self.assertAlmostEqual(row["flops"], tokens * 8 * weights * 2)
        bits = 4.25 if row["format"] == "mxfp4" else 4.5
        self.assertAlmostEqual(row["bytes"], active * weights * bits / 8)
        self.assertGreaterEqual(row["read_gbps"], row["read_gbps_slower"])
        roofline = max(row["bytes"] / row["read_gbps"], row["flops"] / row["dot_gflops"]) * 1e-3
        self.assertAlmostEqual(row["roofline_us"] / roofline, 1)
        self.assertAlmostEqual(row["multiple"], row["us"] / roofline)
        self.assertAlmostEqual(row["fraction"] * row["multiple"], 1)
        self.assertTrue(row["us_p10"] <= row["us"] <= row["us_p90"])

    def test_rows(self):
        rows = bench("moe", "--shape", "qwen3_30b", "--tokens", "1,3", "--routing", "onehot", "-t", "2")
        self.assertEqual(len(rows), 2)
        self.check(rows[0], 1, 8)
        self.check(rows[1], 3, 8)
        self.assertTrue(rows[0]["kernels"].startswith("cpu_"))

    def test_int8_and_nvfp4(self):
        row, = bench(*"moe --shape qwen3_30b --tokens 1 --routing onehot --format nvfp4 --fp4-compute w4a8 -t 2".split())
        self.check(row, 1, 8)
        self.assertEqual((row["format"], row["scheme"]), ("nvfp4", "w4a8"))


class Latency(unittest.TestCase):
    def run_json(self, *command):
        ended = subprocess.run([BINARY, *command, "--json", "--disable-autotune"], capture_output=True, text=True, timeout=300)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        return json.loads(ended.stdout)

    def test_fraction_of_the_limit(self):
        decode_bytes = self.run_json("plan", MODEL)["weight_bytes_per_token"]
        rows = self.run_json("bench", "latency", MODEL, *"-t 2 -p 64 -n 4 -b 1,8 -r 1 --cold-mib 16".split())
        self.assertEqual([row["test"] for row in rows], ["pp64", "tg4", "pp64 x8", "tg4 x8"])
        for row in rows:
            self.assertAlmostEqual(row["fraction"], row["avg_ts"] / row["limit_ts"])
        reads = [row["read_gbps"] * 1e9 / decode_bytes for row in rows]  # without sharing weight reads
        self.assertLessEqual(rows[1]["limit_ts"], reads[1] * 1.001)
        self.assertLessEqual(rows[3]["limit_ts"], reads[3] * 8 * 1.001)
        self.assertGreater(rows[0]["limit_ts"], 0)

    def test_depth(self):
        rows = self.run_json("bench", "latency", MODEL, *"-t 2 -p 0 -n 4 -d 0,40 -b 1,2 -r 1 --cold-mib 16".split())
        self.assertEqual([row["test"] for row in rows], ["tg4", "tg4 @ d40", "tg4 x2", "tg4 x2 @ d40"])
        self.assertEqual([row["n_depth"] for row in rows], [0, 40, 0, 40])
        ended = subprocess.run([BINARY, "bench", "latency", MODEL, *"-t 2 -p 0 -n 4 -d 1000000 -r 1 --cold-mib 16".split()],
                               capture_output=True, text=True, timeout=300)
        self.assertEqual(ended.returncode, 4)  # does not fit in memory
        self.assertIn("1000000", ended.stderr)

    def test_rows_have_the_layout_of_the_ranks(self):
        flags = "-t 2 -p 0 -n 4 -r 1 --cold-mib 16 --tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep".split()
        row, = self.run_json("bench", "latency", MODEL, *flags)
        self.assertEqual([row[key] for key in ("n_tp", "n_dp", "a2a")], [2, 2, "deepep"])
        ended = subprocess.run([BINARY, "bench", "latency", MODEL, *flags], capture_output=True, text=True, timeout=300)
        self.assertIn(", tp 2, dp 2, deepep |", ended.stdout, ended.stderr)

    def test_decode_is_timed_with_the_whole_batch(self):
        """Requests that decode while other requests still prefill do not end before the measured time ends."""
        flags = "-t 2 -p 0 -n 4 -d 100 -b 1,4 -r 1 --cold-mib 16 --max-prefill-tokens 64 --chunked-prefill-size 64"
        rows = self.run_json("bench", "latency", MODEL, *flags.split())
        self.assertEqual([row["n_together"] for row in rows], [1, 4])
        cramped = self.run_json("bench", "latency", MODEL, *flags.split(), "--max-total-tokens", "256", "--context-length", "128")
        self.assertLess(cramped[1]["n_together"], 4)

    def test_beside_busy(self):
        rows = self.run_json("bench", "latency", MODEL, *"-t 2 -p 0 -n 4 -r 3 --cold-mib 16 --beside-busy 2".split())
        self.assertEqual([row["test"] for row in rows], ["tg4", "tg4 beside 2 busy"])
        self.assertEqual([row["n_busy"] for row in rows], [0, 2])
        alone, beside = [sorted(row["samples_ts"])[1] for row in rows]
        self.assertEqual(rows[0]["of_alone"], 1)
        self.assertAlmostEqual(rows[1]["of_alone"], beside / alone)

    def test_table(self):
        ended = subprocess.run([BINARY, "bench", "latency", MODEL, *"-t 1 -p 0 -n 2 -r 1 --cold-mib 16".split()],
                               capture_output=True, text=True, timeout=300)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        header, rule, row = [line for line in ended.stdout.splitlines() if line.startswith("|")]
        self.assertIn("| read GB/s | limit t/s | of the limit |", header)
        self.assertEqual(header.count("|"), rule.count("|"))
        self.assertEqual(header.count("|"), row.count("|"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
