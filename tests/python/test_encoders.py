"""Encoders and cross-encoders: embeddings, ranks and classes as transformers computes them, by the official client and over plain HTTP."""

import base64
import json
import math
import pathlib
import struct

import cohere
import httpx
import openai
import pytest
from conftest import running_cluster

ENCODERS = pathlib.Path(__file__).parents[2] / "model/tests/encoders"


def texts(name):
    return json.loads((ENCODERS / name / "reference.json").read_text())["texts"]


def unit(row):
    size = math.sqrt(sum(x * x for x in row))
    return [x / size for x in row]


def close(found, expected, tolerance=2e-5):
    return len(found) == len(expected) and math.dist(found, expected) <= tolerance


@pytest.fixture(scope="module", params=["bert-mean", "nomic"])
def embedder(request):
    with running_cluster(model=ENCODERS / request.param) as url, openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield request.param, client, client.models.list().data[0].id


@pytest.fixture(scope="module")
def ranker():
    with running_cluster(model=ENCODERS / "xlm-roberta-rank") as url:
        yield url


@pytest.fixture(scope="module")
def classifier():
    with running_cluster(model=ENCODERS / "bert-classes") as url:
        yield url


def test_embeddings_are_those_of_transformers(embedder):
    name, client, model = embedder
    cases = [case for case in texts(name) if isinstance(case["text"], str)]
    answer = client.embeddings.create(model=model, input=[case["text"] for case in cases], encoding_format="float")
    for case, embedding in zip(cases, answer.data):
        assert close(embedding.embedding, unit(case["row"]))
    assert answer.usage.prompt_tokens == sum(len(case["ids"]) for case in cases)
    # The client decodes what it asked for by itself; here are the bytes.
    packed = httpx.post(f"{client.base_url}embeddings", json={"input": cases[0]["text"], "encoding_format": "base64"}).json()
    row = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(row) // 4}f", row) == tuple(answer.data[0].embedding)
    ids = client.embeddings.create(model=model, input=[case["ids"] for case in cases], encoding_format="float")
    assert [data.embedding for data in ids.data] == [data.embedding for data in answer.data]


def test_a_text_alone_has_the_same_bits_as_among_many(embedder):
    name, client, model = embedder
    said = [case["text"] for case in texts(name) if isinstance(case["text"], str)]
    many = client.embeddings.create(model=model, input=said * 20, encoding_format="float")
    for place, text in enumerate(said):
        alone = client.embeddings.create(model=model, input=text, encoding_format="float")
        assert {tuple(data.embedding) for data in many.data[place :: len(said)]} == {tuple(alone.data[0].embedding)}


def test_dimensions_cut_and_scale(embedder):
    name, client, model = embedder
    [case, *_] = texts(name)
    answer = client.embeddings.create(model=model, input=case["text"], dimensions=8, encoding_format="float")
    assert close(answer.data[0].embedding, unit(case["row"][:8]))
    for dimensions in 0, 49:
        with pytest.raises(openai.BadRequestError, match="1 to 48"):
            client.embeddings.create(model=model, input="a", dimensions=dimensions)


def test_no_text_is_a_special_token(embedder):
    name, client, model = embedder
    plain = client.embeddings.create(model=model, input="[SEP] [CLS]")
    assert plain.usage.prompt_tokens > 4, "two special tokens would be four with those around the text"


def test_what_is_too_long_is_refused_or_cut(embedder):
    name, client, model = embedder
    long = "water " * 2000
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=model, input=long)
    assert refused.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model=model, input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 512
    shorter = client.embeddings.create(model=model, input=long, extra_body={"truncate_prompt_tokens": 20})
    assert shorter.usage.prompt_tokens == 20
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        client.embeddings.create(model=model, input=long, extra_body={"truncate_prompt_tokens": 513})


def test_an_encoder_does_not_chat(embedder):
    name, client, model = embedder
    with pytest.raises(openai.BadRequestError, match="reads texts and writes none"):
        client.completions.create(model=model, prompt="a", max_tokens=1)
    for path, body in [("rerank", {"query": "a", "documents": ["b"]}), ("classify", {"input": "a"})]:
        refused = httpx.post(f"{client.base_url}{path}", json=body)
        assert refused.status_code == 400 and "no classifier" in refused.json()["error"]["message"]


