"""A trained model, tried as its users would: a cluster is started on it, a fixed set of requests is sent, and a page of figures printed.

    real.py TIDEMILL MODEL [PART ...]     TIDEMILL: the program; MODEL: a GGUF file, a directory, a hub id, or whatever `up --model` takes

Parts: chat, tools, structured, turns, summaries, judge, eval (default: all). Standard output is Markdown; progress goes to standard error.
The page tells a model from a better one; what it holds the server to is less: every request is answered, every forced call and every
structured answer is valid, and each turn finds the whole of the prompt before it in the cache. The exit status says whether that held.
"""

import contextlib
import itertools
import json
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

BLOCK = 16
READY_S = 900
REQUEST_S = 600
# Every EVAL_EVERY-th of the golden cases: they are in order of their kinds.
EVAL_EVERY = 8
CONFIG = """
[safety]
[safety.judge]
model = "real"
deadline_ms = 60000
[context]
strategy = "summary"
"""
HELD_OUT = pathlib.Path(__file__).parents[1] / "safety/corpus/held-out.txt"

QUESTIONS = [
    ("What is the capital of France? Answer with one word.", "paris"),
    ("Which planet is known as the red planet? Answer with one word.", "mars"),
    ("What is 12 + 30? Answer with the number only.", "42"),
    ("Translate the word `water` into Spanish. Answer with one word.", "agua"),
    ("What is the opposite of `hot`? Answer with one word.", "cold"),
    ("How many days does a week have? Answer with the number only.", "7"),
    ("Which language has the keyword `fn` and the tool `cargo`? Answer with one word.", "rust"),
    ("What does `len([1, 2, 3])` return in Python? Answer with the number only.", "3"),
    ("Name the chemical symbol of gold. Answer with the symbol only.", "au"),
    ("Write a Python function `add(a, b)` that returns their sum.", "return a + b"),
]


def function(name, description, **properties):
    schema = {key: {"type": kind, "description": words} for key, (kind, words) in properties.items()}
    parameters = {"type": "object", "properties": schema, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function("get_weather", "The weather in a city, now.", city=("string", "The city's name")),
    function("add_event", "Adds an event to the user's calendar.", title=("string", "What happens"), day=("string", "Which day of the week")),
    function("convert", "Converts an amount of money.", amount=("number", "How much"), to=("string", "Three letters of the currency")),
]
# The question, the tool that answers it (none: an answer in words is right), and an argument that the call must have.
ERRANDS = [
    ("What is the weather in Oslo?", "get_weather", ("city", "oslo")),
    ("Is it raining in Lima right now?", "get_weather", ("city", "lima")),
    ("Put `dentist` into my calendar on Tuesday.", "add_event", ("day", "tuesday")),
    ("I play chess on Friday. Add that to my calendar.", "add_event", ("day", "friday")),
    ("Convert 250 dollars to EUR.", "convert", ("amount", "250")),
    ("How much is 40 pounds in JPY?", "convert", ("amount", "40")),
    ("Say hello.", None, None),
    ("What is two plus two?", None, None),
    ("Write a sentence about the sea.", None, None),
    ("Thank you, that is all.", None, None),
]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"enum": ["Oslo", "Lima", "Cairo", "Seoul"]}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PEOPLE = list(itertools.product([("Ada", 36), ("Karl", 61)], ["Oslo", "Lima", "Cairo", "Seoul"]))

TALK = [
    "Hello. My name is Ingrid, and my cat is called Biscuit.",
    "Suggest a name for a second cat.",
    "What should I feed a kitten?",
    "How often should it eat?",
    "Write one sentence about cats and boats.",
    "Which colours can cats see?",
    "What is a tide mill?",
    "When does it turn?",
    "Write a Python line that prints the numbers from 1 to 5.",
    "Now from 5 to 1.",
    "What is a list comprehension?",
    "Show one with squares.",
    "What is the time complexity of binary search?",
    "And of bubble sort?",
    "Name three sorting algorithms.",
    "Which is stable?",
    "What does HTTP stand for?",
    "And TLS?",
    "Say goodbye in Norwegian.",
    "What is my name, and what is my first cat called?",
]
REMEMBERED = "ingrid", "biscuit"


class Failed(Exception):
    pass


