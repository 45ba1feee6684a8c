"""SGLang users' command lines, with the demos instead of their models and 4 ranks instead of 8.

  reference_commands_test.py BINARY DEMO [cuda]

With cuda, the ranks share the machine's GPUs evenly; the exit status is 77 if there is no usable GPU.
"""
import json
import os
import sys
import unittest
import urllib.request

from serve_process import Serve, exit_without_gpu, num_gpus

BINARY, MODEL = map(os.path.abspath, sys.argv[1:3])
ON_GPUS = sys.argv[3:] == ["cuda"]
NVFP4 = os.path.join(os.path.dirname(MODEL), "demo-dsv3-nvfp4")
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"

DEEPSEEK = ("--tensor-parallel-size 4 --cuda-graph-max-bs 256 --max-running-requests 256 --mem-fraction-static 0.85 --ep-size {} "
            "--moe-runner-backend flashinfer_cutedsl --quantization modelopt_fp4")
DP = "--quantization modelopt_fp4 --tp 4 --ep-size 4 --dp 4 --enable-dp-attention --enable-dp-lm-head"
# name, model, flags, variables, required text of a CPU's log.
COMMANDS = [
    ("cutedsl, EP 1", NVFP4, DEEPSEEK.format(1), {}, ["--cuda-graph-max-bs 256 is ignored", "flashinfer_cutedsl is w4a4"]),
    ("cutedsl, EP 4", NVFP4, DEEPSEEK.format(4), {}, ["flashinfer_cutedsl is w4a4"]),
    ("cutedsl over flashinfer", NVFP4,
     DP + " --moe-runner-backend flashinfer_cutedsl --moe-a2a-backend flashinfer --max-prefill-tokens 4096", {},
     ["--flashinfer-dispatcher-output-dtype auto selects nvfp4: w4a4 quantises the rows anyway"]),
    ("cutedsl over deepep", NVFP4, "--moe-runner-backend flashinfer_cutedsl --moe-a2a-backend deepep --tp 4", {},
     ["--ep-size 1 is raised to --tp-size 4", "--deepep-mode auto is low_latency"]),
    ("cutedsl over deepep, low latency", NVFP4,
     "--moe-runner-backend flashinfer_cutedsl --moe-a2a-backend deepep --deepep-mode low_latency", {}, []),
    ("mxfp4", MODEL, "--tp 4 --moe-runner-backend flashinfer_mxfp4", {}, ["flashinfer_mxfp4 is w4a16"]),
    ("cutlass, NVFP4 before the wire", NVFP4,
     DP + " --moe-a2a-backend flashinfer --moe-runner-backend flashinfer_cutlass", {"SGLANG_MOE_NVFP4_DISPATCH": "1"},
     ["--flashinfer-dispatcher-output-dtype auto selects nvfp4: SGLANG_MOE_NVFP4_DISPATCH=1"]),
]


class ReferenceCommands(unittest.TestCase):
    def test_serve(self):
        for name, model, flags, variables, words in COMMANDS:
            if ON_GPUS:
                flags, words = "--device cuda " + flags, []
                variables = variables | {"FP4MOE_RANKS_PER_GPU": str(-(-4 // num_gpus()))}
            with self.subTest(name):
                os.environ.update(variables)
                try:
                    with Serve(BINARY, model, *flags.split()) as server:
                        body = json.dumps({"model": os.path.basename(model), "max_tokens": 8, "temperature": 0,
                                           "messages": [{"role": "user", "content": PROMPT}]})
                        request = urllib.request.Request(server.url + "/v1/chat/completions", body.encode(),
                                                         {"Content-Type": "application/json"})
                        with urllib.request.urlopen(request, timeout=60) as answer:
                            text = json.load(answer)["choices"][0]["message"]["content"]
                finally:
                    for variable in variables:
                        del os.environ[variable]
                log = "".join(server.lines)
                self.assertTrue(text.strip(), log)
                self.assertEqual(server.exit_code, 0, log)
                for word in words:
                    self.assertIn(word, log)


if __name__ == "__main__":
    if ON_GPUS:
        exit_without_gpu(BINARY, MODEL)
    unittest.main(argv=sys.argv[:1], verbosity=2)
