"""A client that is generated from the served document talks to every route of the clients' port, and answers are as the document says."""

import importlib
import io
import json
import pathlib
import subprocess
import sys

import httpx
import jsonschema
import pytest
from clusters import Cluster
from conftest import MODEL

ENCODERS = pathlib.Path(__file__).parents[2] / "model/tests/encoders"
CONFIG = "[memory]\n"
SETTINGS = """
post_hooks: []
package_name_override: generated
content_type_overrides:
  application/jsonl: text/plain
  application/x-tar: application/octet-stream
"""
CHAT = {"model": "llama3", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "llama3", "prompt": "a", "max_tokens": 2}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    models = [MODEL, *(ENCODERS / name for name in ("bert-mean", "xlm-roberta-rank", "bert-classes"))]
    cluster = Cluster(tmp_path_factory.mktemp("openapi"), CONFIG, "--feedback", "--safety", models=models)
    cluster.secret = cluster.key("acme", "premium")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def document(cluster):
    answer = httpx.get(cluster.url.removesuffix("/v1") + "/openapi.json")
    assert answer.status_code == 200, "it needs no key"
    return answer.json()


def generate_client(document, folder):
    """Makes the package `generated` in a folder, without a warning."""
    (folder / "document.json").write_text(json.dumps(document))
    (folder / "config.yml").write_text(SETTINGS)
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(folder / "document.json"), "--meta", "none"]
    command += ["--config", str(folder / "config.yml"), "--output-path", str(folder / "generated"), "--fail-on-warning"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr


def media_type(answer):
    return answer.headers.get("content-type", "").split(";")[0]


class Caller:
    """Calls operations by their ids through the generated client, and compares answers with the document."""

    def __init__(self, document, package, url, key):
        self.document = document
        self.client = package.AuthenticatedClient(base_url=url, token=key, timeout=60, follow_redirects=True)
        self.operations = {
            operation["operationId"]: operation
            for path in document["paths"].values()
            for operation in path.values()
        }
        self.called = set()

    def model(self, name):
        return getattr(importlib.import_module("generated.models"), name)

    def __call__(self, operation, *path, body=None, status=200, **parameters):
        """Calls an operation, and returns its answer's content."""
        self.called.add(operation)
        described = self.operations[operation]
        module = importlib.import_module(f"generated.api.{described['tags'][0].lower()}.{operation}")
        streams = isinstance(body, dict) and body.get("stream")
        if isinstance(body, dict):
            (media,) = described["requestBody"]["content"].values()
            body = self.model(media["schema"]["$ref"].rsplit("/", 1)[1]).from_dict(body)
        if body is not None:
            parameters["body"] = body
        if streams:
            # Generated functions read whole answers.
            answer = self.client.get_httpx_client().request(**module._get_kwargs(*path, **parameters))
        else:
            answer = module.sync_detailed(*path, client=self.client, **parameters)
            assert answer.parsed is not None or not described["responses"]["200"].get("content"), operation
        assert answer.status_code == status, (operation, answer.content)
        self.check(described["responses"]["200" if status == 200 else "default"], answer)
        return json.loads(answer.content) if media_type(answer) == "application/json" else answer.content

    def check(self, described, answer):
        """Compares an answer with its schema, and a stream's events with theirs."""
        kind = media_type(answer)
        media = described.get("content", {}).get(kind)
        if kind == "application/json":
            self.validate(media["schema"], answer.content)
        elif kind == "text/event-stream":
            lines = answer.content.decode().splitlines()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            assert events
            for event in events:
                if event != "[DONE]":
                    self.validate(media["x-tidemill-event"], event)

    def validate(self, schema, text):
        jsonschema.Draft202012Validator(schema | {"components": self.document["components"]}).validate(json.loads(text))


def generate(call):
    call("create_chat_completion", body=CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True})
    chat = call("create_chat_completion", body=CHAT | {"stream": True}).decode()
    call("resume_chat_completion", json.loads(chat.split("data: ")[1].split("\n")[0])["id"], status=404)
    call("create_completion", body={"model": "llama3", "prompt": "Hello", "max_tokens": 4, "logprobs": 1})
    call("create_completion", body={"model": "llama3", "prompt": "Hello", "max_tokens": 4, "suffix": "a"}, status=400)
    call("create_completion", body={"model": "llama3", "prompt": "Hello", "stream": True})
    call("resume_completion", "cmpl-x", status=404)
    message = CHAT | {"stop_sequences": ["never"]}
    call("create_message", body=message)
    call("create_message", body=message | {"stream": True})
    call("create_message", body=message | {"model": "none"}, status=404)
    call("resume_message", "msg_x", status=404)
    call("count_tokens", body={"model": "llama3", "messages": CHAT["messages"]})


def respond(call):
    asked = {"model": "llama3", "input": "Hello", "max_output_tokens": 16}
    call("create_response", body=asked | {"stream": True})
    response = call("create_response", body=asked)["id"]
    call("retrieve_response", response)
    call("list_input_items", response)
    call("cancel_response", response, status=400)
    call("delete_response", response)
    call("retrieve_response", response, status=404)