def test_documents_are_ranked_as_transformers_scores_them(ranker):
    pairs = [case for case in texts("xlm-roberta-rank") if not isinstance(case["text"], str)]
    for case in pairs:
        query, document = case["text"]
        body = {"query": query, "documents": [document, {"text": document}]}
        answer = httpx.post(f"{ranker}/rerank", json=body).raise_for_status().json()
        assert [result["index"] for result in answer["results"]] == [0, 1], "equal ones keep their order"
        for result in answer["results"]:
            assert result["document"] == {"text": document}
            assert math.isclose(result["relevance_score"], 1 / (1 + math.exp(-case["row"][0])), abs_tol=2e-5)
        assert answer["usage"]["total_tokens"] == 2 * len(case["ids"])
    documents = [f"{word} turns the wheel" for word in ["water", "wind", "a mill", "the tide"]]
    whole = httpx.post(f"{ranker}/rerank", json={"query": "what turns the wheel?", "documents": documents}).json()["results"]
    scores = [result["relevance_score"] for result in whole]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    body = {"query": "what turns the wheel?", "documents": documents, "top_n": 2, "return_documents": False}
    best = httpx.post(f"{ranker}/rerank", json=body).json()["results"]
    assert best == [{key: result[key] for key in ("index", "relevance_score")} for result in whole[:2]]


def test_coheres_client_ranks(ranker):
    root = ranker.removesuffix("/v1")
    documents = [f"{word} turns the wheel" for word in ["water", "wind", "a mill", "the tide"]]
    body = {"query": "what turns the wheel?", "documents": documents}
    model = openai.OpenAI(base_url=ranker, api_key="unused").models.list().data[0].id
    client = cohere.ClientV2(api_key="unused", base_url=root, timeout=60)
    ranked = client.rerank(model=model, top_n=3, **body)
    expected = httpx.post(f"{ranker}/rerank", json=body).json()["results"][:3]
    assert [(one.index, one.relevance_score) for one in ranked.results] == [(one["index"], one["relevance_score"]) for one in expected]
    assert ranked.id and ranked.meta.api_version.version == "2"


def test_servers_of_ranks_are_taken_for_each_other(ranker):
    root = ranker.removesuffix("/v1")
    texts = ["water", "wind"]
    by_score = httpx.post(f"{root}/rerank", json={"query": "a mill", "texts": texts, "return_text": True}).json()
    expected = httpx.post(f"{root}/rerank", json={"query": "a mill", "documents": texts}).json()["results"]
    assert [(one["index"], one["score"], one["text"]) for one in by_score] == [
        (one["index"], one["relevance_score"], one["document"]["text"]) for one in expected
    ]
    raw = httpx.post(f"{root}/rerank", json={"query": "a mill", "texts": texts, "raw_scores": True}).json()
    for one, logit in zip(by_score, raw):
        assert math.isclose(one["score"], 1 / (1 + math.exp(-logit["score"])), abs_tol=1e-6)
    for path in "/score", "/v1/score":
        scored = httpx.post(f"{root}{path}", json={"text_1": "a mill", "text_2": texts}).json()["data"]
        assert {one["index"]: one["score"] for one in scored} == {one["index"]: one["score"] for one in by_score}
    refused = httpx.post(f"{root}/score", json={"text_1": texts, "text_2": texts * 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text_1"


def test_a_long_document_is_cut_and_a_long_query_refused(ranker):
    answer = httpx.post(f"{ranker}/rerank", json={"query": "a mill", "documents": ["water " * 3000]}).json()
    assert answer["usage"]["total_tokens"] == 512
    refused = httpx.post(f"{ranker}/rerank", json={"query": "water " * 600, "documents": ["a"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "query"


def test_odd_requests_to_rank_are_refused(ranker):
    for body, param in [
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ({"documents": ["b"]}, "query"),
    ]:
        refused = httpx.post(f"{ranker}/rerank", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    refused = httpx.post(f"{ranker}/embeddings", json={"input": "a"})
    assert refused.status_code == 400 and "is a classifier" in refused.json()["error"]["message"]


def test_classes_are_those_of_transformers(classifier):
    cases = [case for case in texts("bert-classes") if isinstance(case["text"], str)]
    answer = httpx.post(f"{classifier}/classify", json={"input": [case["text"] for case in cases]}).raise_for_status().json()
    labels = ["no", "perhaps", "yes"]
    for case, found in zip(cases, answer["data"]):
        powers = [math.exp(logit) for logit in case["row"]]
        assert close(found["probs"], [power / sum(powers) for power in powers])
        assert found["label"] == labels[max(range(3), key=lambda label: case["row"][label])] and found["num_classes"] == 3
    assert answer["usage"]["prompt_tokens"] == sum(len(case["ids"]) for case in cases)
    one = httpx.post(f"{classifier}/classify", json={"input": cases[0]["text"]}).json()
    assert one["data"][0]["probs"] == answer["data"][0]["probs"]
    refused = httpx.post(f"{classifier}/rerank", json={"query": "a", "documents": ["b"]})
    assert refused.status_code == 400 and "3 labels" in refused.json()["error"]["message"]
