"""genai-bench: two users who stream chats, embeddings, and ranks, as it asks vLLM's server for them."""

import json
import os
import pathlib
import subprocess

REQUESTS = 6
RUNS = [("text-to-text", os.environ["MODEL"], "D(100,16)"), ("text-to-embeddings", "embedder", "E(32)"), ("text-to-rerank", "ranker", "R(16,16)")]
for task, model, scenario in RUNS:
    command = ["genai-bench", "benchmark", "--api-backend", "vllm", "--api-base", os.environ["SERVER"], "--api-key", os.environ["OPENAI_API_KEY"]]
    command += ["--model-api-key", os.environ["OPENAI_API_KEY"], "--api-model-name", model, "--model-tokenizer", os.environ["TOKENIZER"]]
    command += ["--task", task, "--traffic-scenario", scenario, "--max-time-per-run", "2", "--max-requests-per-run", str(REQUESTS)]
    command += ["--num-concurrency", "2"] if task == "text-to-text" else ["--batch-size", "2"]
    command += ["--experiment-folder-name", task, "--log-dir", "logs"]
    subprocess.run(command, check=True)
    reports = [json.loads(path.read_text()) for path in pathlib.Path(task).rglob(f"*{scenario[0]}*.json") if "metadata" not in path.name]
    metrics = [report["aggregated_metrics"] for report in reports if "aggregated_metrics" in report]
    assert metrics and all(m["num_completed_requests"] >= REQUESTS and not m["num_error_requests"] for m in metrics), metrics
print(f"{REQUESTS} requests by each of chat, embeddings and ranks")