def converse(call):
    said = {"type": "message", "role": "user", "content": "Hello"}
    conversation = call("create_conversation", body={"items": [said], "metadata": {"a": "b"}})["id"]
    call("list_conversations")
    call("retrieve_conversation", conversation)
    call("update_conversation", conversation, body={"title": "A title"})
    call("branch_conversation", conversation, body={})
    (item,) = call("create_items", conversation, body={"items": [said]})["data"]
    call("list_items", conversation)
    call("retrieve_item", conversation, item["id"])
    call("delete_item", conversation, item["id"])
    call("export_conversation", conversation)
    call("export_conversations")
    call("create_chat_completion", body=CHAT | {"conversation": conversation, "context": "slide", "memory": True})
    call("delete_conversation", conversation)
    fact = call("create_memory", body={"text": "Lives in Kyoto."})["id"]
    call("list_memories")
    call("retrieve_memory", fact)
    call("delete_memory", fact)
    call("delete_memories")


def read(call):
    call("create_embeddings", body={"model": "bert-mean", "input": ["a", "b"]})
    call("rerank", body={"model": "xlm-roberta-rank", "query": "a", "documents": ["b", {"text": "c"}]})
    asked = {"model": "xlm-roberta-rank", "query": "a", "documents": ["b", "c"]}
    call("rerank_second", body=asked)
    call("rerank_bare", body=asked)
    call("rerank_bare", body={"model": "xlm-roberta-rank", "query": "a", "texts": ["b", "c"]})
    for operation in ["score", "score_bare"]:
        call(operation, body={"model": "xlm-roberta-rank", "text_1": "a", "text_2": ["b", "c"]})
    call("classify", body={"model": "bert-classes", "input": "a"})
    tokens = call("tokenize", body={"model": "llama3", "prompt": "Hello", "return_token_strs": True})["tokens"]
    call("tokenize", body={"model": "llama3", "messages": CHAT["messages"]})
    call("detokenize", body={"model": "llama3", "tokens": tokens})
    call("tokenizer_info", model="llama3")
    call("create_moderation", body={"input": ["a", "b"]})


def batch(call):
    form = call.model("FileForm")
    # So many that the batch has not ended when it is cancelled.
    lines = "\n".join(json.dumps(LINE | {"custom_id": str(number)}) for number in range(500)).encode()
    file = importlib.import_module("generated.types").File(payload=io.BytesIO(lines), file_name="a.jsonl")
    purpose = call.model("FileFormPurpose")("batch")
    stored = call("create_file", body=form(file=file, purpose=purpose))["id"]
    call("list_files")
    call("retrieve_file", stored)
    call("retrieve_file_content", stored)
    begun = call("create_batch", body={"input_file_id": stored, "endpoint": "/v1/completions", "completion_window": "24h"})["id"]
    call("list_batches")
    call("retrieve_batch", begun)
    call("cancel_batch", begun)
    other = call("create_file", body=form(file=importlib.import_module("generated.types").File(io.BytesIO(b"{}"), "b"), purpose=purpose))
    call("delete_file", other["id"])


def look(call):
    (model, *_) = call("list_models")["data"]
    call("retrieve_model", model["id"])
    for operation in ["greet", "health", "ready", "console", "console_with_slash", "console_who", "describe"]:
        call(operation)
    call("console_asset", "app.js")
    answered = call("create_chat_completion", body=CHAT)["id"]
    call("create_feedback", body={"response_id": answered, "rating": "up", "comment": "good"})
    call("create_appeal", body={"appeal_id": "apl_none", "reason": "a"}, status=400)


def test_a_generated_client_talks_to_every_route(cluster, document, tmp_path, monkeypatch):
    generate_client(document, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    call = Caller(document, importlib.import_module("generated"), cluster.url.removesuffix("/v1"), cluster.secret)
    for part in (generate, respond, converse, read, batch, look):
        part(call)
    assert call.called == set(call.operations), "a new route has its call above"


def test_a_client_of_the_operators_port_can_be_generated(cluster, tmp_path):
    generate_client(httpx.get(cluster.admin + "/openapi.json").raise_for_status().json(), tmp_path)


def test_probes_of_models_and_the_reset_of_caches(cluster):
    ready = httpx.get(cluster.admin + "/ready/generate", timeout=60).raise_for_status().json()
    assert [model["model"] for model in ready["models"]] == ["llama3", "bert-mean", "xlm-roberta-rank", "bert-classes"]
    prompt = {"model": "llama3", "prompt": list(range(20, 84)), "max_tokens": 2, "temperature": 0}
    headers = {"authorization": f"Bearer {cluster.secret}"}

    def cached():
        usage = httpx.post(f"{cluster.url}/completions", json=prompt, headers=headers, timeout=60).raise_for_status().json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 and cached() > 0
    reset = httpx.post(cluster.admin + "/reset_prefix_cache", json={}, timeout=60).raise_for_status().json()
    assert "llama3" in reset["models"]
    assert cached() == 0 and cached() > 0
    assert httpx.post(cluster.admin + "/reset_prefix_cache?model=none", json={}).status_code == 404
