"""Endpoints for operators: liveness, readiness, models and metrics."""

import httpx
import openai
import pytest


def test_it_is_live_and_ready(root):
    assert httpx.get(f"{root}/health").status_code == 200
    assert httpx.get(f"{root}/ready").status_code == 200


def test_models_are_listed(client, model):
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (model, "model")
    assert isinstance(listed.created, int)


def test_http2_without_tls_by_the_official_client(url, model):
    """Requests over one connection, streamed and not, and a client that leaves in the middle of one."""
    question = [{"role": "user", "content": "What rises and falls?"}]
    with httpx.Client(http1=False, http2=True, limits=httpx.Limits(max_connections=1)) as http:
        client = openai.OpenAI(base_url=url, api_key="none", http_client=http, max_retries=0)

        def ask(stream):
            answer = client.chat.completions.create(model=model, messages=question, max_tokens=8, temperature=0, stream=stream)
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
            return answer.choices[0].message.content

        answers = {ask(number % 2 == 0) for number in range(8)}
        assert len(answers) == 1
        with client.chat.completions.create(model=model, messages=question, max_tokens=200, stream=True) as left:
            next(left)
        assert ask(False) in answers, "the connection goes on"
        response = http.get(f"{url}/models")
        assert response.http_version == "HTTP/2"
        evil = http.get(f"{url}/models", headers={"host": "evil.example"})
        assert evil.status_code == 403, "the name stands in the request's pseudo-header"


def test_every_role_is_a_member_of_its_own_process(cluster):
    members = cluster()["members"]
    assert {"decode", "kvpool", "prefill"} <= {member["role"] for member in members}
    assert len({member["pid"] for member in members}) == len(members)
    assert len({member["epoch"] for member in members}) == len(members)


@pytest.mark.parametrize(
    "name",
    [
        "ttft_seconds",
        "ttft_predicted_seconds",
        "tpot_seconds",
        "itl_seconds",
        "e2e_seconds",
        "requests_running",
        "requests_waiting",
        "requests_total",
        "kv_blocks",
        "prefix_tokens_total",
    ],
)
def test_metrics_have_their_names(root, complete, name):
    complete("The tide fills the pool.", max_tokens=4)
    metrics = httpx.get(f"{root}/metrics")
    assert metrics.status_code == 200
    samples = [line for line in metrics.text.splitlines() if line.startswith(f"tidemill_{name}")]
    assert samples, metrics.text


def test_requests_are_counted(root, complete):
    def counted():
        lines = httpx.get(f"{root}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("tidemill_requests_total"))

    before = counted()
    complete("The wheel turns.", max_tokens=2)
    assert counted() == before + 1
