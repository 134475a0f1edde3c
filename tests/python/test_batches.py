"""Files and batches with the official client: completed, cancelled, invalid, another tenant's, and across a crash of the coordinator."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time
from collections import Counter

import httpx
import openai
import pytest
from conftest import MODEL
from clusters import Cluster, client, complete, tidemill

CONFIG = """
batch_concurrency = 4
batch_files_max = 40
[tier.slow]
requests_per_minute = 3
classes = ["default", "flex"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    data = tmp_path_factory.mktemp("batches")
    cluster = Cluster(data, CONFIG)
    cluster.key("first", "premium")
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


@pytest.fixture
def ours(cluster, request):
    with client(cluster, cluster.key(re.sub(r"\W", "_", request.node.name)[:64], "premium")) as ours:
        yield ours


def line(custom_id, url="/v1/completions", **body):
    given = {"model": "llama3", "prompt": [1, 2, 3, 4], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or given}


def upload(client, lines):
    content = "".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines)
    return client.files.create(purpose="batch", file=("requests.jsonl", content.encode()))


def start(client, lines, endpoint="/v1/completions", **fields):
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client, batch, within_s=120):
    deadline = time.monotonic() + within_s
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, f"it takes too long: {batch}"
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def records(client, file_id):
    """The records by custom_id, each of which must be unique."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines), "each request is answered once"
    return by_id


BODIES = {
    "/v1/chat/completions": {"model": "llama3", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/completions": {"model": "llama3", "prompt": "hi", "max_tokens": 5},
    "/v1/embeddings": {"model": "llama3", "input": ["hi", "there"]},
    "/v1/responses": {"model": "llama3", "input": "hi", "max_output_tokens": 16},
}


@pytest.fixture(scope="module")
def limited(cluster):
    """A client, and its batch of three requests. The upload and the batch itself were the first of three requests a minute; the minute passes
    while other tests run."""
    with client(cluster, cluster.key("slow", "slow")) as slow:
        yield slow, start(slow, [line(str(n)) for n in range(3)])


def test_a_batch_waits_for_its_tenants_quota(limited):
    ours, batch = limited
    partly(ours, batch, 1)
    # The batch shares the quota with the tenant's requests.
    with pytest.raises(openai.RateLimitError):
        complete(ours)
    assert ours.batches.retrieve(batch.id).request_counts.completed == 1


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_is_answered(ours, endpoint):
    file = upload(ours, [line(str(n), endpoint, **BODIES[endpoint]) for n in range(6)])
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "requests.jsonl", "processed")
    batch = ours.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"night": "1"})
    assert (batch.object, batch.endpoint, batch.completion_window, batch.metadata) == ("batch", endpoint, "24h", {"night": "1"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = ended(ours, batch)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.request_counts.to_dict() == {"total": 6, "completed": 6, "failed": 0}
    answers = records(ours, batch.output_file_id)
    assert set(answers) == {str(n) for n in range(6)}
    for answer in answers.values():
        assert answer["id"].startswith("batch_req_") and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"].startswith("req_")
        assert answer["response"]["body"]["model"] == "llama3"
    kept = ours.files.retrieve(batch.output_file_id)
    assert kept.purpose == "batch_output" and kept.bytes == len(ours.files.content(kept.id).content)


def test_it_says_what_a_live_request_is_told_and_counts_like_one(cluster, ours):
    live = complete(ours, max_tokens=8).choices[0].text
    body = {"model": "llama3", "prompt": [1, 2, 3, 4], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    batch = ended(ours, start(ours, [line(str(n), **body) for n in range(3)]))
    answers = records(ours, batch.output_file_id)
    assert [answer["response"]["body"]["choices"][0]["text"] for answer in answers.values()] == [live] * 3
    tenant = "test_it_says_what_a_live_request_is_told_and_counts_like_one"
    events = [json.loads(event) for event in cluster.usage("--tenant", tenant, "--format", "events").splitlines()]
    of_batch = {event["id"]: event for event in events if event["class"] == "batch"}
    assert set(of_batch) == {answer["response"]["request_id"] for answer in answers.values()}
    assert {event["output_tokens"] for event in of_batch.values()} == {8}
    assert [event["class"] for event in events if event["id"] not in of_batch] == ["interactive"]


def test_what_is_wrong_with_the_file_is_told_line_by_line(ours):
    lines = [line("a"), "{", line("a"), {"custom_id": "b"}, line("c", "/v1/embeddings"), {**line("d"), "custom_id": None}]
    batch = ended(ours, start(ours, lines))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    told = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert told == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "missing_required_parameter", "method"),
        (5, "url_mismatch", "url"),
        (6, "missing_required_parameter", "custom_id"),
    ]
    assert batch.failed_at and all(error.message for error in batch.errors.data)
    empty = ended(ours, start(ours, [""]))
    assert [error.code for error in empty.errors.data] == ["empty_file"]


def test_a_request_that_fails_does_not_stop_the_others(ours):
    model = {"prompt": [1], "max_tokens": 2}
    lines = [line("good"), line("no such model", model="gpt", **model), line("streams", model="llama3", stream=True, **model)]
    lines.append(line("too long", model="llama3", prompt=[1] * 20_000, max_tokens=2))
    batch = ended(ours, start(ours, lines))
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 3}
    assert set(records(ours, batch.output_file_id)) == {"good"}
    errors = {id: record["response"] for id, record in records(ours, batch.error_file_id).items()}
    assert {id: (error["status_code"], error["body"]["error"]["param"]) for id, error in errors.items()} == {
        "no such model": (404, "model"),
        "streams": (400, "stream"),
        "too long": (400, "prompt"),
    }


def test_what_a_batch_is_made_of_is_checked_at_once(ours):
    file = upload(ours, [line("a")])
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong, param in [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "x" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            ours.batches.create(**(good | wrong))
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        ours.batches.create(**(good | {"input_file_id": "file-none"}))
    with pytest.raises(openai.BadRequestError) as refused:
        ours.files.create(purpose="assistants", file=b"x")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError):
        ours.files.create(purpose="batch", file=b"")
    for form in [b"", b"nonsense", b"--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{}"]:
        headers = {"content-type": "multipart/form-data; boundary=x", "authorization": f"Bearer {ours.api_key}"}
        assert httpx.post(f"{ours.base_url}files", content=form, headers=headers).status_code == 400
    output = ended(ours, ours.batches.create(**good)).output_file_id
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        ours.batches.create(**(good | {"input_file_id": output}))


def test_files_and_batches_are_listed_and_deleted(ours):
    files = [upload(ours, [line("a")]) for _ in range(3)]
    assert [file.id for file in ours.files.list()] == [file.id for file in reversed(files)]
    assert [file.id for file in ours.files.list(limit=2, order="asc")] == [file.id for file in files], "page after page"
    batches = [ended(ours, start(ours, [line("a")])) for _ in range(3)]
    assert [batch.id for batch in ours.batches.list(limit=2)] == [batch.id for batch in reversed(batches)]
    outputs = {batch.output_file_id for batch in batches}
    assert {file.id for file in ours.files.list(purpose="batch_output")} == outputs
    for file in ours.files.list():
        assert ours.files.delete(file.id).deleted
    assert not list(ours.files.list())
    for call in [ours.files.retrieve, ours.files.content, ours.files.delete]:
        with pytest.raises(openai.NotFoundError):
            call(files[0].id)
    assert ours.batches.retrieve(batches[0].id).status == "completed"


def test_a_file_can_have_an_end(ours):
    file = ours.files.create(purpose="batch", file=b"{}", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    batch = ended(ours, start(ours, [line("a")], output_expires_after={"anchor": "created_at", "seconds": 7200}))
    output = ours.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 7200


def test_somebody_elses_files_and_batches_are_not_found(cluster, ours):
    batch = ended(ours, start(ours, [line("a")]))
    theirs = client(cluster, cluster.key("theirs", "premium"))
    for call, id in [
        (theirs.files.retrieve, batch.input_file_id),
        (theirs.files.content, batch.output_file_id),
        (theirs.files.delete, batch.input_file_id),
        (theirs.batches.retrieve, batch.id),
        (theirs.batches.cancel, batch.id),
    ]:
        with pytest.raises(openai.NotFoundError):
            call(id)
    with pytest.raises(openai.NotFoundError):
        theirs.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert not list(theirs.files.list()) and not list(theirs.batches.list())
    with pytest.raises(openai.AuthenticationError):
        client(cluster, "tm_" + "0" * 64).files.list()


def test_there_is_so_much_room(cluster, ours):
    for _ in range(40):
        last = upload(ours, [line("a")])
    with pytest.raises(openai.BadRequestError) as refused:
        upload(ours, [line("a")])
    assert refused.value.code == "no_room_for_files"
    ours.files.delete(last.id)
    upload(ours, [line("a")])


def slow(count):
    """A request that runs long enough for something to happen in the meantime."""
    body = {"model": "llama3", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    return [line(str(n), prompt=[n + 1, 2, 3], **body) for n in range(count)]


def partly(client, batch, least=3):
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch.id)).request_counts.completed < least:
        assert time.monotonic() < deadline and batch.status in ("validating", "in_progress"), batch
        time.sleep(0.02)
    return batch


def test_a_cancelled_batch_keeps_what_it_has(ours):
    batch = start(ours, slow(400))
    with pytest.raises(openai.ConflictError):
        ours.files.delete(batch.input_file_id)
    partly(ours, batch)
    cancelled = ours.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled") and cancelled.cancelling_at
    batch = ended(ours, batch)
    assert batch.status == "cancelled" and batch.cancelled_at
    counts = batch.request_counts
    assert 3 <= counts.completed < 400 and counts.total == 400
    assert len(records(ours, batch.output_file_id)) == counts.completed
    assert ours.batches.cancel(batch.id).status == "cancelled"
    ours.files.delete(batch.input_file_id)
    over = ended(ours, start(ours, [line("a")]))
    with pytest.raises(openai.BadRequestError, match="too late"):
        ours.batches.cancel(over.id)


def test_a_batch_goes_on_when_its_tenants_quota_does(limited):
    ours, batch = limited
    batch = ended(ours, batch, within_s=300)
    assert (batch.status, batch.request_counts.failed) == ("completed", 0)
    assert batch.completed_at - batch.created_at >= 55
    # A download counts as a request: it is the third of this minute, once the first line's minute is over.
    assert len(records(ours.with_options(max_retries=15), batch.output_file_id)) == 3
    with pytest.raises(openai.RateLimitError):
        records(ours, batch.output_file_id)


def test_a_batch_ends_with_its_key(cluster):
    secret = cluster.key("revoked", "premium")
    ours, other = client(cluster, secret), client(cluster, cluster.key("revoked", "premium"))
    batch = start(ours, slow(400))
    partly(ours, batch)
    assert cluster.keys("revoke", secret[:15]).returncode == 0
    batch = ended(other, batch)
    assert batch.status == "cancelled" and batch.request_counts.completed < 400
    assert batch.errors.data[0].code == "invalid_api_key" and secret[:15] in batch.errors.data[0].message


def test_a_batch_goes_on_after_its_coordinator_was_killed(cluster, ours):
    """Some times in `make test`, KILLS times in a measurement."""
    kills = int(os.environ.get("KILLS", "3"))
    count = 60 * (kills + 1)
    batch = start(ours, slow(count))
    for n in range(kills):
        wait_for(lambda n=n: partly(ours, batch, 40 * (n + 1)))
        pid = cluster.coordinator_pid()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: cluster.coordinator_pid() not in (None, pid))
    batch = wait_for(lambda: ended(ours, batch))
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": count, "completed": count, "failed": 0}
    answers = records(ours, batch.output_file_id)
    assert set(answers) == {str(n) for n in range(count)}
    ran = [json.loads(event)["outcome"] for event in cluster.usage("--tenant", ours_name(cluster, batch), "--format", "events").splitlines()]
    print(f"{kills} kills: {count} requests, each answered once; attempts that ended: {dict(Counter(ran))}")


def ours_name(cluster, batch):
    return json.loads((pathlib.Path(cluster.data) / f"coordinator-0/batches/batches/{batch.id}.json").read_text())["sender"]["tenant"]


def wait_for(call, within_s=120):
    """Retries a call while the coordinator is down."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if (found := call()) is not False:
                return found
        except (openai.APIConnectionError, openai.InternalServerError, OSError):
            pass
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def test_without_a_data_directory_files_are_refused_with_the_reason(tmp_path):
    subprocess.run([tidemill(), "certs", tmp_path / "pki"], check=True, capture_output=True)
    command = [pathlib.Path(tidemill()).parent / "tidemill-coordinator", "--http", "127.0.0.1:0", "--pki", tmp_path / "pki", "--model", MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        try:
            http = re.search(r"listening (http://\S+) ", coordinator.stdout.readline())[1]
            with openai.OpenAI(base_url=http + "/v1", api_key="unused", max_retries=0) as client:
                for call in [lambda: upload(client, [line("a")]), client.files.list, client.batches.list]:
                    with pytest.raises(openai.InternalServerError, match="--data") as refused:
                        call()
                    assert refused.value.status_code == 501 and refused.value.code == "files_not_kept"
        finally:
            coordinator.send_signal(signal.SIGTERM)
            coordinator.wait(60)
