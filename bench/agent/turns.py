"""An agent with tools, of twenty turns, in each protocol: what each turn costs, and how much of its prompt was in the cache.

    turns.py URL [TURNS]        URL: http://HOST:PORT/v1 of a cluster, best with trained weights

The agent looks after a small project: it has a task and five tools, whose results are those of real files in memory. Where a turn ends
without a call, the user says what is next. `expected` is the share of the prompt that the prompt and the answer of the turn before fill,
in whole blocks. The exit status says whether each request was answered with 200, and each found all of the prompt before it.
"""

import json
import sys
import time
import urllib.error
import urllib.request

BLOCK = 16
ANSWER_MAX = 300
# In one of this many turns, the model is free to call a tool or not; in the others it must, as a small model seldom does on its own.
FREE_EVERY = 4
SYSTEM = """You are a careful programmer who works on a small Python project with the tools that you are given. Look at the files before you \
change them. Change one thing at a time, and run the tests after each change. Paths are relative to the project. Call one tool per turn. \
When the task is done, say so in one sentence, and wait for the next one."""
TASKS = [
    "The test of `mean` fails. Find out why, and mend it.",
    "Now add a function `median` beside it, with a test.",
    "Search for all uses of `total`, and tell me where they are.",
    "Write a README.md of three lines about this project.",
    "Run the tests once more, and summarize what was changed.",
]
FILES = {
    "stats.py": "def total(numbers):\n    return sum(numbers)\n\n\ndef mean(numbers):\n    return total(numbers) / (len(numbers) + 1)\n",
    "test_stats.py": "from stats import mean, total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n",
    "pyproject.toml": '[project]\nname = "stats"\nversion = "0.1.0"\n',
}


def tool(name, description, **properties):
    schema = {"type": "object", "properties": {key: {"type": "string", "description": what} for key, what in properties.items()}}
    return name, description, schema | {"required": list(properties), "additionalProperties": False}


TOOLS = [
    tool("list_files", "The names of the files in the project, one per line."),
    tool("read_file", "The text of a file.", path="Which file"),
    tool("write_file", "Replaces a file, or makes a new one.", path="Which file", text="All of its new text"),
    tool("search", "The lines of all files that contain a text.", text="What to look for"),
    tool("run_tests", "Runs the tests, and says which fail."),
]


def run(files, name, arguments):
    """What a tool returns, and whether it failed."""
    try:
        match name:
            case "list_files":
                return "\n".join(sorted(files)), False
            case "read_file":
                return files[arguments["path"]], False
            case "write_file":
                files[arguments["path"]] = arguments["text"]
                return f"wrote {len(arguments['text'])} characters to {arguments['path']}", False
            case "search":
                lines = [f"{path}: {line}" for path, text in sorted(files.items()) for line in text.splitlines() if arguments["text"] in line]
                return "\n".join(lines) or "nothing found", False
            case "run_tests":
                right = "len(numbers) + 1" not in files["stats.py"]
                return ("2 passed" if right else "1 passed, 1 failed: test_mean: assert 1.3333333333333333 == 2"), False
            case other:
                return f"there is no tool {other}", True
    except (KeyError, TypeError) as error:
        return f"{name}: {error!r}", True


class Chat:
    path = "/chat/completions"
    choices = "auto", "required"

    def __init__(self, model):
        self.body = {"model": model, "max_tokens": ANSWER_MAX, "temperature": 0, "messages": [{"role": "system", "content": SYSTEM}]}
        self.body["tools"] = [{"type": "function", "function": dict(zip(("name", "description", "parameters"), t))} for t in TOOLS]

    def say(self, text):
        self.body["messages"].append({"role": "user", "content": text})

    def hear(self, answer):
        message = answer["choices"][0]["message"]
        self.body["messages"].append(message)
        usage = answer["usage"]
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        return calls, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]

    def returned(self, results):
        self.body["messages"] += [{"role": "tool", "tool_call_id": id, "content": text} for id, text, _ in results]


class Responses:
    path = "/responses"
    choices = "auto", "required"

    def __init__(self, model):
        self.body = {"model": model, "max_output_tokens": ANSWER_MAX, "temperature": 0, "instructions": SYSTEM, "input": [], "store": False}
        self.body["tools"] = [{"type": "function"} | dict(zip(("name", "description", "parameters"), t)) for t in TOOLS]

    def say(self, text):
        self.body["input"].append({"role": "user", "content": text})

    def hear(self, answer):
        self.body["input"] += answer["output"]
        usage = answer["usage"]
        calls = [(item["call_id"], item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
        return calls, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]

    def returned(self, results):
        self.body["input"] += [{"type": "function_call_output", "call_id": id, "output": text} for id, text, _ in results]


class Messages:
    path = "/messages"
    choices = {"type": "auto"}, {"type": "any"}

    def __init__(self, model):
        self.body = {"model": model, "max_tokens": ANSWER_MAX, "temperature": 0, "system": SYSTEM, "messages": []}
        self.body["tools"] = [dict(zip(("name", "description", "input_schema"), t)) for t in TOOLS]

    def say(self, text):
        self.body["messages"].append({"role": "user", "content": text})

    def hear(self, answer):
        self.body["messages"].append({"role": "assistant", "content": answer["content"]})
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"] or 0
        calls = [(block["id"], block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
        return calls, usage["input_tokens"] + cached + (usage["cache_creation_input_tokens"] or 0), cached, usage["output_tokens"]

    def returned(self, results):
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text, "is_error": failed} for id, text, failed in results]
        self.body["messages"].append({"role": "user", "content": blocks})


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def object_of(arguments):
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None


def work(protocol, url, turns):
    """Whether all went well."""
    print(f"\n{protocol.path}\n turn  prompt  cached  share  expected  answer  calls                     seconds")
    free, forced = protocol.choices
    files, tasks, before, known, good = dict(FILES), list(TASKS), 0, 0, True
    protocol.say(tasks.pop(0))
    for turn in range(1, turns + 1):
        begun = time.monotonic()
        protocol.body["tool_choice"] = free if turn % FREE_EVERY == 0 else forced
        status, answer = post(url + protocol.path, protocol.body)
        if status != 200:
            print(f"{turn:5}  {status}: {answer}")
            return False
        calls, prompt, cached, said = protocol.hear(answer)
        expected = min(known, prompt) // BLOCK * BLOCK
        names = ", ".join(name for _, name, _ in calls) or "-"
        print(f"{turn:5}  {prompt:6}  {cached:6}  {cached / prompt:5.2f}  {expected / prompt:8.2f}  {said:6}  {names:24}  {time.monotonic() - begun:7.1f}")
        # A template may write a call otherwise than the model did, so the answer itself need not be found.
        good &= cached >= before // BLOCK * BLOCK
        before, known = prompt, prompt + said
        if calls:
            protocol.returned([(id, *run(files, name, object_of(arguments))) for id, name, arguments in calls])
        else:
            protocol.say(tasks.pop(0) if tasks else "Go on: read a file, and say what could be better.")
    return good


def main():
    url, turns = sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with urllib.request.urlopen(url + "/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    results = [work(protocol(model), url, turns) for protocol in (Chat, Responses, Messages)]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
