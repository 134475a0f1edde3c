"""An encoder served here, and the same one by sentence-transformers on the same cores: how alike their embeddings are, and tokens per second.

    encoders.py TIDEMILL MODEL [ROUNDS]     MODEL: a directory of sentence-transformers; it takes `pip install sentence-transformers`

A thousand sentences out of this repository's own pages. Both have all cores, and compute by turns; each round's figures are shown, because
this machine's speed changes. The server's time contains HTTP, JSON and tokenization, as the library's contains its tokenization.
"""

import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

SENTENCES = 1000
AT_ONCE = 64
ROOT = pathlib.Path(__file__).parents[1]


def sentences():
    text = " ".join(path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")))
    text = re.sub(r"```.*?```|\|[^\n]*|[#*`]", " ", text, flags=re.S)
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.:;?!])\s+", text)]
    return [part for part in found if 20 <= len(part) <= 600][:SENTENCES]


def embed(url, texts):
    """The embeddings, and the tokens of all texts."""
    rows, tokens = [], 0
    for start in range(0, len(texts), AT_ONCE):
        request = urllib.request.Request(url + "/embeddings", json.dumps({"input": texts[start : start + AT_ONCE]}).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            body = json.load(answer)
        rows += [data["embedding"] for data in body["data"]]
        tokens += body["usage"]["prompt_tokens"]
    return rows, tokens


def main():
    tidemill, model = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    import sentence_transformers
    import torch

    library = sentence_transformers.SentenceTransformer(model, device="cpu")
    texts = sentences()
    command = [tidemill, "up", "--http", "127.0.0.1:0", "--model", model, "--served-model-name", "encoder", "--log", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True)
    try:
        url = next(line for line in process.stdout if line.startswith("ready ")).split()[1].rstrip("/")
        rows, tokens = embed(url, texts)
        theirs = library.encode(texts, batch_size=AT_ONCE, normalize_embeddings=True)
        cosines = [float(torch.tensor(a) @ torch.tensor(b)) for a, b in zip(rows, theirs)]
        print(f"{len(texts)} sentences, {tokens} tokens, {torch.get_num_threads()} threads of torch {torch.__version__}, sentence-transformers {sentence_transformers.__version__}")
        print(f"cosine: {min(cosines):.6f} at least, {statistics.mean(cosines):.6f} on average")
        ratios = []
        for nth in range(1, rounds + 1):
            begun = time.monotonic()
            embed(url, texts)
            ours = tokens / (time.monotonic() - begun)
            begun = time.monotonic()
            library.encode(texts, batch_size=AT_ONCE, normalize_embeddings=True)
            theirs = tokens / (time.monotonic() - begun)
            ratios.append(ours / theirs)
            print(f"round {nth}: {ours:8.0f} tokens/s here, {theirs:8.0f} there, x {ratios[-1]:.2f}")
        print(f"median x {statistics.median(ratios):.2f}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


if __name__ == "__main__":
    main()
