"""Two agents without their screens, codex and Claude Code: what they do with our answers.

The model writes the calls that these programs offer it; they run them in a folder of their own and
send the results back. What they send is checked against what clients.md says of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlxlite.errors import EngineFault
from mlxlite.types import Finish
from tests.clients_npm.conftest import NPM, SCRIPTS, Desk, Door
from tests.clients_npm.stage import Line, Seen, Stage, call

pytestmark = pytest.mark.npm

# Its own launcher: `bin/claude` is only made by a script at the installation, and we run none.
CLAUDE = NPM / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
TASK = "Make a file of two lines."
DONE = "All done."
BROKEN = Line(call("exec_command", cmd="x" * 40)[:60], Finish.ERROR, EngineFault("the step failed"))


def events(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def grows(prompts: list[str]) -> bool:
    """Each prompt goes on where the one before it ended, so that its prefix can be reused."""
    return all(later.startswith(prompt) for prompt, later in pairwise(prompts))


# --------------------------------------------------------------------------------------- codex

CONFIG = """\
model = "tiny"
model_provider = "mlxlite"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false  # else it asks for a list of them
[model_providers.mlxlite]
name = "mlxlite"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "MLXLITE_KEY"
stream_max_retries = 1
"""


class Codex:
    def __init__(self, stage: Stage, desk: Desk) -> None:
        self.desk = desk
        desk.variables["MLXLITE_KEY"] = "x"
        self.config = desk.home / ".codex" / "config.toml"
        self.config.parent.mkdir()
        self.config.write_text(CONFIG.format(url=stage.url))

    def run(self, *arguments: str, fails: bool = False) -> list[dict[str, Any]]:
        """`codex exec ...`; the events that it prints."""
        done = self.desk.run("codex", "exec", *arguments, "--json", "--skip-git-repo-check")
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return events(done)


@pytest.fixture
def codex(stage: Stage, desk: Desk) -> Codex:
    return Codex(stage, desk)


def items(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in found if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def test_codex_works_and_goes_on_later(stage: Stage, codex: Codex) -> None:
    """A call alone, two beside a text and a thought, and a second process on the same thread."""
    stage.plays(
        [
            call("exec_command", cmd="printf 'one\\ntwo\\n' > made.txt"),
            "<think>Look.</think>Let me look. "
            + call("exec_command", cmd="cat made.txt")
            + "\n"
            + call("exec_command", cmd="exit 3"),
            DONE,
            "It has two lines.",
        ]
    )
    found = codex.run(TASK)
    assert (codex.desk.work / "made.txt").read_text() == "one\ntwo\n"
    ran = {item["command"]: item for item in items(found, "command_execution")}
    assert len(ran) == 3
    assert [item["exit_code"] for name, item in ran.items() if "exit 3" in name] == [3]
    assert [item["aggregated_output"] for name, item in ran.items() if "cat" in name] == [
        "one\ntwo\n"
    ]
    assert [item["text"] for item in items(found, "reasoning")] == ["Look."]
    assert [item["text"] for item in items(found, "agent_message")] == ["Let me look. ", DONE]
    (usage,) = (event["usage"] for event in found if event["type"] == "turn.completed")
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0

    later = codex.run("resume", "--last", "How many lines has it?")
    assert [item["text"] for item in items(later, "agent_message")] == ["It has two lines."]
    assert [(seen.method, seen.path) for seen in stage.log.all] == [("POST", "/v1/responses")] * 4
    assert stage.log.refused() == []
    assert grows(stage.engine.prompts)
    check_what_codex_sends(stage.log.all)


def check_what_codex_sends(sent: list[Seen]) -> None:
    """Clients.md, Requests 6 to 8: hints, tools that are no functions, messages in a row."""
    for seen in sent:
        body, headers = seen.body, seen.headers
        assert headers["authorization"] == "Bearer x" and headers["accept"] == "text/event-stream"
        assert "zstd" in headers["accept-encoding"]
        assert "instructions" not in body and "previous_response_id" not in body
        assert (body["stream"], body["store"]) == (True, False)
        assert body["include"] == ["reasoning.encrypted_content"] and "summary" in body["reasoning"]
        assert {"client_metadata", "prompt_cache_key", "parallel_tool_calls"} <= set(body)
        assert {"function", "namespace", "web_search"} <= {tool["type"] for tool in body["tools"]}
        first, second = body["input"][:2]
        assert first["role"] == second["role"] == "developer"
        assert len(first["content"][0]["text"]) > 15_000


def test_codex_starts_an_agent(stage: Stage, codex: Codex) -> None:
    """The function is in a namespace, and codex finds it only by both names."""

    def part(prompt: str) -> str:
        if "spawn_agent" not in prompt.rpartition(TASK)[2]:
            return call("spawn_agent", message="Say hello.") if TASK in prompt else "Hello."
        return DONE

    stage.plays(part)
    found = codex.run(TASK)
    (started,) = items(found, "collab_tool_call")
    assert (started["tool"], started["status"]) == ("spawn_agent", "completed")
    assert len(started["receiver_thread_ids"]) == 1
    # An agent that is done in time is told to the first, who answers once more.
    assert {item["text"] for item in items(found, "agent_message")} == {DONE}
    results = [
        item
        for seen in stage.log.all
        for item in seen.body["input"]
        if item["type"] == "function_call"
    ]
    assert {item["call_id"] for item in results} == {results[0]["call_id"]}
    assert (results[0]["name"], results[0]["namespace"]) == ("spawn_agent", "multi_agent_v1")


def test_codex_reaches_two_tool_servers(stage: Stage, codex: Codex) -> None:
    """Both have a tool of the same name; each is a namespace to codex."""
    script = SCRIPTS / "tool_server.py"
    with codex.config.open("a") as config:
        for name in ("first", "second"):
            arguments = json.dumps([str(script), name])
            config.write(f"[mcp_servers.{name}]\ncommand = {json.dumps(sys.executable)}\n")
            config.write(f"args = {arguments}\n")
    both = call("look_up", word="a") + call("mcp__second__look_up", word="b")
    stage.plays([both, DONE])
    found = items(codex.run(TASK), "mcp_tool_call")
    told = {item["server"]: item["result"]["content"][0]["text"] for item in found}
    assert told == {"first": "first knows a", "second": "second knows b"}
    assert grows(stage.engine.prompts)


@pytest.mark.parametrize(
    ("line", "asked", "message"),
    [
        pytest.param(Line("Half", Finish.LENGTH), 1, "reason: max_output_tokens", id="length"),
        pytest.param(BROKEN, 2, "the step failed", id="failure"),
    ],
)
def test_codex_says_why_it_ended(
    stage: Stage, codex: Codex, line: Line, asked: int, message: str
) -> None:
    """An answer that is cut is not asked for again, one that broke is, as codex was told to."""
    stage.plays(lambda prompt: line)
    found = codex.run(TASK, fails=True)
    assert found[-1]["type"] == "turn.failed" and message in found[-1]["error"]["message"]
    assert len(stage.log.all) == asked


# --------------------------------------------------------------------------------- claude code


class Claude:
    def __init__(self, stage: Stage, desk: Desk) -> None:
        self.desk = desk
        desk.variables |= {
            "ANTHROPIC_BASE_URL": stage.url,
            "ANTHROPIC_API_KEY": "x",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",  # else it refuses to skip its permissions as root
        }

    def run(self, *arguments: str, fails: bool = False) -> list[dict[str, Any]]:
        """`claude -p ...`; the events that it prints."""
        flags = ("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")
        done = self.desk.run("node", CLAUDE, "-p", *arguments, *flags)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return events(done)


@pytest.fixture
def claude(stage: Stage, desk: Desk) -> Claude:
    return Claude(stage, desk)


def blocks(found: list[dict[str, Any]], kind: str, role: str = "assistant") -> list[dict[str, Any]]:
    said = [event["message"]["content"] for event in found if event["type"] == role]
    return [block for content in said for block in content if block["type"] == kind]


def test_claude_works_and_goes_on_later(stage: Stage, claude: Claude) -> None:
    """Two tools in one turn, a thought before a third, and a second process on the same chat."""
    made = claude.desk.work / "made.txt"
    text = 'one "1"\ntwo \U0001f642\n'
    stage.plays(
        [
            "Let me write it. "
            + call("Write", file_path=str(made), content=text)
            + "\n"
            + call("Bash", command="wc -l < made.txt; exit 3", description="Count lines"),
            "<think>Look.</think>" + call("Read", file_path=str(made)),
            DONE,
            "It has two lines.",
        ]
    )
    found = claude.run(TASK)
    assert made.read_text() == text
    assert [block["name"] for block in blocks(found, "tool_use")] == ["Write", "Bash", "Read"]
    assert [block["thinking"] for block in blocks(found, "thinking")] == ["Look."]
    assert [block["text"] for block in blocks(found, "text")] == ["Let me write it. ", DONE]
    results = blocks(found, "tool_result", "user")
    assert [bool(block.get("is_error")) for block in results] == [False, True, False]
    assert "two \U0001f642" in str(results[2]["content"])
    assert (found[-1]["subtype"], found[-1]["result"]) == ("success", DONE)

    later = claude.run("How many lines has it?", "--continue")
    assert later[-1]["result"] == "It has two lines."
    assert [(seen.method, seen.path) for seen in stage.log.all] == [("POST", "/v1/messages")] * 4
    assert stage.log.refused() == []
    assert grows(stage.engine.prompts[:3])
    check_what_claude_sends(stage.log.all, stage.engine.prompts)


def check_what_claude_sends(sent: list[Seen], prompts: list[str]) -> None:
    """Clients.md, Requests 1 and 3 to 7."""
    for seen in sent:
        body = seen.body
        assert seen.query == {"beta": "true"} and seen.headers["x-api-key"] == "x"
        assert seen.headers["accept"] == "application/json" and body["stream"] is True
        assert "anthropic-version" in seen.headers and "anthropic-beta" in seen.headers
        assert body["max_tokens"] >= 32_000
        assert body["thinking"]["type"] == "adaptive" and "display" in body["thinking"]
        assert {"context_management", "metadata", "output_config"} <= set(body)
        assert body["system"][0]["text"].startswith("x-anthropic-billing-header:")
        assert "cache_control" in body["system"][1]
        assert any("$schema" in tool["input_schema"] for tool in body["tools"])
        assert any(tool.get("defer_loading") for tool in body["tools"])
    systems = [
        message["content"]
        for seen in sent
        for message in seen.body["messages"]
        if message["role"] == "system"
    ]
    assert {type(content) for content in systems} == {str, list}, "as blocks, then as a string"
    assert not any("x-anthropic-billing-header" in prompt for prompt in prompts)


def test_claude_loads_a_tool_and_starts_an_agent(stage: Stage, claude: Claude) -> None:
    """A reference to a tool in a result; an agent that asks while the main one does."""
    greet = {"description": "Greet", "prompt": "Say hello.", "subagent_type": "general-purpose"}
    search = call("ToolSearch", query="select:WebFetch", max_results=1)
    lines = iter([search, call("Agent", **greet)])
    stage.plays(lambda prompt: next(lines, DONE) if TASK in prompt else "Hello.")
    found = claude.run(TASK)
    assert found[-1]["result"] == DONE
    assert stage.log.refused() == []
    told = [
        part
        for result in blocks(found, "tool_result", "user")
        for part in result["content"]
        if isinstance(part, dict)
    ]
    assert {"type": "tool_reference", "tool_name": "WebFetch"} in told
    agents = [event for event in found if event["type"] == "assistant" and "agent_id" in event]
    assert [agent["message"]["content"][0]["text"] for agent in agents] == ["Hello."]
    loaded = {tool["name"] for tool in stage.log.all[-1].body["tools"]}
    assert "WebFetch" in loaded


def test_claude_asks_again_without_a_stream(stage: Stage, claude: Claude) -> None:
    """Clients.md, Streams 6: after a broken stream the whole turn is asked for plainly."""
    stage.plays([BROKEN, DONE])
    found = claude.run(TASK)
    assert found[-1]["result"] == DONE
    assert [seen.body.get("stream", False) for seen in stage.log.all] == [True, False]


# ------------------------------------------------------------------------------ a small window


@pytest.fixture(scope="module")
def narrow(door: Door, tiny_folder: Path) -> Iterator[Stage]:
    with Stage(tiny_folder, context=8000) as stage:
        yield stage


def test_a_prompt_too_long_is_not_sent_again(narrow: Stage, desk: Desk) -> None:
    """Both know what the refusal means (clients.md, Requests 2), and say it in their own words."""
    narrow.plays(DONE)
    found = Codex(narrow, desk).run(TASK, fails=True)
    assert "context window" in found[-1]["error"]["message"]
    assert [seen.status for seen in narrow.log.all] == [400]
    narrow.log.clear()
    end = Claude(narrow, desk).run(TASK, fails=True)[-1]
    assert end["is_error"] and end["terminal_reason"] == "prompt_too_long"
    assert [seen.status for seen in narrow.log.all] == [400]
    assert narrow.engine.prompts == [], "nothing reached the engine"
