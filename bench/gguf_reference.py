"""A GGUF file as Tidemill serves it, beside transformers on the same file's values and llama.cpp's tokenizer.

    gguf_reference.py TIDEMILL FILE.gguf REFERENCE --text FILE [--llama DIR] [--tokens 200] [--skip tokens|answers]

REFERENCE is the same file as a checkpoint of bf16 numbers, which `transformers` makes (`AutoModelForCausalLM.from_pretrained(…, gguf_file=…,
dtype=torch.bfloat16)`, `save_pretrained`; its tokenizer likewise). Needs torch and transformers, and --llama a directory with `llama-server`.

Tokens: the text, in pieces of 3,000 characters, by `/tokenize`, by the reference's tokenizer and by llama.cpp's server. All take special tokens
that the text spells out for such, as a completion's prompt does.
Answers: ten prompts are continued greedily; then transformers, in f32, reads each prompt with the answer, and says for every token whether
it would have drawn it too. Where it would not, its own choice and the token lie `margin` apart in its log-probabilities.
The exit status is 1 if a token differs from the reference's tokenizer, or an answer's by more than MARGIN_MAX.
"""

import argparse
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import real

PIECE = 3000
READY_S = 300
# The change that bf16 numbers in K and V, and different orders of additions, may cause.
MARGIN_MAX = 0.1
PROMPTS = [
    "def quicksort(items):\n",
    "The tide mill at the mouth of the river",
    "import json\n\nclass Client:\n    def __init__(self, url):\n",
    "Once upon a time, in a village by the sea,",
    "SELECT name, count(*) FROM orders",
    "Die Gezeitenmühle steht seit",
    "fn main() {\n    let words = vec![",
    "The three most important ideas in computer science are",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to you because",
]


def pieces(text):
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


def llama_tokens(args, texts):
    """The tokens of each text by the `/tokenize` of llama.cpp's server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.llama / "llama-server", "-m", args.gguf, "--port", str(port), "-c", "512"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(READY_S):
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
                break
            if process.poll() is not None:
                break
            time.sleep(1)
        return [post(url + "/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"] for text in texts]
    finally:
        process.terminate()
        process.wait()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def differing(ours, theirs):
    return [number for number, (left, right) in enumerate(zip(ours, theirs, strict=True)) if left != right]


def compare(ours, theirs, name):
    """Counts the pieces with other tokens, and shows where the first few begin to differ."""
    differ = differing(ours, theirs)
    print(f"| tokens | pieces that differ from {name}'s | {len(differ)} of {len(ours)} |", flush=True)
    for number in differ[:5]:
        pairs = zip(ours[number], theirs[number])
        place = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(ours[number]), len(theirs[number])))
        parts = [tokens[number][max(place - 1, 0) : place + 5] for tokens in (ours, theirs)]
        print(f"piece {number}, from token {place}: {parts[0]}, {name} {parts[1]}", file=sys.stderr)
    return differ


def tokens(args, server):
    from transformers import AutoTokenizer

    texts = pieces(args.text.read_text())
    ours = []
    for text in texts:
        status, answer = server.send(server.url.removesuffix("/v1") + "/tokenize", {"prompt": text, "add_special_tokens": False})
        if status != 200:
            raise real.Failed(f"POST /tokenize: {status}: {answer}")
        ours.append(answer["tokens"])
    tokenizer = AutoTokenizer.from_pretrained(args.reference)
    theirs = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    print(f"| tokens | bytes; tokens | {sum(len(text.encode()) for text in texts):,}; {sum(map(len, ours)):,} |")
    differ = compare(ours, theirs, "transformers")
    if args.llama:
        compare(ours, llama_tokens(args, texts), "llama.cpp")
    return not differ


def answers(args, server):
    import torch
    from transformers import AutoModelForCausalLM

    drawn = []
    for prompt in PROMPTS:
        body = {"model": server.model, "prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
        status, answer = server.post("/completions", body | {"return_token_ids": True, "logprobs": 0})
        if status != 200:
            raise real.Failed(f"POST /completions: {status}: {answer}")
        choice = answer["choices"][0]
        drawn.append((choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    model = AutoModelForCausalLM.from_pretrained(args.reference, dtype=torch.float32)
    same, whole, margins, apart = 0, 0, [], []
    for prompt, ours, logprobs in drawn:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        theirs = logits[range(len(ours)), ours]
        missed = [(logits.max(-1).values - theirs)[i].item() for i in (logits.argmax(-1) != torch.tensor(ours)).nonzero().flatten()]
        same += len(ours) - len(missed)
        whole += not missed
        margins += missed
        apart += (theirs - torch.tensor(logprobs)).abs().tolist()
    total = sum(len(ours) for _, ours, _ in drawn)
    print(f"| answers | tokens that transformers draws too | {same} of {total} |")
    print(f"| answers | whole answers the same | {whole} of {len(drawn)} |")
    print(f"| answers | largest margin of another token | {max(margins, default=0):.4f} |")
    print(f"| answers | log-probabilities apart: mean, largest | {sum(apart) / total:.4f}, {max(apart):.3f} |")
    return max(margins, default=0) <= MARGIN_MAX


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tidemill")
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("reference", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--llama", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--skip", choices=["tokens", "answers"])
    args = parser.parse_args()
    good = True
    print(f"`{args.gguf.name}`\n\n| part | figure | |\n|---|---|---|")
    with real.cluster(args.tidemill, args.gguf) as server:
        for part in (tokens, answers):
            if part.__name__ != args.skip:
                good &= part(args, server)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
