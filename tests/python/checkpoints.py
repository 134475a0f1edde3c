"""Checkpoints for tests: one that always gives the same answer, for predictable results, and one with a template for tools."""

import json
import shutil
import struct

from conftest import MODEL

# In the manner of Hermes and Qwen.
TEMPLATE = """
{%- if tools %}{{ '<|start_header_id|>tools<|end_header_id|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"""
# The margin of the planted token's logit above all others.
MARGIN = 12.0
SILENT = ("o_proj.weight", "down_proj.weight")
LOUD = ("embed_tokens.weight", "norm.weight", "layernorm.weight")


def planted(directory, pieces, base=MODEL):
    """`base`, a Llama, with other weights: for any prompt, one of `pieces` (of its vocabulary) comes next, all equally likely.

    All tokens have the same embedding and no layer adds anything, so the output is always the same vector of ones, from which a new
    output matrix makes the logits.
    """
    directory.mkdir()
    for file in base.iterdir():
        shutil.copy(file, directory)
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    width, tokens = config["hidden_size"], config["vocab_size"]
    said = {vocabulary[piece] for piece in pieces}
    head = b"".join(bfloat16(MARGIN / width if token in said else 0.0) * width for token in range(tokens))

    whole = (base / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + size]), bytearray(whole[8 + size :])
    for name, tensor in header.items():
        if name.endswith(SILENT + LOUD):
            start, end = tensor["data_offsets"]
            data[start:end] = bfloat16(0.0 if name.endswith(SILENT) else 1.0) * ((end - start) // 2)
    header["lm_head.weight"] = {"dtype": "BF16", "shape": [tokens, width], "data_offsets": [len(data), len(data) + len(head)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data + head)
    return directory


def caller_in(directory):
    """The tiny Llama, named `caller`, with a template that knows tools and calls."""
    shutil.copytree(MODEL, directory / "caller")
    (directory / "caller/chat_template.jinja").write_text(TEMPLATE)
    return directory / "caller"


def bfloat16(number):
    return struct.pack("<f", number)[2:]
