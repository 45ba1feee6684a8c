#!/usr/bin/env python3
"""Times the gated delta rule of flash-linear-attention and FlashInfer, for the sizes of gated_delta_cuda_bench.

Prints a JSON object per line, like gated_delta_cuda_bench, so that both can run on one machine after each
other. The time is per call in a CUDA graph of several calls, median of 20 replays; decode steps rotate through
more states than the L2 holds. Parts that a kernel's time includes:

  fla rule          L2 norms of q and k, gates (decay and beta), the rule with f32 states; bf16 inputs, outputs
  fla layer         the same, the three convolutions with SiLU before it, the gated RMS norm after it
  flashinfer rule   decode: L2 norms, gates, the rule with f32 states; prefill: L2 norms and the rule, with
                    decay and beta already computed in f32; bf16 inputs, outputs

fp4moe's op has the parts of "fla layer", with f32 inputs. A kernel that cannot run prints its error.

Needs PyTorch with Triton, flash-linear-attention, fla-core and einops; flashinfer-python with
nvidia-cutlass-dsl is optional.

  python3 bench/gated_delta_peers.py [fla|flashinfer]...
"""
import json
import statistics
import sys

import torch

DIM, CONV_WIDTH, COLD_BYTES = 128, 4, 200_000_000
LAYERS = [("35B", 16, 32), ("397B", 16, 64), ("397B tp 8", 2, 8)]
SIZES = [(n, 1) for n in (1, 4, 16, 64, 256)] + [(1, t) for t in (512, 2048, 8192)] + [(8, 1024), (64, 128)]


def median_us(call, num_calls):
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            call(i)
    times = []
    for replay in range(-2, 20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 0:
            times.append(begin.elapsed_time(end) * 1000 / num_calls)
    return statistics.median(times)


class Case:
    """The inputs of one size; decode has several sets of states."""

    def __init__(self, key_heads, value_heads, sequences, rows):
        self.key_heads, self.value_heads, self.sequences, self.rows = key_heads, value_heads, sequences, rows
        state_bytes = sequences * value_heads * DIM * DIM * 4
        self.num_sets = max(2, COLD_BYTES // state_bytes + 1) if rows == 1 else 1

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, device="cuda").to(dtype)

        keys = (sequences, rows, key_heads, DIM)
        values = (sequences, rows, value_heads, DIM)
        self.q, self.k, self.v, self.z = normal(*keys), normal(*keys), normal(*values), normal(*values)
        self.a, self.b = normal(*values[:3]), normal(*values[:3])
        self.a_log, self.dt_bias = normal(value_heads, dtype=torch.float32), normal(value_heads, dtype=torch.float32)
        self.norm = normal(DIM, dtype=torch.float32)
        self.states = normal(self.num_sets, sequences, value_heads, DIM, DIM, dtype=torch.float32) * 0.1
        self.conv = {}
        for name, heads in (("q", key_heads), ("k", key_heads), ("v", value_heads)):
            weight = normal(heads * DIM, CONV_WIDTH) * 0.5
            self.conv[name] = weight, normal(self.num_sets, sequences, heads * DIM, CONV_WIDTH)


def fla_rule(case, q, k, v, index):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    rule = fused_recurrent_gated_delta_rule if case.rows == 1 else chunk_gated_delta_rule
    return rule(q, k, v, g=case.a, beta=case.b, initial_state=case.states[index % case.num_sets],
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=case.a_log,
                dt_bias=case.dt_bias, use_beta_sigmoid_in_kernel=True)[0]


def fla_layer(case, index):
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    outs = []
    for name in "qkv":
        x = getattr(case, name)
        flat = x.flatten(2)
        weight, caches = case.conv[name]
        cache = caches[index % case.num_sets]
        if case.rows == 1:
            y = causal_conv1d_update(flat, cache, weight=weight, activation="silu")
        else:
            y = causal_conv1d(flat, weight=weight, activation="silu", initial_state=cache, output_final_state=True)
        y = y[0] if isinstance(y, tuple) else y
        outs.append(y.view(x.shape))
    return rms_norm_gated(fla_rule(case, *outs, index), case.z, case.norm, None, eps=1e-6)


def flashinfer_rule(case):
    """Returns the call, and prepares its inputs."""
    if case.rows == 1:
        from flashinfer.gdn_decode import gated_delta_rule_decode
        out = torch.empty_like(case.v)
        return lambda i: gated_delta_rule_decode(
            case.q, case.k, case.v, case.states[i % case.num_sets], case.a_log, case.a, case.dt_bias, case.b,
            output=out)
    from flashinfer.gdn_prefill import chunk_gated_delta_rule
    decay = torch.exp(-case.a_log.exp() * torch.nn.functional.softplus(case.a.float() + case.dt_bias))
    beta = torch.sigmoid(case.b.float())
    starts = torch.arange(case.sequences + 1, device="cuda", dtype=torch.int32) * case.rows
    out, state = torch.empty_like(case.v).flatten(0, 1), torch.empty_like(case.states[0])
    return lambda i: chunk_gated_delta_rule(
        case.q.flatten(0, 1), case.k.flatten(0, 1), case.v.flatten(0, 1), decay.flatten(0, 1), beta.flatten(0, 1),
        initial_state=case.states[0], output_final_state=True, cu_seqlens=starts, use_qk_l2norm_in_kernel=True,
        output=out, output_state=state)


def kernels(case, peers):
    if "fla" in peers:
        yield "fla rule", lambda: lambda i: fla_rule(case, case.q, case.k, case.v, i)
        yield "fla layer", lambda: lambda i: fla_layer(case, i)
    if "flashinfer" in peers:
        yield "flashinfer rule", lambda: flashinfer_rule(case)


def main():
    peers = sys.argv[1:] or ["fla", "flashinfer"]
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for model, key_heads, value_heads in LAYERS:
        for sequences, rows in SIZES:
            case = Case(key_heads, value_heads, sequences, rows)
            for name, prepare in kernels(case, peers):
                line = {"kernel": name, "model": model, "value_heads": value_heads, "sequences": sequences,
                        "rows_each": rows}
                try:
                    with torch.no_grad():
                        line["us"] = round(median_us(prepare(), max(8, case.num_sets) if rows == 1 else 2), 2)
                except Exception as error:  # pylint: disable=broad-except  # of another project
                    line["error"] = f"{type(error).__name__}: {error}"[:300]
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
