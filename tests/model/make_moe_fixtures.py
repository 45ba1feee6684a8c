"""Makes the fixtures of tests/model/fixtures for all families but gpt_oss: tiny random checkpoints with the stock
class's logits.

Each fixture is a folder with config.json, safetensors in a native FP4 dialect or in bf16, and expected.safetensors:
ids I64 [T], logits_w4a16 F32 [T, V], computed in float32 by transformers' class on the dequantised weights, and for NVFP4 also
logits_w4a4, for which the inputs of all FP4 layers go through the NVFP4 rule of docs/formats.md with the calibrated
input scales (routed experts: the layer's largest). FP8 layers have unquantised inputs. Needs torch, transformers >= 5 and safetensors; a CPU is enough.

    python3 make_moe_fixtures.py OUTPUT_FOLDER [NAME...]
"""
import contextlib
import fnmatch
import json
import pathlib
import sys
import types

import torch
import transformers
from safetensors.torch import save_file
from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM,
                          Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, Kimi_K25Config, Kimi_K25ForConditionalGeneration,
                          Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM,
                          Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM,
                          Qwen3NextConfig, Qwen3NextForCausalLM, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)

from fixture_files import save_shards

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLT_MAX = torch.finfo(torch.float32).max
NUM_SEEDS = 64  # the seed whose routing is farthest from a tie is used

# The families, and what of their checkpoints the stock class does not write. `text_prefix` is that of the published
# tensors; `extra` are tensors that a reader must skip; `float32` are tensors that are stored so. With `centered_norms`
# a norm's factor is 1 + weight, except in the delta net.
VISION_OF_QWEN = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, num_position_embeddings=4,
                      deepstack_visual_indexes=[0])
VISION_OF_QWEN3_5 = {k: v for k, v in VISION_OF_QWEN.items() if k != "deepstack_visual_indexes"}
VISION_OF_KIMI = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2,
                      pos_emb_height=2, pos_emb_width=2, pos_emb_time=2)
QWEN_MTP = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight")
QWEN3_5_FLOAT32 = ("A_log", "linear_attn.norm.weight")
FAMILIES = {
    "glm4_moe": dict(classes=(Glm4MoeConfig, Glm4MoeForCausalLM), has_mtp=True),
    "glm4_moe_lite": dict(classes=(Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM), has_mtp=True),
    "kimi_k2": dict(classes=(DeepseekV3Config, DeepseekV3ForCausalLM), json=dict(model_type="kimi_k2")),
    "qwen3_vl_moe": dict(classes=(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration), vision=VISION_OF_QWEN,
                         text_prefix="model.language_model.", extra=("model.visual.patch_embed.proj.bias",
                                                                     "model.visual.merger.norm.weight")),
    "kimi_k25": dict(classes=(Kimi_K25Config, Kimi_K25ForConditionalGeneration), vision=VISION_OF_KIMI,
                     text_prefix="language_model.", text_json=dict(model_type="kimi_k2"),
                     json=dict(architectures=["KimiK25ForConditionalGeneration"]),
                     extra=("vision_tower.patch_embed.proj.bias", "mm_projector.proj.0.bias")),
    "qwen3_next": dict(classes=(Qwen3NextConfig, Qwen3NextForCausalLM), centered_norms=True, extra=QWEN_MTP),
    "qwen3_5_moe": dict(classes=(Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration), vision=VISION_OF_QWEN3_5,
                        text_prefix="model.language_model.", centered_norms=True, float32=QWEN3_5_FLOAT32,
                        text_json=dict(attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
                                       mtp_use_dedicated_embeddings=False),
                        extra=QWEN_MTP + ("model.visual.patch_embed.proj.bias", "model.visual.merger.norm.weight")),
    "qwen3_5_moe_text": dict(classes=(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM), centered_norms=True,
                             float32=QWEN3_5_FLOAT32),
}

