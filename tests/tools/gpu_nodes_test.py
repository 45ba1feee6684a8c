"""Prefill nodes and decode nodes with several ranks on GPUs, in any layout on either side, and nodes with different
schemes on a GPU each.

  gpu_nodes_test.py BINARY MODELS_FOLDER [grammars] cuda

As disaggregation_test.py. The ranks of a node use all GPUs, or share them if there are too few; exit status 77
without a GPU.
"""
import contextlib
import os
import sys
import unittest

import disaggregation_test as nodes
from demo_scores import demo_scores
from disaggregation_test import BINARY, DSV3, GPTOSS, MODELS, QWEN35, Node, Router
from serve_process import environment, exit_without_gpu, num_gpus, ranks_share_gpus

TENSOR = ["--tp", "2"]
GROUPS = ["--tp", "2", "--dp", "2", "--enable-dp-attention"]
EXPERTS = ["--ep-size", "2"]


def one_gpu(number):
    """Lets a process use only one GPU: the one with this number, or the last one if there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible is not None else [str(gpu) for gpu in range(num_gpus())]
    return environment(CUDA_VISIBLE_DEVICES=gpus[min(number, len(gpus) - 1)])


class GpuNodes(unittest.TestCase):
    check_model = nodes.Disaggregation.check_model
    check_drafter = nodes.Disaggregation.check_drafter
    check_gpu_and_cpu = nodes.Disaggregation.check_gpu_and_cpu
    check_kill = nodes.Disaggregation.check_kill

    # With nodes.DEVICE, several ranks have the bits of one.
    def check_layouts(self, model):
        with ranks_share_gpus(2):
            for prefill, decode in ((TENSOR, GROUPS), ([*GROUPS, *EXPERTS, "--moe-a2a-backend", "deepep"], TENSOR),
                                    ([], GROUPS)):
                self.check_model(model, prefill, decode, flags=[])

    def test_windows(self):
        self.check_layouts(GPTOSS)

    def test_latents(self):
        self.check_layouts(DSV3)

    def test_states(self):
        self.check_layouts(QWEN35)

    def test_eight_bit_pages(self):
        fp8 = ["--kv-cache-dtype", "fp8_e4m3"]
        with ranks_share_gpus(2):
            for model in (GPTOSS, DSV3):
                self.check_model(model, [*TENSOR, *fp8], [*GROUPS, *fp8], flags=fp8)

    # Two ranks have each KV head, and the first of them sends it.
    def test_more_ranks_than_heads(self):
        with ranks_share_gpus(4):
            self.check_model(GPTOSS, ["--tp", "4"], [*TENSOR, *EXPERTS], flags=[])

    def test_draft_models(self):
        head = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{MODELS}/demo-gptoss-eagle3"]
        mtp = ["--speculative-algorithm", "EAGLE"]
        with ranks_share_gpus(2):
            for model, drafts in ((GPTOSS, head), (DSV3, mtp)):
                self.check_drafter(model, drafts, [*drafts, *TENSOR, *EXPERTS], 2.5, *GROUPS, *EXPERTS)

    def test_a_node_on_a_cpu(self):
        with ranks_share_gpus(2):
            for flags in (TENSOR, GROUPS):
                self.check_gpu_and_cpu(*flags)

    def test_a_killed_prefill_node(self):
        with ranks_share_gpus(2):
            self.check_kill("prefill", TENSOR, GROUPS)

    def test_a_killed_decode_node(self):
        with ranks_share_gpus(2):
            self.check_kill("decode", TENSOR, GROUPS)

    # Each node has a GPU, if there are two.
    def test_prefill_with_w4a8_and_decode_with_w4a16(self):
        for model in (GPTOSS, DSV3):
            with contextlib.ExitStack() as stack:
                pair = []
                for number, (role, scheme) in enumerate((("prefill", "w4a8"), ("decode", "w4a16"))):
                    with one_gpu(number):
                        pair.append(stack.enter_context(Node(role, model, "--fp4-compute", scheme, "--max-total-tokens", "16384")))
                router = stack.enter_context(Router(pair[:1], pair[1:]))
                scores = demo_scores(BINARY, MODELS, router.url)
                print(f"{model}: {scores}")
                self.assertGreaterEqual(min(scores.values()), 0.98)
                nodes.print_rates(pair[1])


if __name__ == "__main__":
    exit_without_gpu(BINARY, GPTOSS)
    unittest.main(argv=sys.argv[:1], verbosity=2)
