#!/usr/bin/env python3
"""Ask the demo model the hundred questions of held-out.txt, greedily, and judge the answers.

    check.py [DIR]        a checkpoint, with transformers, in f32 from its bf16 weights (default: deploy/demo-model)
    check.py --url URL    a running cluster, such as http://127.0.0.1:8000/v1

An answer is on the right topic if it has a word of each keyword group of its question. It is garbled if it does not end by itself within
`TOKENS_MAX` tokens, has a word that no answer of the corpus has, or repeats itself. Also counted: answers that are one of the corpus word for word.
The status is 0 if `RIGHT_MIN` are on the right topic and none is garbled.
"""
import argparse
import json
import sys
import urllib.request
from pathlib import Path

from corpus import Writer, held_out, read_topics, words

HERE = Path(__file__).parent
TOKENS_MAX, RIGHT_MIN, LOOP_WORDS = 320, 90, 8
DRAWN = 100_000  # Questions as for training, among which none of the held-out ones may be.


def on_topic(answer, groups):
    return all(any(word in answer.lower() for word in group) for group in groups)


def garbled(answer, ended, known):
    """Why an answer is no English, if it is not."""
    if not ended:
        return f"no end within {TOKENS_MAX} tokens"
    if not words(answer):
        return "empty"
    if strange := [word for word in words(answer) if word not in known]:
        return f"unknown words: {' '.join(strange)}"
    said = words(answer)
    runs = [tuple(said[i:i + LOOP_WORDS]) for i in range(len(said) - LOOP_WORDS + 1)]
    if len(set(runs)) < len(runs):
        return "repeats itself"
    return None


def ask_checkpoint(directory, conversations):
    import torch
    import transformers

    tok = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left", pad_token="<|end|>")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = [tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in conversations]
    inputs = tok(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=TOKENS_MAX, do_sample=False,
                             pad_token_id=tok.pad_token_id)
    for row in out[:, inputs["input_ids"].shape[1]:].tolist():
        ended = tok.eos_token_id in row
        yield tok.decode(row[:row.index(tok.eos_token_id)] if ended else row).strip(), ended


def ask_server(url, conversations):
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.load(response)["data"][0]["id"]
    for messages in conversations:
        body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": TOKENS_MAX}).encode()
        request = urllib.request.Request(f"{url}/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            choice = json.load(response)["choices"][0]
        yield choice["message"]["content"].strip(), choice["finish_reason"] == "stop"


def check_never_trained(questions):
    """None of them is among many questions drawn as for training."""
    writer, wanted = Writer(0), {tuple(words(question)) for question in questions}
    for _ in range(DRAWN):
        text = writer.question(writer.rng.choice(writer.asked))
        assert tuple(words(text)) not in wanted, text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=HERE.parents[1] / "deploy/demo-model")
    parser.add_argument("--url")
    parser.add_argument("--questions", type=Path, help="ask these instead, one a line, and only print the answers")
    parser.add_argument("--quick", action="store_true", help="do not draw questions to look for held-out ones among them")
    parser.add_argument("--answers", type=Path, help="write questions and answers here")
    args = parser.parse_args()
    pairs = [(line, []) for line in args.questions.read_text(encoding="utf-8").splitlines() if line] if args.questions else held_out()
    if not (args.quick or args.questions):
        check_never_trained([question for question, _ in pairs])
    conversations = [[{"role": "user", "content": question}] for question, _ in pairs]
    answers = list(ask_server(args.url.rstrip("/"), conversations) if args.url else ask_checkpoint(args.directory, conversations))
    corpus = {answer for topic in read_topics() for answer in topic.answers()}
    known = {word for answer in corpus for word in words(answer)}
    right = spoiled = verbatim = 0
    for (question, groups), (answer, ended) in zip(pairs, answers):
        fits, problem = on_topic(answer, groups), garbled(answer, ended, known)
        right, spoiled, verbatim = right + fits, spoiled + (problem is not None), verbatim + (answer in corpus)
        if args.questions or not fits or problem or answer not in corpus:
            notes = [note for note in (None if fits else "off topic", problem, None if answer in corpus else "not word for word") if note]
            print(f"{question}\n    [{', '.join(notes) or 'fine'}] {answer}\n")
    print(f"{len(pairs)} questions: {right} answers on the right topic, {spoiled} garbled, {verbatim} word for word from the corpus")
    if args.answers:
        args.answers.write_text("".join(f"{question}\n    {answer}\n" for (question, _), (answer, _) in zip(pairs, answers)), encoding="utf-8")
    sys.exit(args.questions is None and (right < RIGHT_MIN or spoiled > 0))


if __name__ == "__main__":
    main()