# Widths are multiples of the scale block only (16, for MXFP4 32); heads are odd in number or size; prompts are
# longer than YaRN's original context.
FIXTURES = {
    "dsv3_h96_modelopt_yarn": dict(
        classes=(DeepseekV3Config, DeepseekV3ForCausalLM), dialect="modelopt", num_tokens=33,
        config=dict(num_hidden_layers=2, vocab_size=101, hidden_size=96, intermediate_size=112, moe_intermediate_size=48,
                    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=24,
                    qk_rope_head_dim=16, v_head_dim=40, n_routed_experts=6, n_group=2, topk_group=1,
                    num_experts_per_tok=2, n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
                    first_k_dense_replace=1, max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
                                     "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 0.6,
                                     "original_max_position_embeddings": 16})),
    "dsv3_h64_compressed_sharded": dict(
        classes=(DeepseekV3Config, DeepseekV3ForCausalLM), dialect="compressed_nvfp4", num_tokens=21, num_shards=3,
        old_rope_spelling=True,
        config=dict(num_hidden_layers=2, vocab_size=131, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
                    num_attention_heads=3, num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=24,
                    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=5, n_group=1, topk_group=1,
                    num_experts_per_tok=3, n_shared_experts=0, routed_scaling_factor=1.7, norm_topk_prob=False,
                    first_k_dense_replace=0, rope_interleave=False, attention_bias=True, tie_word_embeddings=True,
                    max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
    "qwen3_h96_fused_old_rope": dict(
        classes=(Qwen3MoeConfig, Qwen3MoeForCausalLM), dialect="modelopt_fused", num_tokens=33, old_rope_spelling=True,
        config=dict(num_hidden_layers=2, vocab_size=101, hidden_size=96, intermediate_size=112, moe_intermediate_size=48,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=6, num_experts_per_tok=3,
                    norm_topk_prob=True, decoder_sparse_step=2, max_position_embeddings=64,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                                     "original_max_position_embeddings": 16})),
    "qwen3_h96_compressed_mxfp4_tied": dict(
        classes=(Qwen3MoeConfig, Qwen3MoeForCausalLM), dialect="compressed_mxfp4", num_tokens=21,
        config=dict(num_hidden_layers=2, vocab_size=131, hidden_size=96, intermediate_size=96, moe_intermediate_size=32,
                    num_attention_heads=3, num_key_value_heads=1, head_dim=16, num_experts=5, num_experts_per_tok=2,
                    norm_topk_prob=False, attention_bias=True, tie_word_embeddings=True, max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen2_h64_shared_expert": dict(
        classes=(Qwen2MoeConfig, Qwen2MoeForCausalLM), dialect="modelopt", num_tokens=29, flat_declaration=True,
        quantised_attention=("q_proj", "o_proj"),
        config=dict(num_hidden_layers=2, vocab_size=109, hidden_size=64, intermediate_size=96, moe_intermediate_size=48,
                    shared_expert_intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, num_experts=5,
                    num_experts_per_tok=2, norm_topk_prob=False, mlp_only_layers=[0], max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "glm4_h32_partial_rotary": dict(
        FAMILIES["glm4_moe"], dialect="modelopt", num_tokens=21, old_rope_spelling=True,
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
                    num_attention_heads=6, num_key_value_heads=2, head_dim=16, n_routed_experts=6, n_group=2,
                    topk_group=1, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.6,
                    first_k_dense_replace=1, attention_bias=True, use_qk_norm=True, max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
    "glm4_lite_h32_layer_types": dict(
        FAMILIES["glm4_moe_lite"], dialect="compressed_nvfp4", num_tokens=21,
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
                    num_attention_heads=3, num_key_value_heads=3, q_lora_rank=24, kv_lora_rank=24, qk_nope_head_dim=16,
                    qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1,
                    mlp_layer_types=["sparse", "dense"], max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
    "kimi_k2_h48_equal_betas": dict(
        FAMILIES["kimi_k2"], dialect="modelopt", num_tokens=33,
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=48, intermediate_size=48, moe_intermediate_size=16,
                    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=24, qk_nope_head_dim=16,
                    qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=8, n_group=1, topk_group=1,
                    num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=2.827, first_k_dense_replace=1,
                    max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "beta_fast": 1.0,
                                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": 16})),
    "qwen3_vl_h64_mrope": dict(
        FAMILIES["qwen3_vl_moe"], dialect="compressed_mxfp4", num_tokens=21,
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=64, intermediate_size=32, moe_intermediate_size=32,
                    num_attention_heads=3, num_key_value_heads=1, head_dim=16, num_experts=5, num_experts_per_tok=2,
                    mlp_only_layers=[1], attention_bias=True, max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2],
                                     "mrope_interleaved": True})),
    # Not quantised, in the published order: a projection of all experts in one tensor, transposed.
    "qwen3_vl_h32_bf16_fused": dict(
        FAMILIES["qwen3_vl_moe"], dialect="bf16_fused", num_tokens=21,
        config=dict(num_hidden_layers=2, vocab_size=67, hidden_size=32, intermediate_size=32, moe_intermediate_size=64,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
                    mlp_only_layers=[0], max_position_embeddings=128,
                    rope_parameters={"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2],
                                     "mrope_interleaved": True})),
    "kimi_k25_h48_vision": dict(
        FAMILIES["kimi_k25"], dialect="modelopt", num_tokens=21,
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=48, intermediate_size=48, moe_intermediate_size=16,
                    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=24, kv_lora_rank=24, qk_nope_head_dim=16,
                    qk_rope_head_dim=8, v_head_dim=24, n_routed_experts=7, n_group=1, topk_group=1,
                    num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=2.827, first_k_dense_replace=1,
                    rms_norm_eps=1e-5, max_position_embeddings=128,
                    rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "beta_fast": 32.0,
                                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": 8})),
    # Delta nets. The prompts have more than two chunks of 64 tokens; heads are no multiples of 16.
    "qwen3_next_h32_interleaved": dict(
        FAMILIES["qwen3_next"], dialect="modelopt", num_tokens=137, old_rope_spelling=True, full_attention_interval=2,
        config=dict(num_hidden_layers=3, vocab_size=23, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
                    shared_expert_intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=10,
                    linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
                    mlp_only_layers=[1], max_position_embeddings=256,
                    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25})),
    "qwen3_5_h32_modelopt_mixed": dict(
        FAMILIES["qwen3_5_moe"], dialect="modelopt_mixed", num_tokens=131,
        fp8={"*.self_attn.*": "tensor", "*.linear_attn.*": "tensor"}, quantised_attention=("lm_head",),
        config=dict(num_hidden_layers=3, vocab_size=19, hidden_size=32, moe_intermediate_size=16,
                    shared_expert_intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
                    linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=6,
                    linear_conv_kernel_dim=4, num_experts=3, num_experts_per_tok=2, max_position_embeddings=256,
                    layer_types=["linear_attention", "linear_attention", "full_attention"],
                    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                     "mrope_section": [1, 1, 1], "mrope_interleaved": True})),
    # FP8 beside FP4, one fixture for each way to declare it. "fp8": patterns of modules and their granularity.
    "dsv3_h160_fp8_blocks": dict(
        classes=(DeepseekV3Config, DeepseekV3ForCausalLM), dialect="fp8_mxfp4", num_tokens=17,
        fp8={"*_proj": "block", "*_mqa": "block"},
        config=dict(num_hidden_layers=1, vocab_size=31, hidden_size=160, intermediate_size=32, moe_intermediate_size=32,
                    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=48,
                    qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=3, n_group=1, topk_group=1,
                    num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.5, norm_topk_prob=True,
                    first_k_dense_replace=0, tie_word_embeddings=True, max_position_embeddings=64,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "dsv3_h64_quark": dict(
        classes=(DeepseekV3Config, DeepseekV3ForCausalLM), dialect="quark_mxfp4", num_tokens=19,
        fp8={"*.self_attn.*": "tensor"}, kept=("kv_a_proj_with_mqa", "q_b_proj"),
        config=dict(num_hidden_layers=2, vocab_size=61, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
                    num_attention_heads=3, num_key_value_heads=3, q_lora_rank=24, kv_lora_rank=24, qk_nope_head_dim=16,
                    qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
                    num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.5, norm_topk_prob=True,
                    first_k_dense_replace=1, max_position_embeddings=64,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3_h64_modelopt_mixed": dict(
        classes=(Qwen3MoeConfig, Qwen3MoeForCausalLM), dialect="modelopt_mixed", num_tokens=23,
        fp8={"*.self_attn.*": "tensor"}, quantised_attention=("lm_head",),
        config=dict(num_hidden_layers=2, vocab_size=67, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
                    norm_topk_prob=True, max_position_embeddings=64,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3_h64_compressed_mixed": dict(
        classes=(Qwen3MoeConfig, Qwen3MoeForCausalLM), dialect="compressed_nvfp4_fp8", num_tokens=23,
        fp8={"*.self_attn.*": "row", "lm_head": "row"},
        config=dict(num_hidden_layers=2, vocab_size=67, hidden_size=64, intermediate_size=96, moe_intermediate_size=48,
                    num_attention_heads=3, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
                    norm_topk_prob=True, decoder_sparse_step=2, attention_bias=True, max_position_embeddings=64,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
}


def e2m1_codes(x):
    """Magnitude codes of |x|: nearest, ties to even, saturating."""
    a = x.abs()
    return sum((a > t) if strict else (a >= t) for t, strict in
               ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5, True))).long()


def pack(scaled):
    """[..., block] in units of the block scale -> e2m1 codes, two per byte with the even column low; and their values."""
    code = e2m1_codes(scaled)
    values = torch.sign(scaled) * E2M1[code]
    code = (code | (torch.signbit(scaled).long() << 3)).to(torch.uint8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).flatten(-2).contiguous(), values


class Fp4Weight:
    """One matrix [N, K] in FP4: packed, scales, the tensor scale (NVFP4) and the dequantised values."""

    def __init__(self, weight, is_mxfp4):
        blocks = weight.float().unflatten(-1, (-1, 32 if is_mxfp4 else 16))
        amax = blocks.abs().amax(-1, keepdim=True)
        if is_mxfp4:
            exponent = torch.floor(torch.log2(amax.clamp_min(2.0**-60))) - 2
            self.packed, values = pack(blocks / torch.exp2(exponent))
            self.scales = (exponent.squeeze(-1) + 127).to(torch.uint8)
            self.values = (values * torch.exp2(exponent)).flatten(-2)
            return
        # As stored: a decode scale; compressed-tensors stores its reciprocal, the divisor.
        self.divisor = 2688 / weight.float().abs().amax()
        self.tensor_scale = weight.float().abs().amax() / 2688
        self.scale_block(blocks, amax)

    def scale_block(self, blocks, amax):
        scales = (amax / 6 / self.tensor_scale).clamp(max=448).to(torch.float8_e4m3fn)
        unit = scales.float() * self.tensor_scale
        self.packed, values = pack(torch.where(unit > 0, blocks / unit, torch.zeros_like(blocks)))
        self.scales = scales.squeeze(-1)
        self.block_values = values * scales.float()  # exact
        self.values = (self.block_values * self.tensor_scale).flatten(-2)

    def use_divisor(self):
        """Switches to the values that a reader computes from the divisor alone."""
        self.tensor_scale = 1 / self.divisor
        self.values = (self.block_values * self.tensor_scale).flatten(-2)
        return self


class Bf16Weight:
    """One matrix that is not quantised."""

    def __init__(self, weight):
        self.values = weight.bfloat16().float()


class Fp8Weight:
    """One matrix [N, K] in E4M3 with one scale for the matrix, each row, or each block of 128 x 128 (a power of two)."""

    def __init__(self, weight, granularity):
        n, k = weight.shape
        rows, cols = {"tensor": (n, k), "row": (1, k), "block": (128, 128)}[granularity]
        padded = torch.nn.functional.pad(weight.float(), (0, -k % cols, 0, -n % rows))
        amax = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).abs().amax((1, 3))
        scales = amax / 448
        if granularity == "block":
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
        if granularity == "row":
            scales = (scales * 1.01).bfloat16().float()  # does not round below amax / 448
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:n, :k]
        self.codes = (weight.float() / spread).to(torch.float8_e4m3fn)
        self.values = self.codes.float() * spread
        if granularity == "block":
            scales = (torch.log2(scales) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        elif granularity == "row":
            scales = scales.bfloat16()
        self.scales = scales[0, 0].clone() if granularity == "tensor" else scales


def quantise_activations(x, decode_scale):
    """The NVFP4 rule of docs/formats.md, in IEEE float32."""
    one_sixth = torch.tensor(1, dtype=torch.float32) / 6
    encode = 1 / decode_scale
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = (amax * (encode * one_sixth)).clamp(max=448).to(torch.float8_e4m3fn).float()
    factor = (1 / (scales * (1 / encode))).clamp(max=FLT_MAX)
    factor = torch.where(amax > 0, factor, torch.zeros_like(factor))
    scaled = blocks * factor
    return (torch.sign(scaled) * E2M1[e2m1_codes(scaled)] * scales * decode_scale).flatten(-2)


class Fixture:
    def __init__(self, spec, seed):
        self.spec, self.seed = spec, seed
        self.dialect = spec["dialect"]
        self.generator = torch.Generator().manual_seed(seed)
        self.whole_config, self.model = self.make_model(*spec["classes"])
        self.config = getattr(self.whole_config, "text_config", self.whole_config)
        self.text = getattr(self.model.model, "language_model", self.model.model)
        self.experts = {}  # layer -> [(gate, up, down)] of Fp4Weight
        self.linears = {}  # module name -> Fp4Weight
        self.fp8 = {}  # module name -> Fp8Weight
        self.input_scales = {}  # module name, or (layer, expert, "gate" | "up" | "down") -> decode scale
        self.margin = float("inf")
        self.looped = set()  # layers whose patched experts ran
        self.randomize()
        self.quantise()

    def make_model(self, config_class, model_class):
        text = dict(eos_token_id=0, pad_token_id=None, bos_token_id=None, **self.spec["config"])
        if "full_attention_interval" in self.spec:
            text["full_attention_interval"] = self.spec["full_attention_interval"]
        if "vision" in self.spec:
            if "kv_lora_rank" in text:
                text["model_type"] = "deepseek_v3"
            vision = dict(self.spec["vision"])
            if "depth" in vision:
                vision["out_hidden_size"] = text["hidden_size"]
            config = config_class(text_config=text, vision_config=vision,
                                  tie_word_embeddings=text.get("tie_word_embeddings", False))
        else:
            config = config_class(**text)
        for part in (config, getattr(config, "text_config", config)):
            part._attn_implementation = "eager"
            part._experts_implementation = "eager"
        return config, model_class(config).float().eval()

    def published(self, name):
        """The published name of a tensor or module that the stock class or this file names."""
        name, prefix = name.replace("model.language_model.", "model."), self.spec.get("text_prefix", "")
        if prefix == "model.language_model.":
            return prefix + name.removeprefix("model.") if name.startswith("model.") else name
        if self.spec.get("prefix_without_model"):
            name = name.removeprefix("model.")
        return prefix + name

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def randomize(self):
        for name, p in list(self.model.named_parameters()) + list(self.model.named_buffers()):
            if p.numel() == 0 or "inv_freq" in name:
                continue
            noise = self.draw(*p.shape)
            if "e_score_correction_bias" in name:
                p.copy_(0.1 * noise)
                continue
            if "norm" in name:
                value = 0.2 * noise + (0 if self.is_centered(name) else 1)
            elif name.endswith("A_log"):
                value = 1.5 * noise - 2  # some heads remember for many chunks, some for a few tokens
            elif "bias" in name:
                value = 0.3 * noise
            elif "embed_tokens" in name:
                value = noise
            elif "gate_up_proj" in name or "gate_proj" in name or "up_proj" in name or name.endswith("gate.weight"):
                value = 1.5 * noise / p.shape[-1] ** 0.5
            else:
                value = noise / p.shape[-1] ** 0.5
            p.copy_(value if name.endswith(self.spec.get("float32", ())) else value.bfloat16().float())

    def is_centered(self, name):
        return self.spec.get("centered_norms", False) and not name.endswith("linear_attn.norm.weight")

    def fp4(self, weight):
        if self.dialect.startswith("bf16"):
            return Bf16Weight(weight)
        fp4 = Fp4Weight(weight, is_mxfp4=self.dialect.endswith("mxfp4"))
        return fp4.use_divisor() if self.dialect.startswith("compressed_nvfp4") else fp4

    def fp8_granularity(self, name):
        if name.split(".")[-1] in self.spec.get("kept", ()):
            return None
        return next((g for p, g in self.spec.get("fp8", {}).items() if fnmatch.fnmatch(name, p)), None)

    def has_w4a4(self):
        return not self.dialect.startswith("bf16") and not self.dialect.endswith("mxfp4")

    def is_quantised(self, name):
        if self.dialect.startswith("bf16"):
            return False
        parts = name.split(".")
        is_mlp = parts[-1] in ("gate_proj", "up_proj", "down_proj") and "mlp" in parts
        return is_mlp or parts[-1] in self.spec.get("quantised_attention", ())

    def moe_layers(self):
        for i, layer in enumerate(self.text.layers):
            if hasattr(layer.mlp, "experts"):
                yield i, layer.mlp

    def quantise(self):
        """Sets the model's weights to the dequantised values."""
        for name, module in self.model.named_modules():
            if not isinstance(module, (torch.nn.Linear, torch.nn.Conv1d)) or module.weight.numel() == 0:
                continue
            if granularity := self.fp8_granularity(name):
                self.fp8[name] = Fp8Weight(module.weight.detach().flatten(1), granularity)
                self.fp8[name].codes = self.fp8[name].codes.view_as(module.weight)
                module.weight.copy_(self.fp8[name].values.view_as(module.weight))
            elif self.is_quantised(name):
                self.linears[name] = self.fp4(module.weight.detach())
                module.weight.copy_(self.linears[name].values)
        for i, mlp in self.moe_layers():
            gate_up, down = mlp.experts.gate_up_proj, mlp.experts.down_proj
            num_experts, inter = down.shape[0], down.shape[2]
            assert gate_up.shape == (num_experts, 2 * inter, self.config.hidden_size), gate_up.shape
            self.experts[i] = []
            for e in range(num_experts):
                # The halves differ in magnitude, and so in their tensor scales.
                parts = [self.fp4(w) for w in (gate_up[e, :inter] * (1 + 0.1 * e), gate_up[e, inter:], down[e])]
                gate_up[e].copy_(torch.cat([parts[0].values, parts[1].values]))
                down[e].copy_(parts[2].values)
                self.experts[i].append(parts)

    # ---- running

    def watch_routing(self, mlp, x):
        """Records the smallest margin of a routing decision."""
        x = x.reshape(-1, x.shape[-1])
        logits = x @ mlp.gate.weight.T
        k = self.config.num_experts_per_tok
        bias = getattr(mlp.gate, "e_score_correction_bias", None)
        if bias is None:
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid() + bias
            groups = scores.unflatten(-1, (self.config.n_group, -1))
            if self.config.n_group > 1:
                best = groups.topk(2, -1)[0].sum(-1).sort(-1, descending=True)[0]
                t = self.config.topk_group
                if t < self.config.n_group:
                    self.margin = min(self.margin, float((best[:, t - 1] - best[:, t]).min()))
                chosen = groups.topk(2, -1)[0].sum(-1).topk(t, -1)[1]
                mask = torch.zeros_like(groups[..., 0]).scatter(1, chosen, 1).unsqueeze(-1)
                scores = torch.where(mask > 0, groups, torch.full_like(groups, -9)).flatten(-2)
        ordered = scores.sort(-1, descending=True)[0]
        if k < ordered.shape[1]:
            self.margin = min(self.margin, float((ordered[:, k - 1] - ordered[:, k]).min()))

    def forward(self, ids, hooks=()):
        with contextlib.ExitStack() as stack:
            for module, hook in hooks:
                stack.callback(module.register_forward_pre_hook(hook).remove)
            for _, mlp in self.moe_layers():
                stack.callback(mlp.register_forward_pre_hook(lambda m, a: self.watch_routing(m, a[0])).remove)
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

    def patched_experts(self, visit):
        """Replaces the experts' forward by a plain loop. `visit(layer, name, x)` sees the inputs of both GEMMs and can
        change them."""
        def forward(module, x, index, weights):
            layer, inter = module.fixture_layer, module.down_proj.shape[2]
            self.looped.add(layer)
            dense = torch.zeros(x.shape[0], module.down_proj.shape[0]).scatter(1, index, weights.float())
            x = visit(layer, "a1", x)
            out = torch.zeros_like(x)
            for e in range(module.down_proj.shape[0]):
                both = x @ module.gate_up_proj[e].T
                h = torch.nn.functional.silu(both[:, :inter]) * both[:, inter:]
                used = dense[:, e:e + 1] != 0
                h = visit(layer, "a2", torch.where(used, h, torch.zeros_like(h)))
                out += dense[:, e:e + 1] * (h @ module.down_proj[e].T)
            return out
        stack = contextlib.ExitStack()
        for i, mlp in self.moe_layers():
            mlp.experts.fixture_layer = i
            mlp.experts.forward = types.MethodType(forward, mlp.experts)
            stack.callback(lambda experts=mlp.experts: experts.__dict__.pop("forward"))
        return stack

    def calibrate(self, ids):
        """Sets input scales: for linear layers from the largest input; experts get fractions of their layer's."""
        amax = {}
        def watch(key, x):
            amax[key] = torch.maximum(amax.get(key, torch.zeros(())), x.abs().amax())
            return x
        modules = dict(self.model.named_modules())
        hooks = [(modules[n], lambda m, a, n=n: (watch(n, a[0]),)) for n in self.linears]
        with self.patched_experts(lambda layer, name, x: watch((layer, name), x)):
            patched = self.forward(ids, hooks)
        for name in self.linears:
            self.input_scales[name] = amax[name] / 2688 * 0.9  # so that some values saturate
        for i, experts in self.experts.items():
            for e in range(len(experts)):
                for name, source in (("gate", "a1"), ("up", "a1"), ("down", "a2")):
                    part = 0.4 + 0.5 * float(torch.rand((), generator=self.generator))
                    self.input_scales[i, e, name] = amax[i, source] / 2688 * part
        if self.dialect.startswith("compressed_nvfp4"):  # the file stores its reciprocal
            self.input_scales = {k: 1 / (1 / v) for k, v in self.input_scales.items()}
        return patched

    def logits_w4a4(self, ids):
        modules = dict(self.model.named_modules())
        hooks = [(modules[n], lambda m, a, n=n: (quantise_activations(a[0], self.input_scales[n]),))
                 for n in self.linears]
        def quantise(layer, name, x):
            names = ("gate", "up") if name == "a1" else ("down",)
            scale = max(self.input_scales[layer, e, n] for e in range(len(self.experts[layer])) for n in names)
            return quantise_activations(x, scale)
        with self.patched_experts(quantise):
            return self.forward(ids, hooks)

    # ---- writing

    def fp4_tensors(self, name, fp4, input_scale):
        if self.dialect == "bf16":
            return {name + ".weight": fp4.values.bfloat16()}
        if self.dialect == "compressed_mxfp4":
            return {name + ".weight_packed": fp4.packed, name + ".weight_scale": fp4.scales}
        if self.dialect == "quark_mxfp4":
            return {name + ".weight": fp4.packed, name + ".weight_scale": fp4.scales}
        if self.dialect == "fp8_mxfp4":
            return {name + ".weight": fp4.packed.view(torch.int8), name + ".scale": fp4.scales.view(torch.float8_e8m0fnu)}
        if self.dialect.startswith("compressed_nvfp4"):
            return {name + ".weight_packed": fp4.packed, name + ".weight_scale": fp4.scales,
                    name + ".weight_global_scale": fp4.divisor.reshape(1),
                    name + ".input_global_scale": (1 / input_scale).reshape(1)}
        return {name + ".weight": fp4.packed, name + ".weight_scale": fp4.scales,
                name + ".weight_scale_2": fp4.tensor_scale.reshape(()).clone(),
                name + ".input_scale": input_scale.reshape(()).clone()}

    def fp8_tensors(self, name, fp8):
        result = {name + ".weight": fp8.codes, name + (".scale" if self.dialect == "fp8_mxfp4" else ".weight_scale"): fp8.scales}
        if self.dialect == "modelopt_mixed":
            result[name + ".input_scale"] = torch.tensor(0.01)
        return result

    def expert_tensors(self, layer):
        prefix = f"model.layers.{layer}.mlp.experts."
        experts, tensors = self.experts[layer], {}
        if self.dialect.startswith("bf16_fused"):
            for name, parts in (("gate_up_proj", (0, 1)), ("down_proj", (2,))):
                rows = torch.stack([torch.cat([x[p].values for p in parts]) for x in experts])
                rows = rows.transpose(1, 2) if self.dialect == "bf16_fused" else rows
                tensors[prefix + name] = rows.bfloat16().contiguous()
            return tensors
        if self.dialect != "modelopt_fused":
            for e, parts in enumerate(experts):
                for name, fp4 in zip(("gate", "up", "down"), parts):
                    tensors.update(self.fp4_tensors(f"{prefix}{e}.{name}_proj", fp4, self.input_scales[layer, e, name]))
            return tensors
        for name, parts in (("gate_up", (0, 1)), ("down", (2,))):
            names = [("gate", "up", "down")[p] for p in parts]
            rows = lambda field: torch.stack([torch.cat([getattr(x[p], field) for p in parts]) for x in experts])
            scalars = lambda get: torch.stack([torch.stack([get(e, n, x[p]) for n, p in zip(names, parts)])
                                               for e, x in enumerate(experts)]).squeeze(-1).contiguous()
            tensors[f"{prefix}{name}_proj.weight"] = rows("packed")
            tensors[f"{prefix}{name}_proj.weight_scale"] = torch.stack(
                [torch.cat([x[p].scales.view(torch.uint8) for p in parts]) for x in experts]).view(torch.float8_e4m3fn)
            tensors[f"{prefix}{name}_proj.weight_scale_2"] = scalars(lambda e, n, w: w.tensor_scale)
            tensors[f"{prefix}{name}_proj.input_scale"] = scalars(lambda e, n, w: self.input_scales[layer, e, n])
        return tensors

    def tensors(self):
        result = {}
        for name, value in self.model.state_dict().items():
            module = name.rsplit(".", 1)[0]
            if value.numel() == 0 or ".mlp.experts." in name or (
                    (module in self.linears or module in self.fp8) and name.endswith("weight")):
                continue
            if name == "lm_head.weight" and self.whole_config.tie_word_embeddings:
                continue
            if "visual" in name or "vision_tower" in name or "mm_projector" in name:
                continue
            keep = "e_score_correction_bias" in name or name.endswith(self.spec.get("float32", ()))
            result[name] = (value.float() if keep else value.bfloat16()).contiguous().clone()
        for name, fp4 in self.linears.items():
            result.update(self.fp4_tensors(name, fp4, self.input_scales[name]))
        for name, fp8 in self.fp8.items():
            result.update(self.fp8_tensors(name, fp8))
        for layer in self.experts:
            result.update(self.expert_tensors(layer))
        result = {self.published(name): value for name, value in result.items()}
        for name in self.spec.get("extra", ()):
            result[name] = torch.ones(3, dtype=torch.bfloat16)
        if self.spec.get("has_mtp"):
            for part in ("eh_proj.weight", "enorm.weight", "self_attn.q_proj.weight", "shared_head.norm.weight"):
                name = f"model.layers.{self.config.num_hidden_layers}.{part}"
                result[name] = torch.ones(2, dtype=torch.bfloat16)
        return result

    def quark_declaration(self):
        mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
        fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "group_size": None, "ch_axis": None, "scale_format": None}
        return {"quant_method": "quark", "quant_mode": "eager_mode",
                "global_quant_config": {"weight": mxfp4, "input_tensors": {**mxfp4, "is_dynamic": True}},
                "layer_quant_config": {p: {"weight": fp8, "input_tensors": fp8} for p in self.spec["fp8"]},
                "exclude": ["lm_head", "*.mlp.gate", *(["*.mlp.shared_expert_gate"] if self.patterns_of_gates() else []),
                            *(f"*.{n}" for n in self.spec["kept"])],
                "export": {"pack_method": "reorder", "weight_format": "real_quantized"}}

    def mixed_declaration(self):
        """ModelOpt's map of modules."""
        layers = {f"model.layers.{i}.mlp.experts.{e}.{n}_proj": {"quant_algo": "NVFP4", "group_size": 16}
                  for i, experts in self.experts.items() for e in range(len(experts)) for n in ("gate", "up", "down")}
        layers.update({n: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for n in self.linears})
        layers.update({n: {"quant_algo": "FP8"} for n in self.fp8})
        layers = {self.published(n): value for n, value in layers.items()}
        return {"producer": {"name": "modelopt", "version": "0.41.0"}, "quantization": {
            "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}}

    def declaration(self):
        """(quantization_config, hf_quant_config.json), one or both of which are None."""
        if self.dialect.startswith("bf16"):
            return None, None
        if self.dialect == "quark_mxfp4":
            return self.quark_declaration(), None
        if self.dialect == "fp8_mxfp4":
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                    "weight_block_size": [128, 128]}, None
        if self.dialect == "modelopt_mixed":
            return None, self.mixed_declaration()
        mixers = [(i, part) for i, layer in enumerate(self.text.layers) for part in ("self_attn", "linear_attn")
                  if hasattr(layer, part)]
        kept = [self.published(f"model.layers.{i}.{part}") + "*" for i, part in mixers]
        if "quantised_attention" in self.spec:
            kept = sorted({"*." + name for i, part in mixers
                           for name, module in getattr(self.text.layers[i], part).named_children()
                           if isinstance(module, (torch.nn.Linear, torch.nn.Conv1d)) and not self.is_quantised(name)})
        if self.dialect.startswith("modelopt"):
            ignore = [self.published("lm_head"), self.published("model.embed_tokens"), "*.mlp.gate",
                      "*.mlp.shared_expert_gate"] + kept
            if self.spec.get("flat_declaration"):
                return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore, "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}},
                    "kv_cache_scheme": {"type": "float", "num_bits": 8}}, None
            return None, {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
                "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignore}}
        is_mxfp4 = self.dialect.endswith("mxfp4")
        weights = {"num_bits": 4, "type": "float", "strategy": "group" if is_mxfp4 else "tensor_group",
                   "group_size": 32 if is_mxfp4 else 16, "symmetric": True, "dynamic": False}
        if "fp8" in self.spec:
            fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
            return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "mixed-precision",
                    "config_groups": {
                        "group_0": {"format": "float-quantized", "targets": self.patterns_of_mixers() + ["re:lm_head"],
                                    "weights": fp8, "input_activations": None},
                        "group_1": {"format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": weights,
                                    "input_activations": weights}},
                    "ignore": ["re:.*mlp.gate$"] + self.patterns_of_gates(), "kv_cache_scheme": None}, None
        return {"quant_method": "compressed-tensors", "quantization_status": "compressed",
                "format": "mxfp4-pack-quantized" if is_mxfp4 else "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                                              "input_activations": None if is_mxfp4 else weights}},
                "ignore": ["lm_head", *self.patterns_of_mixers(), "re:.*mlp.gate$", *self.patterns_of_gates()],
                "kv_cache_scheme": None}, None

    def patterns_of_mixers(self):
        parts = ("self_attn", "linear_attn")
        return [f"re:.*{part}.*" for part in parts if any(hasattr(layer, part) for layer in self.text.layers)]

    def patterns_of_gates(self):
        has_gate = any(hasattr(mlp, "shared_expert_gate") for _, mlp in self.moe_layers())
        return ["re:.*shared_expert_gate$"] if has_gate else []

    def config_json(self, declaration):
        d = self.whole_config.to_dict()
        d.update({"architectures": [self.spec["classes"][1].__name__], "torch_dtype": "bfloat16"} | self.spec.get("json", {}))
        text = d.get("text_config", d)
        text.update(self.spec.get("text_json", {}))
        if "full_attention_interval" in self.spec:
            del text["layer_types"]
            text["full_attention_interval"] = self.spec["full_attention_interval"]
        if declaration is not None:
            d["quantization_config"] = declaration
        if self.dialect == "fp8_mxfp4":
            d["expert_dtype"] = "fp4"
        if self.spec.get("old_rope_spelling"):
            rope = dict(text.pop("rope_parameters"))
            text["rope_theta"] = rope.pop("rope_theta")
            if "partial_rotary_factor" in rope:
                text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            text["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        return json.dumps(d, indent=1, default=str)


def compute(spec, seed):
    fixture = Fixture(spec, seed)
    ids = torch.randint(0, fixture.config.vocab_size, (1, spec["num_tokens"]), generator=fixture.generator)
    expected = {"ids": ids[0], "logits_w4a16": fixture.forward(ids)}
    patched = fixture.calibrate(ids)
    assert fixture.looped == set(fixture.experts), "the stock class bypasses the experts' forward"
    fixture.loop_error = float((patched - expected["logits_w4a16"]).abs().max())
    if fixture.has_w4a4():
        expected["logits_w4a4"] = fixture.logits_w4a4(ids)
    return fixture, expected


def check_stock_reader(spec, folder, expected):
    """The stock class reads the written tensors and computes the same logits; the vision model is missing."""
    _, model_class = spec["classes"]
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                        ignore_mismatched_sizes=True).eval()
    logits = model(input_ids=expected["ids"][None], use_cache=False).logits[0]
    error = float((logits - expected["logits_w4a16"]).abs().max())
    assert error < 1e-4, f"{folder}: the stock class reads other weights; its logits differ by {error}"


def make_fixture(name, spec, folder, num_seeds=NUM_SEEDS):
    fixture, expected = max((compute(spec, seed) for seed in range(num_seeds)), key=lambda pair: pair[0].margin)
    assert fixture.loop_error < 1e-4, f"{name}: the loop over experts differs from the stock class by {fixture.loop_error}"
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(fixture.tensors(), folder, spec.get("num_shards", 1))
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    declaration, hf_quant = fixture.declaration()
    (folder / "config.json").write_text(fixture.config_json(declaration))
    if fixture.dialect.startswith("bf16"):
        check_stock_reader(spec, folder, expected)
    if hf_quant is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant, indent=1))
    moved = [float((v - expected["logits_w4a16"]).norm() / expected["logits_w4a16"].norm())
             for k, v in expected.items() if k.startswith("logits")]
    num_bytes = sum(f.stat().st_size for f in folder.iterdir())
    print("OK", name, "seed", fixture.seed, f"margin {fixture.margin:.1e} loop {fixture.loop_error:.1e}",
          "max", round(float(expected["logits_w4a16"].abs().max()), 2), "w4a4 moves", [round(m, 4) for m in moved],
          "bytes", num_bytes, flush=True)
    return fixture


if __name__ == "__main__":
    print("torch", torch.__version__, "transformers", transformers.__version__, flush=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for fixture_name in sys.argv[2:] or FIXTURES:
            make_fixture(fixture_name, FIXTURES[fixture_name], pathlib.Path(sys.argv[1]) / fixture_name)
