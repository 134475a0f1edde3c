"""EvalScope: benchmarks of streamed chats and of completions, and questions with choices by chat and responses."""

import json
import os
import pathlib
import subprocess

REQUESTS = 6
API = ["--model", os.environ["MODEL"], "--api-key", os.environ["OPENAI_API_KEY"]]
for path in "chat/completions", "completions":
    command = ["evalscope", "perf", *API, "--api", "openai", "--url", f"{os.environ['OPENAI_BASE_URL']}/{path}", "--dataset", "random"]
    command += ["--tokenizer-path", os.environ["TOKENIZER"], "--min-prompt-length", "60", "--max-prompt-length", "100", "--stream"]
    command += ["--min-tokens", "16", "--max-tokens", "16", "--parallel", "2", "--number", str(REQUESTS), "--outputs-dir", path, "--no-timestamp"]
    subprocess.run(command, check=True)
    (summary,) = pathlib.Path(path).rglob("benchmark_summary.json")
    figures = json.loads(summary.read_text())
    assert figures["Success Requests"] == REQUESTS and figures["Failed Requests"] == 0, figures

questions = [{"question": f"What is the capital of {land}?", "A": "Oslo", "B": "Lima", "answer": key} for land, key in (("Norway", "A"), ("Peru", "B"))]
pathlib.Path("questions").mkdir()
pathlib.Path("questions/default_val.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
dataset = json.dumps({"general_mcq": {"local_path": "questions"}})
scores = {}
for kind in "openai_api", "openai_responses_api":
    command = ["evalscope", "eval", *API, "--api-url", os.environ["OPENAI_BASE_URL"], "--eval-type", kind]
    command += ["--datasets", "general_mcq", "--dataset-args", dataset]
    command += ["--generation-config", json.dumps({"max_tokens": 30, "temperature": 0}), "--work-dir", kind, "--no-timestamp"]
    subprocess.run(command, check=True)
    (report,) = pathlib.Path(kind, "reports").rglob("*.json")
    scores[kind] = json.loads(report.read_text())["metrics"][0]["score"]
print(f"{REQUESTS} requests by each of chat and completions; scores of {len(questions)} questions: {scores}")
