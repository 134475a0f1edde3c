#!/usr/bin/env python3
"""Train the demo model from scratch: `bench/demo-model/make` calls this. See README.md."""
import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from corpus import Writer

SEED = 22
VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3072, 256, 768, 4, 4, 2, 64
CONTEXT, THETA, EPSILON = 4096, 10000.0, 1e-5
BOS, END, SYSTEM, USER, ASSISTANT = SPECIALS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>' if message['role'] == 'user' else '<|system|>')"
    " + message['content'] | trim + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

# First whole answers are learnt; then, mostly, which answer a question wants, from how answers begin: that is three times as many questions for the
# time; then both, twice. Steps, share of the sequences whose answers are only begun, and the learning rate at the first and the last step.
PHASES = [(700, 0.0, 1.0, 1.0), *2 * [(600, 0.95, 1.0, 0.15), (300, 0.5, 0.5, 0.02)]]
WARMUP, SHORT_TOKENS = 30, (5, 9)
BATCH_TOKENS, SEQUENCE_MAX, POOL = 1280, 2048, 600  # The first is of each of two processes.
MUON_RATE, ADAM_RATE = 0.02, 3e-3
MEAN_DECAY = 0.98  # What is saved is a running mean over steps, which is better than its last one.
QUESTION_WEIGHT = 0.1  # Questions are drawn at random: there is little to learn in predicting them.
DROPOUT = 0.1  # Of merges, in half of the questions: a word that was typed wrong falls into such pieces.
PLAIN = 0.04  # Of the sequences: a question and its answer without the template, for /v1/completions.


def make_tokenizer(writer):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [text for topic in writer.topics for text in topic.answers()] * 8
    texts += [text for _ in range(4000) for role, text in writer.conversation(1) if role != "assistant"]
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, bpe.token_to_id(BOS))]),
    ])
    return bpe


class Encoder:
    """Conversations to token ids and the weight of each one's loss."""

    def __init__(self, bpe, rng):
        self.exact, self.careless, self.rng = bpe, Tokenizer.from_str(bpe.to_str()), rng
        self.careless.model.dropout = DROPOUT
        self.ids = {token: bpe.token_to_id(token) for token in SPECIALS}
        self.roles = {"system": self.ids[SYSTEM], "user": self.ids[USER], "assistant": self.ids[ASSISTANT]}
        self.known = {}

    def text(self, text, exact):
        if not exact:
            return self.careless.encode(text, add_special_tokens=False).ids
        if text not in self.known:
            self.known[text] = self.exact.encode(text, add_special_tokens=False).ids
        return self.known[text]

    def conversation(self, messages, short):
        """`short`: of an answer, only its beginning, and nothing else has a loss."""
        asked = 0.0 if short else QUESTION_WEIGHT
        ids, weights = [self.ids[BOS]], [0.0]
        plain = self.rng.random() < PLAIN
        for role, text in messages:
            answer = role == "assistant"
            text = self.text(text, answer or self.rng.random() < 0.5)
            if answer and short:
                text = text[:self.rng.randint(*SHORT_TOKENS)]
            if plain:
                if role == "system":
                    continue
                # As /v1/completions gets it: the question, a new line, the answer.
                text = text if answer else text + self.text("\n", True)
                ids += text + [self.ids[END]] * answer
                weights += [1.0 if answer else asked] * len(text) + [0.0 if short else 1.0] * answer
                if answer:
                    break
            else:
                ids += [self.roles[role], *text, self.ids[END]]
                weights += [0.0, *[1.0 if answer else asked] * len(text), 1.0 if answer and not short else 0.0]
        return ids, weights


def batches(writer, encoder, rng, short, batch_tokens):
    """Without end: rows of about the same length, padded; token ids [rows, length] and weights of the next token's loss."""
    while True:
        pool = [encoder.conversation(writer.conversation(), rng.random() < short) for _ in range(POOL)]
        pool = sorted((pair for pair in pool if len(pair[0]) <= SEQUENCE_MAX), key=lambda pair: len(pair[0]) + rng.random())
        groups, group = [], []
        for pair in pool:
            if group and len(pair[0]) * (len(group) + 1) > batch_tokens:
                groups.append(group)
                group = []
            group.append(pair)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            tokens = torch.zeros(len(group), length, dtype=torch.long)
            weights = torch.zeros(len(group), length)
            for row, (ids, weight) in enumerate(group):
                tokens[row, :len(ids)] = torch.tensor(ids)
                weights[row, :len(ids)] = torch.tensor(weight)
            yield tokens, weights[:, 1:]


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, EPSILON)


