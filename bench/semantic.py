"""The semantic cache's precision and recall with an encoder that a cluster serves.

    semantic.py TIDEMILL CURVE MODEL [OPTION…]     CURVE: target/release/examples/semantic_curve; OPTION: --svg FILE, --wrong

`tidemill up` serves MODEL, a directory of an encoder such as all-MiniLM-L6-v2, gives the embeddings of all sentences of the two sets of pairs
(`gateway/tests/semantic`), one request after the other, and ends. CURVE compares them as the cache does.
"""

import contextlib
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


def embedded(url, text):
    request = urllib.request.Request(url + "/embeddings", json.dumps({"input": text}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"][0]["embedding"]


@contextlib.contextmanager
def served(tidemill, model):
    """The address of a cluster that serves an encoder meanwhile."""
    command = [tidemill, "up", "--http", "127.0.0.1:0", "--model", model, "--served-model-name", "encoder", "--log", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True)
    try:
        yield next(line for line in process.stdout if line.startswith("ready ")).split()[1].rstrip("/")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def report(program, rows, options):
    """Has the example print what these embeddings of its texts find."""
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "embeddings.json"
        path.write_text(json.dumps(rows))
        subprocess.run([program, "--embeddings", path, *options], check=True)


def main():
    tidemill, curve, model, *options = sys.argv[1:]
    texts = json.loads(subprocess.run([curve, "--sentences"], capture_output=True, check=True).stdout)
    rows, times = [], []
    with served(tidemill, model) as url:
        for text in texts:
            begun = time.monotonic()
            rows.append(embedded(url, text))
            times.append((time.monotonic() - begun) * 1000)
    print(f"an embedding of one question over HTTP: {statistics.median(times):.1f} ms, p99 {statistics.quantiles(times, n=100)[98]:.1f} ms")
    report(curve, rows, options)


if __name__ == "__main__":
    main()
