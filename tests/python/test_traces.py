"""Traces, as a collector of OpenTelemetry's receives them: its own messages, over HTTP."""

import contextlib
import http.server
import itertools
import threading
import time

import openai
import pytest
from clusters import Cluster, wait_until
from conftest import running_cluster
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MESSAGES = [{"role": "user", "content": "Tell of the tide."}]


class Receiver:
    """A collector: takes traces with the right token, or says no."""

    def __init__(self):
        self.spans, self.bodies, self.broken = [], 0, False
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.bodies += 1
                good = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                good &= self.headers["authorization"] == "Bearer of-the-test"
                if good and not receiver.broken:
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if good and not receiver.broken else 503)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request):
        for resource in request.resource_spans:
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            assert names["service.name"] == "tidemill" and names["service.instance.id"] == "coordinator-0"
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def wait(self, holds, seconds=20):
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.05)
        return found

    def trace(self, trace):
        """All spans of a trace, by name."""
        of = lambda: {span.name: span for span in self.spans if span.trace_id.hex() == trace}
        return self.wait(lambda: (spans := of()) and any(not span.parent_span_id or span.parent_span_id.hex() == PARENT for span in spans.values()) and spans)


def attributes(span):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@contextlib.contextmanager
def tracing(tmp_path, share=0.0, callers=True):
    """A collector, and the coordinator's settings that send traces there."""
    receiver = Receiver()
    (tmp_path / "token").write_text("of-the-test\n")
    section = f'[traces]\nurl = "{receiver.url}"\nshare = {share}\ncallers = {str(callers).lower()}\ntoken = "{tmp_path}/token"\n'
    try:
        yield receiver, section
    finally:
        receiver.server.shutdown()


@contextlib.contextmanager
def traced_cluster(tmp_path, **sampling):
    with tracing(tmp_path, **sampling) as (receiver, section):
        cluster = Cluster(tmp_path, section)
        try:
            yield cluster, receiver, openai.OpenAI(base_url=cluster.url, api_key="none", max_retries=0)
        finally:
            cluster.stop()


@pytest.fixture
def headers():
    return {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def test_a_request_is_one_trace_from_queue_to_last_token(tmp_path, headers):
    config = tmp_path / "coordinator.toml"
    with contextlib.ExitStack() as ends:
        receiver, section = ends.enter_context(tracing(tmp_path))
        config.write_text(section)
        # A prefill worker computes every full block.
        url = ends.enter_context(running_cluster("--coordinator-config", str(config), "--local-tail-tokens", "0"))
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        # Until each has met the others, the decode worker computes prompts.
        others = ({"role": "user", "content": f"{number} ebb " * 100} for number in itertools.count())
        ask = lambda: client.chat.completions.create(model=model, messages=[next(others)], max_tokens=1)
        wait_until(lambda: ask().usage.tidemill["tokens"]["prefill"] > 0)
        # An answer that is drawn may end early.
        whole = {"ignore_eos": True}
        messages = [{"role": "user", "content": "tide " * 200}]
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, stream=True, extra_headers=headers, extra_body=whole
        )
        assert list(stream)
        spans = receiver.trace(TRACE)
        root, answer = spans["POST /v1/chat/completions"], spans[f"chat {model}"]
        assert root.parent_span_id.hex() == PARENT and answer.parent_span_id == root.span_id
        assert attributes(root)["http.response.status_code"] == 200 and attributes(root)["tidemill.request_id"].startswith("req_")
        said = attributes(answer)
        assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == model
        assert said["gen_ai.usage.output_tokens"] == 20 and said["gen_ai.usage.input_tokens"] > 200
        assert {"prefill", "decode"} <= spans.keys(), spans.keys()
        phases = [span for span in spans.values() if span.parent_span_id == answer.span_id]
        assert attributes(spans["prefill"])["tidemill.worker"].startswith("prefill-")
        assert attributes(spans["decode"])["tidemill.worker"].startswith("decode-")
        for span in phases:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano, span.name
        assert spans["prefill"].end_time_unix_nano <= spans["decode"].start_time_unix_nano
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60


def test_a_trace_says_what_was_asked_for(tmp_path):
    with traced_cluster(tmp_path, share=1.0) as (_, receiver, client):
        model = client.models.list().data[0].id
        client.completions.create(model=model, prompt="The tide", max_tokens=2)
        client.embeddings.create(model=model, input="The tide")
        for operation in ("text_completion", "embeddings"):
            said = lambda: [attributes(span) for span in receiver.spans if span.name == f"{operation} {model}"]
            assert receiver.wait(said)[0]["gen_ai.operation.name"] == operation


def test_only_what_is_asked_for_or_went_wrong_is_kept(tmp_path, headers):
    # By its id, which its caller gave it, a trace is in the half that is kept or in the other one, as this one is.
    assert int(TRACE[16:], 16) >= 1 << 63
    with traced_cluster(tmp_path, share=0.5, callers=False) as (_, receiver, client):
        model = client.models.list().data[0].id
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2, extra_headers=headers)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=-1, extra_headers=headers)
        kept = TRACE[:16] + "0000000000000001"
        later = {"traceparent": f"00-{kept}-{PARENT}-01"}
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2, extra_headers=later)
        # Traces are sent in the order in which they ended.
        receiver.trace(kept)
        # The list of models has an id of its own, which may be in either half.
        ours = {span.trace_id.hex() for span in receiver.spans} & {TRACE, kept}
        assert ours == {kept}, [span.name for span in receiver.spans]
    with traced_cluster(tmp_path, share=1.0, callers=False) as (_, receiver, client):
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2)
        receiver.wait(lambda: any(span.name == "POST /v1/chat/completions" for span in receiver.spans))


def test_a_collector_that_says_no_costs_traces_and_no_answers(tmp_path, headers):
    with traced_cluster(tmp_path) as (cluster, receiver, client):
        model = client.models.list().data[0].id
        receiver.broken = True
        for _ in range(3):
            client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2, extra_headers=headers)
        receiver.wait(lambda: receiver.bodies)
        receiver.wait(lambda: "sending traces failed" in "".join(cluster.log))
        receiver.broken = False
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2, extra_headers=headers)
        receiver.trace(TRACE)
        receiver.wait(lambda: "takes traces again" in "".join(cluster.log))
        assert "".join(cluster.log).count("sending traces failed") == 1