class Server:
    def __init__(self, url, admin):
        self.url, self.admin = url, admin
        self.model = self.get("/models")["data"][0]["id"]

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path, body):
        """The status, and the answer."""
        return self.send(self.url + path, body)

    def send(self, url, body):
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def chat(self, messages, max_tokens=200, **fields):
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        status, answer = self.post("/chat/completions", body)
        if status != 200:
            raise Failed(f"POST /chat/completions: {status}: {answer}")
        return answer["choices"][0], answer["usage"], answer

    def stream(self, text, max_tokens=200):
        """Seconds to the first token and between tokens, and the text."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(self.url + "/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        begun, first, said, tokens = time.monotonic(), None, "", 0
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if usage := event.get("usage"):
                    tokens = usage["completion_tokens"]
                for choice in event["choices"]:
                    if content := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        last = time.monotonic()
                        said += content
        if first is None:
            raise Failed(f"no text in the answer to {text!r}")
        return first - begun, (last - first) / max(tokens - 1, 1), said

    def metric(self, pattern):
        """The sum of all series whose name and labels match."""
        with urllib.request.urlopen(self.admin + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))


def chat(server):
    """Ten questions with a known answer."""
    right, firsts = 0, []
    for question, answer in QUESTIONS:
        first, _, said = server.stream(question)
        right += answer in said.lower()
        firsts.append(first)
    gaps = [server.stream(f"Tell a story about {hero}.", 100)[1] for hero in ("a miller", "a fisher", "a ferry")]
    yield "answers with the expected word", f"{right} of {len(QUESTIONS)}"
    yield "time to the first token, median", f"{statistics.median(firsts):.2f} s"
    yield "tokens/s of one stream, median", f"{1 / statistics.median(gaps):.1f}"


def tools(server):
    """Ten errands with three tools: `required` must call, `auto` may."""
    for choice in "required", "auto":
        valid = named = given = silent = 0
        errands = [errand for errand in ERRANDS if choice == "auto" or errand[1]]
        for text, tool, argument in errands:
            answer, _, _ = server.chat(text, tools=TOOLS, tool_choice=choice)
            calls = answer["message"].get("tool_calls") or []
            if not calls:
                silent += tool is None
                if choice == "required":
                    raise Failed(f"no call though `tool_choice` is `required`: {text!r}")
                continue
            call = calls[0]["function"]
            arguments = json.loads(call["arguments"])
            known = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in TOOLS}
            valid += sorted(arguments) == sorted(known[call["name"]])
            named += call["name"] == tool
            if call["name"] == tool:
                key, value = argument
                given += str(arguments.get(key, "")).lower().removesuffix(".0") == value
        wanted = sum(tool is not None for _, tool, _ in errands)
        yield f"`{choice}`: the right tool", f"{named} of {wanted}"
        yield f"`{choice}`: and the right argument", f"{given} of {wanted}"
        if choice == "required":
            yield "`required`: calls with just the arguments of the schema", f"{valid} of {wanted}"
            if valid < wanted:
                raise Failed("a forced call does not follow its schema")
        else:
            yield "`auto`: answered in words where no tool is needed", f"{silent} of {len(errands) - wanted}"


def structured(server):
    """Eight sentences about a person, each to be read into a schema."""
    right = 0
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for (name, age), city in PEOPLE:
        text = f"{name}, who is {age} years old, has lived in {city} for ten years. Extract name, age and city as JSON."
        answer, _, _ = server.chat(text, response_format=form)
        person = json.loads(answer["message"]["content"])
        kinds = [type(person[key]) for key in PERSON["required"]]
        if sorted(person) != sorted(PERSON["required"]) or kinds != [str, int, str] or person["city"] not in PERSON["properties"]["city"]["enum"]:
            raise Failed(f"an answer does not follow its schema: {person}")
        right += person == {"name": name, "age": age, "city": city}
    yield "answers that follow the schema", f"{len(PEOPLE)} of {len(PEOPLE)}"
    yield "all three values right", f"{right} of {len(PEOPLE)}"


def turns(server):
    """A chat of twenty turns, sent whole each time."""
    messages, before, shares, begun = [], 0, [], time.monotonic()
    for text in TALK:
        messages.append({"role": "user", "content": text})
        answer, usage, _ = server.chat(messages, max_tokens=80)
        messages.append({"role": "assistant", "content": answer["message"]["content"]})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if cached < before // BLOCK * BLOCK:
            raise Failed(f"{cached} tokens were cached, and the prompt before had {before}")
        before = usage["prompt_tokens"]
        shares.append(cached / before)
    yield "prompt of the last turn", f"{before} tokens"
    yield "cached share of the prompts: 2nd turn, median, last", f"{shares[1]:.2f}, {statistics.median(shares[1:]):.2f}, {shares[-1]:.2f}"
    yield "the last answer knows both names of the first turn", "yes" if all(name in messages[-1]["content"].lower() for name in REMEMBERED) else "no"
    yield "seconds for all turns", f"{time.monotonic() - begun:.0f}"


def summaries(server):
    """The same chat as a stored conversation of which eight turns fit: a summary has to tell of the rest."""
    status, made = server.post("/conversations", {"instructions": "You are a helpful assistant. Answer in one sentence."})
    if status != 200:
        raise Failed(f"POST /conversations: {status}: {made}")
    states, tokens, id = [], 0, made["id"]
    for text in TALK:
        wish = {"conversation": id, "context": {"strategy": "summary", "turns_max": 8}}
        answer, usage, _ = server.chat(text, max_tokens=60, **wish)
        summary = usage["tidemill"]["context"].get("summary") or {}
        states.append(summary.get("state", "none"))
        tokens = summary.get("tokens", 0) or tokens
    kept = server.get(f"/conversations/{id}").get("summary") or {}
    counted = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    yield "turns by the state of their summary", counted
    yield "tokens of the last summary that was given", tokens
    yield "it names Ingrid, Biscuit", ", ".join("yes" if name in kept.get("text", "").lower() else "no" for name in REMEMBERED)
    yield "the last answer names Ingrid, Biscuit", ", ".join("yes" if name in answer["message"]["content"].lower() else "no" for name in REMEMBERED)


def sentences():
    """The first three of each line of the held-out corpus, and whether they are harmful."""
    category = None
    for line in HELD_OUT.read_text().splitlines():
        line = line.strip()
        if found := re.fullmatch(r"\[(\w+)\]", line):
            category = found[1]
        elif line and not line.startswith("#"):
            parts = [part[1:-1].split("|") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", line)]
            for words in itertools.islice(itertools.product(*parts), 3):
                yield "".join(words), category != "harmless"


def judge(server):
    """The held-out sentences of the safety checks, with the model itself as the last stage."""
    asked = server.metric("tidemill_safety_model_seconds_count")
    blocked = server.metric(r'tidemill_safety_blocks_total\{.*stage="model"')
    refused = {True: 0, False: 0}
    total = {True: 0, False: 0}
    for text, harmful in sentences():
        status, answer = server.post("/chat/completions", {"model": server.model, "messages": [{"role": "user", "content": text}], "max_tokens": 1})
        if status not in (200, 400):
            raise Failed(f"{status} for {text!r}: {answer}")
        total[harmful] += 1
        refused[harmful] += status == 400
    yield "harmful sentences refused", f"{refused[True]} of {total[True]}"
    yield "harmless sentences refused", f"{refused[False]} of {total[False]}"
    yield "sentences that the classifier left to the model", f"{server.metric('tidemill_safety_model_seconds_count') - asked:.0f}"
    stage = server.metric(r'tidemill_safety_blocks_total\{.*stage="model"') - blocked
    yield "refused by the model", f"{stage:.0f}"


def evaluation(server, tidemill):
    """Every eighth of the golden cases that come with Tidemill."""
    with tempfile.TemporaryDirectory() as directory:
        cases = subprocess.run([tidemill, "eval", "cases"], capture_output=True, text=True, check=True).stdout.splitlines()[::EVAL_EVERY]
        path = pathlib.Path(directory, "cases.jsonl")
        path.write_text("\n".join(cases) + "\n")
        command = [tidemill, "eval", "run", "--url", server.url, "--model", server.model, "--cases", path, "--concurrency", "4", "--json"]
        command += ["--results", pathlib.Path(directory, "eval.sqlite"), "--gate-score", "0", "--deadline-s", "600", "--max-tokens", "200"]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise Failed(f"tidemill eval run: status {run.returncode}: {run.stderr}")
    result = json.loads(run.stdout)
    tags = {case["id"]: case["tags"][0] for case in map(json.loads, cases)}
    by_tag = {}
    for case in result["cases"]:
        if case["error"]:
            raise Failed(f"the golden case {case['id']}: {case['error']}")
        by_tag.setdefault(tags[case["id"]], []).append(case["score"])
    yield "score", f"{result['score']:.3f} of {len(cases)} cases"
    yield "by kind", ", ".join(f"{tag} {statistics.mean(scores):.2f}" for tag, scores in by_tag.items())


@contextlib.contextmanager
def cluster(tidemill, model):
    with tempfile.TemporaryDirectory() as data:
        config = pathlib.Path(data, "coordinator.toml")
        config.write_text(CONFIG)
        command = [tidemill, "up", "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--model", model, "--served-model-name", "real"]
        command += ["--data", data, "--coordinator-config", config, "--safety", "--log", "warn", "--ready-s", str(READY_S)]
        log = pathlib.Path(data, "log")
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, text=True)
        try:
            ready = next((line for line in process.stdout if line.startswith("ready ")), None)
            if ready is None:
                raise Failed(f"tidemill up: it ended before it was ready: {log.read_text()}")
            admin = re.findall(r"operators' port (http://\S+)", log.read_text())[-1]
            yield Server(ready.split()[1].rstrip("/"), admin.rstrip("/"))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def main():
    tidemill, model, *names = sys.argv[1:]
    version = subprocess.run([tidemill, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    good, begun = True, time.monotonic()
    with cluster(tidemill, model) as server:
        print(f"`{pathlib.PurePath(model).name}`, {version}, {platform.machine()}; ready after {time.monotonic() - begun:.0f} s.\n")
        parts = {part.__name__: part for part in (chat, tools, structured, turns, summaries, judge)}
        parts["eval"] = lambda server: evaluation(server, tidemill)
        print("| part | figure | |\n|---|---|---|")
        for name in names or parts:
            print(f"{name} …", file=sys.stderr)
            begun = time.monotonic()
            try:
                for figure, value in parts[name](server):
                    print(f"| {name} | {figure} | {value} |", flush=True)
            except Failed as error:
                good = False
                print(f"| {name} | **failed** | {error} |", flush=True)
            print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