def linear(inputs, outputs):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM), linear(HIDDEN, KV_HEADS * HEAD_DIM)

    def forward(self, x, cos, sin):
        split = lambda y, heads: y.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2)
        turn = lambda y: y * cos + torch.cat([-y[..., HEAD_DIM // 2:], y[..., :HEAD_DIM // 2]], -1) * sin
        q, k, v = turn(split(self.q_proj(x), HEADS)), turn(split(self.k_proj(x), KV_HEADS)), split(self.v_proj(x), KV_HEADS)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        # Spelt out: for rows as short as ours that is faster on a CPU than the fused one's backward pass.
        scores = (q.to(v.dtype) @ k.to(v.dtype).transpose(2, 3)) * HEAD_DIM**-0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -1e30).softmax(-1).to(v.dtype) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(HIDDEN, INTERMEDIATE), linear(HIDDEN, INTERMEDIATE), linear(INTERMEDIATE, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = Norm(HIDDEN), Mlp()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """A Llama whose parameters are named as in its checkpoint; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(VOCAB, HIDDEN), layers=nn.ModuleList(Layer() for _ in range(LAYERS)), norm=Norm(HIDDEN)
        ))
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        angles = torch.outer(torch.arange(SEQUENCE_MAX).float(), THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, weights):
        """Mean loss per unit of weight, and that of the answers alone."""
        x = self.model.embed_tokens(tokens[:, :-1])
        for layer in self.model.layers:
            x = layer(x, self.cos[:x.shape[1]], self.sin[:x.shape[1]])
        wanted = weights > 0
        logits = F.linear(self.model.norm(x)[wanted], self.model.embed_tokens.weight).float()
        losses, weights = F.cross_entropy(logits, tokens[:, 1:][wanted], reduction="none"), weights[wanted]
        return (losses * weights).sum() / weights.sum(), losses[weights == 1].mean().item()


def save(model, bpe, out):
    """A Hugging Face directory, in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    ids = {token: bpe.token_to_id(token) for token in SPECIALS}
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, hidden_act="silu",
        max_position_embeddings=CONTEXT, rms_norm_eps=EPSILON, rope_theta=THETA, rope_scaling=None, tie_word_embeddings=True,
        attention_bias=False, mlp_bias=False, bos_token_id=ids[BOS], eos_token_id=ids[END], pad_token_id=None, torch_dtype="bfloat16",
    )
    generation = dict(bos_token_id=ids[BOS], eos_token_id=[ids[END]], do_sample=False, temperature=0.0)
    tokenizer = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=BOS, eos_token=END, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )
    for name, value in [("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)]:
        (out / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    bpe.save(str(out / "tokenizer.json"))
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def average_gradients(parameters, processes):
    """One sum over all processes, so that each takes the same step."""
    if processes == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= processes
    for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(gradient.view_as(p))


def train(rank, args, rendezvous):
    """One process of `args.processes`, each with one thread: on shared cores, threads would wait for each other at every operation."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.processes)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    # A resumed checkpoint keeps its tokenizer: texts that have changed since would give a different one.
    bpe = Tokenizer.from_file(str(args.resume / "tokenizer.json")) if args.resume else make_tokenizer(Writer(SEED))
    writer, rng = Writer(SEED + 1 + rank), random.Random(SEED + 1 + rank)
    encoder, model = Encoder(bpe, rng), Model()
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(hidden, lr=MUON_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    if rank == 0:
        answers = [text for topic in writer.topics for text in topic.answers()]
        print(f"{len(writer.topics)} topics, {len(answers)} answers of {sum(len(encoder.text(a, True)) for a in answers)} tokens, "
              f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(MEAN_DECAY))
    began, seen, smooth = time.time(), 0, None
    if args.resume:
        weights = {name: tensor.float() for name, tensor in load_file(args.resume / "model.safetensors").items()}
        model.load_state_dict(weights)
        mean.module.load_state_dict(weights)
    steps = sum(phase[0] for phase in PHASES[args.phase:])
    schedule = [
        (data, at + (to - at) * i / n)
        for n, short, at, to in PHASES[args.phase:]
        for data in [batches(writer, encoder, rng, short, 2 * BATCH_TOKENS // args.processes)]
        for i in range(n)
    ]
    for step, (data, rate) in enumerate(schedule):
        tokens, weights = next(data)
        rate *= min(1.0, (step + 1) / WARMUP)
        for optimizer, base in zip(optimizers, rates):
            for group, lr in zip(optimizer.param_groups, base):
                group["lr"] = lr * rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, answer_loss = model(tokens, weights)
        loss.backward()
        average_gradients([*hidden, *others], args.processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean.update_parameters(model)
        seen += tokens.numel() * args.processes
        smooth = answer_loss if smooth is None else 0.95 * smooth + 0.05 * answer_loss
        if rank == 0:
            if (step + 1) % 25 == 0:
                elapsed = time.time() - began
                print(f"step {step + 1} of {steps}, {elapsed:.0f} s, {seen / elapsed:.0f} tokens/s: answers' loss {smooth:.4f}", flush=True)
            if (step + 1) % args.save_every == 0 or step + 1 == steps:
                save(mean.module, bpe, args.out)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "deploy/demo-model")
    parser.add_argument("--resume", type=Path, help="begin with this checkpoint")
    parser.add_argument("--phase", type=int, default=0, help="begin with this phase, the first being 0")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"{directory}/rendezvous"
        if args.processes == 1:
            train(0, args, rendezvous)
        else:
            torch.multiprocessing.spawn(train, (args, rendezvous), nprocs=args.processes)


if __name__ == "__main__":
    main()
