"""SGLang's flags and variables: each is accepted, or refused quickly and with the right message."""
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
USAGE, UNSUPPORTED, SELF_TEST = 2, 3, 5  # exit codes

# name, flags, exit code, required text of the line. Refused before any weight is read.
REFUSED = [
    ("speculation", "--speculative-algorithm DFLASH", UNSUPPORTED, "DFLASH", "nearest legal choice: --speculative-algorithm NGRAM"),
    ("draft model", f"--speculative-draft-model-path {MODEL}", UNSUPPORTED, "--speculative-draft-model-path", "STANDALONE"),
    ("no draft model", "--speculative-algorithm STANDALONE", USAGE, "STANDALONE", "--speculative-draft-model-path DIR"),
    ("draft steps", "--speculative-algorithm NGRAM --speculative-num-steps 3", UNSUPPORTED, "--speculative-num-steps 3",
     "--speculative-num-draft-tokens 4"),
    ("draft tree", f"--speculative-algorithm STANDALONE --speculative-draft-model-path {MODEL} --speculative-eagle-topk 4",
     UNSUPPORTED, "--speculative-eagle-topk 4", "--speculative-eagle-topk 1"),
    ("draft threshold", "--speculative-accept-threshold-single 0.5", UNSUPPORTED, "--speculative-accept-threshold-single 0.5"),
    ("draft breadth", "--speculative-ngram-max-bfs-breadth 10", UNSUPPORTED, "--speculative-ngram-max-bfs-breadth 10"),
    ("deep_gemm", "--moe-runner-backend deep_gemm", UNSUPPORTED, "deep_gemm", "nearest legal choice: --moe-runner-backend"),
    ("triton", "--moe-runner-backend triton", UNSUPPORTED, "triton_kernel"),
    ("cutlass", "--moe-runner-backend cutlass", UNSUPPORTED, "flashinfer_cutlass"),
    ("unknown runner", "--moe-runner-backend fast", USAGE, "'fast'", "flashinfer_cutedsl"),
    ("mooncake", "--moe-a2a-backend mooncake", UNSUPPORTED, "mooncake", "nearest legal choice: --moe-a2a-backend deepep"),
    ("nixl", "--moe-a2a-backend nixl", UNSUPPORTED, "nixl", "--moe-a2a-backend deepep"),
    ("unknown a2a", "--moe-a2a-backend carrier-pigeon", USAGE, "'carrier-pigeon'", "deepep"),
    ("normal mode", "--moe-a2a-backend deepep --deepep-mode normal", UNSUPPORTED, "low_latency dispatch (masked layout)",
     "--deepep-mode low_latency"),
    ("unknown mode", "--deepep-mode fast", USAGE, "--deepep-mode fast", "low_latency"),
    ("int8 rows", "--moe-a2a-backend deepep --deepep-dispatcher-output-dtype int8", UNSUPPORTED, "int8", "bf16, fp8, nvfp4"),
    ("unknown rows", "--deepep-dispatcher-output-dtype fp3", USAGE, "fp3", "bf16, fp8, nvfp4"),
    ("FP8 weights", "--quantization fp8", UNSUPPORTED, "quantization=fp8", "--quantization auto"),
    ("unknown weights", "--quantization fp3", USAGE, "--quantization fp3", "mxfp4"),
    ("MXFP4 under w4a4", "--fp4-compute w4a4", UNSUPPORTED, "w4a4", "w4a16"),
    ("NVFP4 runner, MXFP4 weights", "--moe-runner-backend flashinfer_cutedsl", UNSUPPORTED, "flashinfer_cutedsl", "nearest legal"),
    ("uneven dp", "--tp 4 --dp 3", UNSUPPORTED, "dp=3", "tp=4"),
    ("ep in between", "--tp 4 --ep-size 2", UNSUPPORTED, "ep=2", "--ep"),
    ("flashinfer with few groups", "--tp 4 --ep 4 --dp 2 --enable-dp-attention --moe-a2a-backend flashinfer", UNSUPPORTED, "dp"),
    ("two nodes", "--nnodes 2", UNSUPPORTED, "--nnodes 2", "mpirun"),
    ("pipeline", "--pp-size 2", UNSUPPORTED, "--pipeline-parallel-size 2", "--tp"),
    ("unknown node", "--disaggregation-mode both", USAGE, "--disaggregation-mode both", "null, prefill, decode"),
    ("RDMA", "--disaggregation-ib-device mlx5_0", UNSUPPORTED, "--disaggregation-ib-device", "TCP"),
    ("W4A8 by precision", "--flashinfer-mxfp4-moe-precision fp8", UNSUPPORTED, "--fp4-compute w4a8"),
    ("unknown precision", "--flashinfer-mxfp4-moe-precision fp3", USAGE, "fp3", "default, bf16"),
    ("E5M2 KV cache", "--kv-cache-dtype fp8_e5m2", UNSUPPORTED, "fp8_e5m2", "auto"),
    ("unknown dense weights", "--dense-quant q4", USAGE, "--dense-quant q4", "none, q8, fp8"),
    ("unknown test", "--self-test slow", USAGE, "slow", "fast, full, off"),
    ("given twice: the last counts", "--dense-quant q3 --dense-quant q4", USAGE, "--dense-quant q4", "none, q8, fp8"),
    ("given twice by two names", "--tp 4 --tp-size 3 --dp 2", UNSUPPORTED, "dp=2", "tp=3"),
    ("no time to wait", "--comm-timeout 0", USAGE, "--comm-timeout", "above 0"),
    ("no memory for rows", "--a2a-memory-budget 0", USAGE, "--a2a-memory-budget 0", "1 to"),
    ("metrics prefix with a space", ["--metrics-prefix", "a b"], USAGE, "--metrics-prefix", "'a b'", "letters, digits"),
    ("metrics prefix with a digit", "--metrics-prefix 9x:", USAGE, "--metrics-prefix", "'9x:'", "letters, digits"),
    ("hexadecimal number", "--port 0x10", USAGE, "--port: '0x10' must be a decimal integer"),
    ("fraction in a list", "--cuda-graph-bs 1 2.5", USAGE, "--cuda-graph-bs: '2.5' must be a decimal integer"),
    ("octal number", "--log-requests-level 010", USAGE, "--log-requests-level: Value 10 not in range 0 to 3;"),
    ("negative interval", "--decode-log-interval -1", USAGE, "--decode-log-interval: Value -1 must be at least 0;"),
    ("negative time", "--drain-timeout -1", USAGE, "--drain-timeout: Value -1 not in range 0 to 1000000;"),
    ("negative tuning", "--autotune-budget -1", USAGE, "--autotune-budget", "0 and 3600"),
]

