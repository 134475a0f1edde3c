"""Azure's traces of LLM inference in the format of Mooncake's, which the simulator reads. No prompt has anything in common with another.

    azure_trace.py < AzureLLMInferenceTrace_code.csv > azure_code.jsonl

The files are in github.com/Azure/AzurePublicDataset, `data/` (CC-BY 4.0; Patel et al., "Splitwise", ISCA 2024).
"""

import csv
import datetime
import json
import sys

BLOCK_TOKENS = 512

first, blocks = None, 0
for row in csv.DictReader(sys.stdin):
    # Seven digits of a second are one more than Python reads.
    at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
    first = first or at
    tokens = max(1, int(row["ContextTokens"]))
    count = -(-tokens // BLOCK_TOKENS)
    line = {
        "timestamp": int((at - first).total_seconds() * 1000),
        "input_length": tokens,
        "output_length": max(1, int(row["GeneratedTokens"])),
        "hash_ids": list(range(blocks, blocks + count)),
    }
    blocks += count
    print(json.dumps(line))
