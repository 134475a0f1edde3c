"""Conversations in PostgreSQL: two coordinators share them, and chats go on without them while the server is away."""

import os
import pathlib
import shutil
import socket
import subprocess
import time

import openai
import pytest
from conftest import running_cluster
from clusters import wait_until

# The server refuses to run as root: then it runs as nobody.
NOBODY = 65534 if os.geteuid() == 0 else None


def program(name):
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return found[-1] if found else shutil.which(name) or pytest.fail("`make setup-test` installs postgresql")


class Server:
    def __init__(self, directory):
        self.directory = directory
        if NOBODY:
            os.chown(directory, NOBODY, NOBODY)
        self.run("initdb", "--auth", "trust", "--username", "tide", "--no-sync", "-D", directory / "data")
        self.go_on()

    def command(self, name, *arguments):
        return [program(name), *arguments], {"cwd": self.directory, "user": NOBODY, "group": NOBODY, "extra_groups": [] if NOBODY else None}

    def run(self, name, *arguments):
        command, how = self.command(name, *arguments)
        return subprocess.run(command, check=True, capture_output=True, **how)

    def go_on(self):
        command, how = self.command("postgres", "-D", self.directory / "data", "-k", self.directory, "-c", "listen_addresses=")
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **how)
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.run("pg_isready", "-h", self.directory)
            except subprocess.CalledProcessError:
                assert time.monotonic() < deadline, "the server does not begin"
                time.sleep(0.05)

    def stop(self):
        self.run("pg_ctl", "stop", "-m", "immediate", "-D", self.directory / "data")
        self.process.wait(60)


@pytest.fixture(scope="module")
def server():
    # A socket's path may not be longer than some 100 characters, which pytest's own directories may have.
    directory = pathlib.Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    server = Server(directory)
    yield server
    if server.process.poll() is None:
        server.stop()
    shutil.rmtree(directory)


def two_ports():
    while True:
        with socket.socket() as one, socket.socket() as next:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_coordinators_share_conversations_and_chats_outlive_the_server(server, tmp_path):
    config = tmp_path / "coordinator.toml"
    config.write_text(f'store = "postgres:///postgres?host={server.directory}&user=tide"\n')
    port = two_ports()
    flags = ["--coordinator", "2", "--coordinator-config", str(config), "--prefill", "0"]
    with running_cluster(*flags, http=f"127.0.0.1:{port}"):
        first, second = (
            openai.OpenAI(base_url=f"http://127.0.0.1:{port + n}/v1", api_key="unused", max_retries=0, timeout=60) for n in range(2)
        )

        def say(client, conversation, said, context="steps", **parameters):
            return client.chat.completions.with_raw_response.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": said}],
                max_tokens=4,
                extra_body={"conversation": conversation, "context": context},
                **parameters,
            )

        wish = {"strategy": "summary", "turns_max": 4}
        long = say(first, "new", "Turn 1.").parse().conversation["id"]
        for turn in (2, 3, 4):
            say(first, long, f"Turn {turn}.", context=wish)
        summary = lambda client: client.conversations.retrieve(long).to_dict().get("summary")  # noqa: E731
        wait_until(lambda: summary(second))
        assert summary(second) == summary(first), "what one coordinator summarized, all have"
        told = say(second, long, "Turn 5.", context=wish).parse().usage.tidemill["context"]["summary"]
        assert (told["state"], told["turns"]) == ("given", 3)
        id = say(first, "new", "One.").parse().conversation["id"]
        assert say(second, id, "Two.").parse().conversation == {"id": id, "stored": True}
        assert first.conversations.retrieve(id).messages == 4
        streamed = say(first, id, "Half a turn?", stream=True).parse()
        server.stop()
        alone = say(second, id, "Three.")
        assert alone.headers["x-tidemill-not-stored"] and alone.parse().choices[0].message.content
        assert alone.parse().conversation["stored"] is False
        began = say(first, "new", "Four.")
        assert began.headers["x-tidemill-not-stored"] and began.parse().conversation["id"] is None
        told = [told for chunk in streamed if (told := getattr(chunk, "conversation", None))]
        assert len(told) == 1 and told[0]["stored"] in (True, False), "it may have ended before the server did"
        for call in [lambda: first.conversations.retrieve(id), lambda: first.conversations.create()]:
            with pytest.raises(openai.InternalServerError):
                call()
        server.go_on()
        assert say(first, id, "Five.").parse().conversation == {"id": id, "stored": True}
        items = list(second.conversations.items.list(id, order="asc"))
        texts = [item.content[0].text for item in items if item.role == "user"]
        assert texts == ["One.", "Two."] + ["Half a turn?"] * told[0]["stored"] + ["Five."]
        assert [item.role for item in items] == ["user", "assistant"] * (len(items) // 2)