VARIABLES = [  # with --moe-a2a-backend deepep
    ("SGLANG_MOE_NVFP4_DISPATCH", "maybe", "0 or 1"),
    ("SGLANG_DEEPEP_BF16_DISPATCH", "2", "0 or 1"),
    ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "1025", "1 and 1024"),
    ("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "x", "0 or 1"),
]

MOOT = ("--device cpu --trust-remote-code --attention-backend trtllm_mla --cuda-graph-max-bs 256 --disable-cuda-graph --enable-cache-report "
        "--disable-shared-experts-fusion --enable-metrics --moe-dense-tp-size 1 --deepep-config {} "
        "--disable-flashinfer-autotune --disable-flashinfer-cutlass-moe-fp4-allgather --flashinfer-mxfp4-moe-precision bf16 "
        "--nnodes 1 --pp 1 --disaggregation-mode null --cuda-graph-bs 1 2 4 --dtype auto").split()


def serve(*flags, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "FP4MOE_"))}
    return subprocess.Popen([BINARY, "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**environment, **variables})


class Flags(unittest.TestCase):
    def refused(self, flags, code, *words, **variables):
        # A folder with a configuration but no weights: these refusals come before weights are opened.
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.join(MODEL, "config.json"), os.path.join(folder, "config.json"))
            start = time.monotonic()
            with serve(folder, "--port", "0", *flags, **variables) as process:
                _, error = process.communicate(timeout=20)
            seconds = time.monotonic() - start
        self.assertEqual(process.returncode, code, (flags, error))
        self.assertRegex(error, r"\Aerror: [^\n]*\n\Z")
        for word in words:
            self.assertIn(word, error)
        self.assertLess(seconds, 1, flags)

    def test_refused(self):
        for name, flags, code, *words in REFUSED:
            with self.subTest(name):
                self.refused(flags.split() if isinstance(flags, str) else flags, code, *words)

    def test_listed_values_are_those_that_the_engine_accepts(self):
        text = subprocess.run([BINARY, "serve", "--help-all"], capture_output=True, text=True, check=True).stdout
        listed = re.findall(r"(?m)^  (--[\w-]+)\S* TEXT:\{([^}]*)\}", text)
        self.assertGreater(len(listed), 15)
        for flag, values in listed:
            with self.subTest(flag):
                self.refused([flag, "no-such-value"], USAGE, "no-such-value", *values.split(","))

    def test_variables(self):
        for name, value, *words in VARIABLES:
            with self.subTest(name):
                self.refused(["--moe-a2a-backend", "deepep"], USAGE, f"{name}={value}", *words, **{name: value})

    def test_every_flag_is_a_variable(self):
        for name, value, word in [("FP4MOE_DTYPE", "float16", "--dtype float16"), ("FP4MOE_COMM_TIMEOUT", "0", "--comm-timeout"),
                                  ("FP4MOE_FP4_ACT_SCALES", "fast", "--fp4-act-scales fast")]:
            with self.subTest(name):
                self.refused([], USAGE, word, **{name: value})

    def log_until_ready(self, *flags):
        with serve(MODEL, "--port", "0", *flags) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "ready to roll" in line:
                    break
            process.terminate()
            _, error = process.communicate(timeout=20)
        self.assertIn("ready to roll", "".join(lines), error)
        return "".join(lines)

    def test_self_test_passes_on_a_sound_checkpoint(self):
        for how, experts in [("fast", "4 experts of 1 layers"), ("full", "64 experts of 4 layers")]:
            self.assertIn(f"self-test {how}: {experts}", self.log_until_ready("--self-test", how))
        self.assertNotIn("self-test", self.log_until_ready("--self-test", "full", "--self-test", "off"))

    def test_self_test_refuses_a_checkpoint_that_computes_no_numbers(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in os.listdir(MODEL):
                os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
            weights = os.path.join(folder, "model.safetensors")
            with open(weights, "rb") as file:
                data = bytearray(file.read())
            size = struct.unpack("<Q", data[:8])[0]
            scales = json.loads(data[8:8 + size])["model.layers.1.mlp.experts.down_proj_scales"]
            experts, rows, blocks = scales["shape"]
            at = 8 + size + scales["data_offsets"][0] + 3 * rows * blocks  # expert 3
            data[at:at + rows * blocks] = b"\xfe" * (rows * blocks)  # 2^127 is valid, but sums overflow float32
            os.remove(weights)
            with open(weights, "wb") as file:
                file.write(data)
            with serve(folder, "--port", "0", "--self-test", "full") as process:
                _, error = process.communicate(timeout=20)
        self.assertEqual(process.returncode, SELF_TEST, error)
        self.assertRegex(error, r"\Aerror: self-test failed: layer 1: expert 3 run by \S+ \(w4a16\) differs from the oracle by "
                                r"values that are not finite; budget 3.00e-03 relative L2\n\Z")

    def test_moot_flags_are_said_and_served(self):
        log = self.log_until_ready(*MOOT)
        for flag in ("--trust-remote-code", "--attention-backend trtllm_mla", "--cuda-graph-max-bs 256", "--disable-cuda-graph",
                     "--enable-cache-report", "--disable-shared-experts-fusion", "--enable-metrics",
                     "--moe-dense-tp-size 1", "--deepep-config {}", "--cuda-graph-bs 1 2 4"):
            self.assertEqual(len(re.findall(re.escape(f" {flag} is ignored: it ") + "[^\n]{10,}\n", log)), 1, (flag, log))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
