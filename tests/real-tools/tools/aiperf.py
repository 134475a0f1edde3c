"""aiperf: two users, prompts of its own making, all of the protocols that stream."""

import json
import os
import pathlib
import subprocess

REQUESTS = 6
# Offline, it takes the name of a directory for one of a hub.
for name in "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE":
    os.environ.pop(name, None)
for kind in "chat", "completions", "responses", "messages":
    command = ["aiperf", "profile", "--model", os.environ["MODEL"], "--url", os.environ["SERVER"], "--endpoint-type", kind, "--streaming"]
    command += ["--api-key", os.environ["OPENAI_API_KEY"], "--tokenizer", os.environ["TOKENIZER"], "--use-server-token-count"]
    command += ["--concurrency", "2", "--request-count", str(REQUESTS), "--isl", "100", "--osl", "16", "--extra-inputs", "ignore_eos:true"]
    command += ["--output-artifact-dir", kind, "--ui", "none"]
    subprocess.run(command, check=True)
    (report,) = pathlib.Path(kind).rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == REQUESTS, figures
    assert not figures.get("error_request_count") and not figures.get("error_summary"), figures
    # It reads the usage of responses that end by themselves, and not of those that are cut.
    if kind != "responses":
        assert figures["output_sequence_length"]["avg"] == 16, figures["output_sequence_length"]
print(f"{REQUESTS} requests by each of chat, completions, responses and messages")
