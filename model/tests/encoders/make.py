#!/usr/bin/env python3
"""Make the tiny encoders beside this script, one per family and kind of head, with what Hugging Face transformers computes from them.

    venv/bin/pip install torch==2.15.0 transformers==5.23.0 tokenizers safetensors
    venv/bin/python make.py [NAME ...]

Each directory is a checkpoint as its family publishes it, with random weights and a tokenizer of the commonest words of `../fixtures/corpus.txt`. Beside it:

reference.json   `texts`: a text or a pair, its token ids, where the second text begins, and the pooled row or the logits, in f32.

Everything follows from the constants below: the same library versions write the same bytes.
"""
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

HERE = Path(__file__).parent
CORPUS = HERE.parent / "fixtures/corpus.txt"
VOCAB = 384
SHAPE = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80)
TEXTS = [
    "The tide turns the wheel.",
    ("When does the mill grind?", "It grinds at ebb, when the pond is full."),
    "a",
    " ".join(["Water rises and water falls; the miller waits for it."] * 9),
    ("short", " ".join(["A longer passage that the question is compared with."] * 6)),
]

# `pooling`: of sentence-transformers; `head`: with a classifier's.
ENCODERS = {
    "bert-mean": dict(config="BertConfig", model="BertModel", dtype=torch.float32, pooling="mean_tokens",
                      fields=dict(max_position_embeddings=512, type_vocab_size=2)),
    "bert-classes": dict(config="BertConfig", model="BertForSequenceClassification", dtype=torch.float32,
                         fields=dict(max_position_embeddings=512, type_vocab_size=2, id2label={0: "no", 1: "perhaps", 2: "yes"})),
    "xlm-roberta-rank": dict(config="XLMRobertaConfig", model="XLMRobertaForSequenceClassification", dtype=torch.float32,
                             fields=dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1, id2label={0: "LABEL_0"})),
    "modernbert-first": dict(config="ModernBertConfig", model="ModernBertModel", dtype=torch.bfloat16, pooling="cls_token",
                             fields=dict(max_position_embeddings=1024, local_attention=24, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3)),
    "modernbert-classes": dict(config="ModernBertConfig", model="ModernBertForSequenceClassification", dtype=torch.float32,
                               fields=dict(max_position_embeddings=1024, local_attention=24, pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3,
                                           classifier_pooling="mean", id2label={0: "a", 1: "b"})),
    "nomic": dict(config="NomicBertConfig", model="NomicBertModel", dtype=torch.float32, pooling="mean_tokens",
                  fields=dict(max_position_embeddings=512, type_vocab_size=2)),
}
POOLINGS = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]


def tokenizer(config):
    """WordPiece with BERT's template; XLM-R's has its special tokens, and two separators between texts."""
    is_roberta = "Roberta" in config
    specials = ["<s>", "<pad>", "</s>", "<unk>"] if is_roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    first, last, unknown = ("<s>", "</s>", "<unk>") if is_roberta else ("[CLS]", "[SEP]", "[UNK]")
    # Not trained: of two pieces that are as common, the trainer takes either.
    text = CORPUS.read_text().lower()
    letters = sorted(set(re.findall(r"[!-~]", text)) | set("abcdefghijklmnopqrstuvwxyz"))
    common = sorted(Counter(re.findall(r"[a-z]{2,}", text)).items(), key=lambda item: (-item[1], item[0]))
    pieces = specials + letters + ["##" + letter for letter in letters] + [word for word, _ in common]
    made = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces[:VOCAB])}, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    between = f"{last} {last}" if is_roberta else f"{last}"
    second = 0 if is_roberta else 1
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {between} $B:{second} {last}:{second}",
        special_tokens=[(token, made.token_to_id(token)) for token in (first, last)],
    )
    return made


def make(name, config, model, dtype, fields, pooling=None):
    torch.manual_seed(sum(name.encode()))
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    settings = getattr(transformers, config)(**SHAPE, **fields)
    settings._attn_implementation = "eager"
    network = getattr(transformers, model)(settings)
    with torch.no_grad():
        for parameter, tensor in network.named_parameters():
            # Large enough that a wrong bias, norm or head is seen.
            spread = 0.3 if tensor.dim() == 1 else 0.12 if "embeddings" not in parameter else 0.5
            tensor.copy_((1.0 if "orm" in parameter and parameter.endswith("weight") else 0.0) + spread * torch.randn_like(tensor))
    network = network.to(dtype).eval()
    network.save_pretrained(directory)
    made = tokenizer(config)
    made.save(str(directory / "tokenizer.json"))
    network = network.float()
    if pooling:
        (directory / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in POOLINGS}
        (directory / "1_Pooling/config.json").write_text(json.dumps(dict(word_embedding_dimension=SHAPE["hidden_size"], **modes), indent=1) + "\n")
        modules = [dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer"),
                   dict(idx=1, name="1", path="1_Pooling", type="sentence_transformers.models.Pooling")]
        (directory / "modules.json").write_text(json.dumps(modules, indent=1) + "\n")
    texts = []
    for text in TEXTS:
        encoded = made.encode(*text) if isinstance(text, tuple) else made.encode(text)
        ids, sequence = encoded.ids, encoded.sequence_ids
        second = next((place for place, of in enumerate(sequence) if of == 1), len(ids))
        inputs = dict(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        if fields.get("type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = torch.tensor([encoded.type_ids])
        with torch.no_grad():
            output = network(**inputs)
        if pooling:
            hidden = output.last_hidden_state[0]
            row = hidden[0] if pooling == "cls_token" else hidden.mean(0)
        else:
            row = output.logits[0]
        texts.append(dict(text=text, ids=ids, second=second, row=[float(x) for x in row]))
    (directory / "reference.json").write_text(json.dumps(dict(texts=texts)) + "\n")
    print(name, [len(t["ids"]) for t in texts], [t["second"] for t in texts], texts[0]["row"][:3])


if __name__ == "__main__":
    for name in sys.argv[1:] or ENCODERS:
        make(name, **ENCODERS[name])
