"""How often the old message or fact that a question needs is found, by words, by vectors and by both, with an encoder that a cluster serves.

    retrieval.py TIDEMILL RECALL MODEL [OPTION…]     RECALL: target/release/examples/retrieval_recall; OPTION: --missed

`tidemill up` serves MODEL, a directory of an encoder such as all-MiniLM-L6-v2, gives the embeddings of all texts and questions of the two sets
(`gateway/tests/retrieval`), and ends. RECALL ranks the texts as the context of a chat does.
"""

import json
import subprocess
import sys

from semantic import embedded, report, served


def main():
    tidemill, recall, model, *options = sys.argv[1:]
    texts = json.loads(subprocess.run([recall, "--texts"], capture_output=True, check=True).stdout)
    with served(tidemill, model) as url:
        rows = [embedded(url, text) for text in texts]
    report(recall, rows, options)


if __name__ == "__main__":
    main()
