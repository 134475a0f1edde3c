"""A Qwen3-MoE checkpoint in llama.cpp's format, without a tokenizer: for measuring speed. Needs numpy and gguf.

Weights stay in bf16; norms and routers become f32, as llama.cpp's own converter writes them.
"""

import json
import mmap


class Checkpoint:
    """The tensors of one safetensors file in bf16."""

    def __init__(self, path):
        file = open(path, "rb")
        self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = int.from_bytes(self.bytes[:8], "little")
        self.tensors = json.loads(self.bytes[8 : 8 + header])
        self.first = 8 + header

    def bits(self, name):
        import numpy

        tensor = self.tensors[name]
        if tensor["dtype"] != "BF16":
            raise SystemExit(f"{name} is in {tensor['dtype']}, and only BF16 is known here")
        start, end = tensor["data_offsets"]
        numbers = numpy.frombuffer(self.bytes, numpy.uint16, (end - start) // 2, self.first + start)
        return numbers.reshape(tensor["shape"])


def write(checkpoint, path):
    try:
        import gguf
        import numpy
    except ImportError as missing:
        raise SystemExit(f"--shape needs a Python package: {missing}. Install numpy and gguf") from None
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = Checkpoint(checkpoint / "model.safetensors")
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")

    def as_bf16(name, bits):
        writer.add_tensor(name, numpy.ascontiguousarray(bits).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def as_f32(name, bits):
        writer.add_tensor(name, (bits.astype(numpy.uint32) << 16).view(numpy.float32))

    as_bf16("token_embd.weight", tensors.bits("model.embed_tokens.weight"))
    as_f32("output_norm.weight", tensors.bits("model.norm.weight"))
    if not config["tie_word_embeddings"]:
        as_bf16("output.weight", tensors.bits("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        as_f32(f"{theirs}.attn_norm.weight", tensors.bits(f"{ours}.input_layernorm.weight"))
        as_f32(f"{theirs}.ffn_norm.weight", tensors.bits(f"{ours}.post_attention_layernorm.weight"))
        for name, part in dict(attn_q="q_proj", attn_k="k_proj", attn_v="v_proj", attn_output="o_proj").items():
            as_bf16(f"{theirs}.{name}.weight", tensors.bits(f"{ours}.self_attn.{part}.weight"))
        for name in "qk":
            as_f32(f"{theirs}.attn_{name}_norm.weight", tensors.bits(f"{ours}.self_attn.{name}_norm.weight"))
        as_f32(f"{theirs}.ffn_gate_inp.weight", tensors.bits(f"{ours}.mlp.gate.weight"))
        for part in ["gate", "up", "down"]:
            experts = [tensors.bits(f"{ours}.mlp.experts.{expert}.{part}_proj.weight") for expert in range(config["num_experts"])]
            as_bf16(f"{theirs}.ffn_{part}_exps.weight", numpy.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
