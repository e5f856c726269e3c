"""The command line: what it prints for requests, ids and text, and how it refuses bad input."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from k3_sglang.chat.__main__ import main
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment

BODY = {"messages": [{"role": "user", "content": "hi <|sep|>"}], "thinking": False}


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODY), encoding="utf-8")
    return str(path)


def test_render_prints_the_prompt_or_its_segments(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", request_file]) == 0
    assert capsys.readouterr().out.startswith('<|open|>message role="user"<|sep|>hi <|sep|><|close|>message<|sep|>')
    assert main(["render", "--segments", request_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ['control "<|open|>"', 'text    "message"']
    assert 'text    "hi <|sep|>"' in lines


def test_tokens_prints_ids_or_counts(
    request_file: str, toy: K3Tokenizer, toy_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", "--vocabulary", str(toy_directory), request_file]) == 0
    ids = json.loads(capsys.readouterr().out)
    assert toy.decode(ids).endswith("<|open|>response<|sep|>")
    assert main(["tokens", "--counts", "--vocabulary", str(toy_directory), request_file]) == 0
    counts = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert counts == {"prompt": str(len(ids)), "control": "9", "text": str(len(ids) - 9)}


def pixel(width: int, height: int) -> str:
    """A PNG as a data URL."""
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def test_images_are_shown_by_their_size_as_far_as_the_request_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"

    def write(url: str) -> None:
        part = {"type": "image_url", "image_url": {"url": url}}
        path.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}), encoding="utf-8")

    write(pixel(30, 20))
    assert main(["render", str(path)]) == 0
    assert "<|media_begin|>image 30x20<|media_content|><|media_pad|><|media_end|>" in capsys.readouterr().out
    write(f"file://{path}")
    assert main(["render", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: messages[0].content[0]: image source 'file://")


def test_parse_takes_ids_or_text(
    tmp_path: Path, toy: K3Tokenizer, toy_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Plan.<|close|>think<|sep|><|open|>response<|sep|>Hi.<|close|>response<|sep|><|close|>message<|sep|>"
    spoken, ids = tmp_path / "spoken.txt", tmp_path / "ids.json"
    spoken.write_text(text, encoding="utf-8")
    ids.write_text(json.dumps(toy.encode_segments([Segment(text, True)])))
    for arguments in (["--text", str(spoken)], ["--vocabulary", str(toy_directory), str(ids)]):
        assert main(["parse", *arguments]) == 0
        turn = json.loads(capsys.readouterr().out)
        assert (turn["reasoning"], turn["content"], turn["finished"]) == ("Plan.", "Hi.", True)


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["render"], "{", "not JSON"),
        (["render"], "[]", "not a JSON object"),
        (["render"], '{"messages": []}', "messages: the list is empty"),
        (["tokens"], json.dumps(BODY), "--vocabulary is missing"),
        (["tokens", "--vocabulary", "nowhere"], json.dumps(BODY), "does not exist"),
        (["parse", "--vocabulary", "TOY"], "{}", "not a JSON list of token ids"),
        (["parse", "--vocabulary", "TOY"], "[99999]", "outside the vocabulary"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    toy_directory: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    content: str,
    message: str,
) -> None:
    path = tmp_path / "input"
    path.write_text(content, encoding="utf-8")
    assert main([str(toy_directory) if part == "TOY" else part for part in arguments] + [str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", [["render"], ["parse", "--text"]])
@pytest.mark.parametrize(("data", "message"), [(b"\xff{", "not UTF-8"), (b"\xed\xa0\x80", "not UTF-8")])
def test_bytes_that_are_no_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], data: bytes, message: str
) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    assert main([*command, str(path)]) == 2
    assert message in capsys.readouterr().err


def test_what_no_output_can_say_is_escaped_and_what_is_too_deep_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input"
    path.write_text('\ufeff{"messages": [{"role": "user", "content": "\\ud800"}]}', encoding="utf-8")
    assert main(["render", str(path)]) == 0
    assert main(["render", "--segments", str(path)]) == 0
    assert capsys.readouterr().out.count("\\ud800") == 2
    path.write_text("[" * 100_000)
    assert main(["render", str(path)]) == 2
    assert capsys.readouterr().err == "error: the input is nested too deeply; flatten it\n"
    path.write_text(json.dumps({**BODY, "image_sizes": 5}))
    assert main(["render", "--lenient", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: image_sizes: got 5")


def test_a_reader_that_stops_and_an_interrupt_are_no_errors(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x\n" * 200_000}]}))
    command = [sys.executable, "-m", "k3_sglang.chat", "render"]
    with subprocess.Popen(
        [*command, str(path)], cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reading:
        assert reading.stdout is not None and reading.stderr is not None
        assert reading.stdout.readline()
        reading.stdout.close()
        assert reading.stderr.read() == b""
        assert reading.wait(60) == 0
    code = (
        "import io, sys\n"
        "class Interrupted(io.BytesIO):\n"
        "    def read(self, *_): raise KeyboardInterrupt\n"
        "sys.stdin = io.TextIOWrapper(Interrupted())\n"
        "from k3_sglang.chat.__main__ import main\n"
        "sys.exit(main(['render']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


def test_it_runs_as_a_module_from_standard_input_without_torch_or_sglang(repository: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['chat', 'render']; "
        "sys.modules.update(torch=None, sglang=None, xgrammar=None, transformers=None); "
        "runpy.run_module('k3_sglang.chat', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, input=json.dumps(BODY), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("<|open|>response<|sep|>\n")


def test_importing_the_chat_package_loads_no_heavy_module(repository: Path) -> None:
    code = (
        "import sys, pkgutil, importlib, k3_sglang.chat as chat\n"
        "for module in pkgutil.iter_modules(chat.__path__): importlib.import_module(f'k3_sglang.chat.{module.name}')\n"
        "print(sorted({'torch', 'sglang', 'xgrammar', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
