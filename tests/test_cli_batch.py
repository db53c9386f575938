"""A file of prompts to a file of results: whole lines whatever happens, errors before any time is spent, resumption."""

import json

import pytest

import layerskip
from layerskip.cli import main
from tests.checkpoints import save_tiny

LINES = [
    '"the quick brown fox"',
    '{"prompt": "jumps over", "id": "b", "category": "animals"}',
    '{"messages": [{"role": "user", "content": "hello"}], "id": 3}',
    '{"turns": ["first", "second"]}',
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def model(checkpoint):
    return layerskip.load(checkpoint)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n".join(LINES[:2] + ["", *LINES[2:]]))
    return tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"


@pytest.fixture
def run(capsys, checkpoint, files):
    """Run `layerskip generate` on the files: (exit code, standard output, standard error)."""

    def run(*arguments, output=True):
        capsys.readouterr()
        where = ["--input", files[0], *(["--output", files[1]] if output else [])]
        short = ["--model", checkpoint, "--no-chat", "--max-new-tokens", 8]
        code = main([str(each) for each in ["generate", *short, *where, *arguments]])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def unloadable(monkeypatch):
    """Whatever is refused is refused without the model."""
    monkeypatch.setattr(layerskip, "load", None)


def records(file):
    content = file.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(line) for line in content.splitlines()]


def without_times(record):
    stats = {name: value for name, value in record["stats"].items() if not name.endswith("_s")}
    return {**record, "stats": stats, "settings": {**record["settings"], "seed": None}}


def test_each_kind_of_line(run, files, model):
    code, out, err = run("--assistant-early-exit", 2)
    assert (code, out) == (0, "")
    results = records(files[1])
    inputs = ["the quick brown fox", "jumps over", [{"role": "user", "content": "hello"}], "first"]
    assert [each["text"] for each in results] == [model.generate(each, max_new_tokens=8).text for each in inputs]
    assert [each["line"] for each in results] == [1, 2, 4, 5]
    assert [each.get("id") for each in results] == [None, "b", 3, None]
    assert [each.get("prompt", each.get("messages")) for each in results] == inputs
    assert results[0]["plan"]["exit_layer"] == results[0]["options"]["plan"]["exit_layer"] == 2
    assert 'of lines with "turns" only the first turn is answered' in err
    assert err.splitlines()[-1].startswith("4 prompts, 32 tokens, ")


def test_chat_applies_to_strings(run, files, model):
    assert run("--chat", output=False)[0] == 0
    files[0].write_text(LINES[0])
    _, out, _ = run("--chat", "--system", "be brief", output=False)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]
    assert json.loads(out)["text"] == model.generate(messages, max_new_tokens=8).text


def test_results_without_output_file_go_to_stdout(run):
    code, out, err = run(output=False)
    assert (code, len(out.splitlines())) == (0, 4)
    assert all("text" in json.loads(line) for line in out.splitlines())
    assert "4 prompts" in err


def test_each_line_has_its_own_seed(run, files, model):
    files[0].write_text('"same"\n"same"\n')
    assert run("--do-sample", "--seed", 7)[0] == 0
    results = records(files[1])
    expected = [model.generate("same", max_new_tokens=8, do_sample=True, seed=seed).text for seed in (7, 8)]
    assert [each["text"] for each in results] == expected
    assert [each["settings"]["seed"] for each in results] == [[7], [8]]


BROKEN = {
    "not JSON": ("{prompt: hello}", "not JSON"),
    "a bare word": ("hello", "not JSON"),
    "a number": ("3", "got a int"),
    "no prompt": ('{"text": "hello"}', "the keys ['text']"),
    "two prompts": ('{"prompt": "a", "turns": ["b"]}', "the keys ['prompt', 'turns']"),
    "a prompt that is a list": ('{"prompt": ["hello"]}', 'got prompt ["hello"]'),
    "no turns": ('{"turns": []}', "got turns []"),
    "messages without role": ('{"messages": [{"content": "hello"}]}', "got messages"),
    "not UTF-8": (b'"\xff"', "not JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named_before_the_model_is_loaded(run, files, unloadable, case):
    line, expected = BROKEN[case]
    line = line if isinstance(line, bytes) else line.encode()
    files[0].write_bytes(b'"fine"\n\n' + line + b'\n"fine"\n')
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith(f"error: line 3 of {files[0]}: ")
    assert expected in err
    assert not files[1].exists()


def test_a_file_without_prompts(run, files, unloadable):
    files[0].write_text("\n\n")
    assert "got no prompt in" in run()[2]


@pytest.mark.parametrize("prompt", ["a" * 160, ""])
def test_a_prompt_that_cannot_be_decoded_is_named_before_any_is(run, files, prompt):
    files[0].write_text(f'"fine"\n"{prompt}"\n')
    code, _, err = run()
    assert code == 2
    assert err.startswith(f"error: line 2 of {files[0]}: ")
    assert records(files[1]) == []
    files[0].write_text('"fine"\n')
    assert run()[0] == 0  # the empty file that is left stands in nobody's way


def test_json_is_refused_where_it_has_no_effect(run, files, unloadable):
    code, out, err = run("--json")
    assert (code, out) == (2, "")
    assert err == "error: got --json with --input, whose results are JSON lines anyway; leave out --json.\n"
    assert not files[1].exists()


def test_the_last_line_pools_all_prompts(run, files):
    _, _, err = run("--assistant-early-exit", 2, "--num-assistant-tokens", 3, "--governor", "off")
    parts = [each["stats"] for each in records(files[1])]
    total = {name: sum(part[name] for part in parts) for name in ("new_tokens", "round_tokens", "rounds", "decode_s")}
    drafts = {name: sum(part[name] for part in parts) for name in ("proposed", "accepted")}
    assert err.splitlines()[-1] == (
        f"4 prompts, {total['new_tokens']} tokens, {total['round_tokens'] / total['decode_s']:.1f} tokens/s, "
        f"{total['round_tokens'] / total['rounds']:.2f} tokens per round, "
        f"{drafts['accepted'] / drafts['proposed']:.0%} of the drafts accepted"
    )


def test_system_with_messages(run, unloadable):
    assert "line 4 of" in run("--chat", "--system", "be brief")[2]


def test_an_output_file_is_not_overwritten(run, files, unloadable):
    files[1].write_text("precious")
    code, _, err = run()
    assert (code, "which exists" in err) == (2, True)
    for content in ("precious", "precious\n", '{"line": 1}\n', '{"line": 1, "prompt": "the quick brown fox"}\n'):
        files[1].write_text(content)
        assert "not a result of this command" in run("--resume")[2]
        assert files[1].read_text() == content


@pytest.fixture
def interrupt(monkeypatch):
    """Ctrl-C in the call after so many."""
    generate = layerskip.Model.generate

    def interrupt(after):
        calls = iter(range(after))

        def interrupted(self, *arguments, **options):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return generate(self, *arguments, **options)

        monkeypatch.setattr(layerskip.Model, "generate", interrupted)

    yield interrupt
    monkeypatch.setattr(layerskip.Model, "generate", generate)


def test_an_interrupted_run_leaves_whole_lines_and_goes_on(run, files, interrupt, monkeypatch):
    assert run("--skip-mlp", 1, "--governor", "off")[0] == 0
    whole = [without_times(each) for each in records(files[1])]
    files[1].unlink()
    interrupt(after=2)
    code, _, err = run("--skip-mlp", 1, "--governor", "off")
    assert (code, len(records(files[1]))) == (130, 2)
    assert "2 prompts" in err.splitlines()[-1]
    with files[1].open("a") as output:
        output.write('{"line": 4, "te')  # as if the machine had gone off in the middle of a write
    interrupt(after=2)
    code, _, err = run("--skip-mlp", 1, "--governor", "off", "--resume")
    assert code == 0
    assert "2 prompts" in err.splitlines()[-1]
    assert [without_times(each) for each in records(files[1])] == whole


def test_nothing_left_to_resume(run, files, unloadable, monkeypatch):
    monkeypatch.undo()
    run()
    before = files[1].read_bytes()
    monkeypatch.setattr(layerskip, "load", None)
    code, _, err = run("--resume")
    assert (code, "all 4 results are there already" in err) == (0, True)
    assert files[1].read_bytes() == before


def test_resuming_a_run_that_has_not_begun(run, files):
    assert run("--resume")[0] == 0
    assert len(records(files[1])) == 4


def test_only_the_same_run_is_resumed(run, files, monkeypatch):
    run("--seed", 1)
    files[1].write_bytes(b"".join(files[1].read_bytes().splitlines(keepends=True)[:2]))
    before = files[1].read_bytes()
    monkeypatch.setattr(layerskip, "load", None)
    for arguments, difference in (
        (["--seed", "2"], "was made with seed=1, this run has 2"),
        ([], "was made with seed=1, this run has None"),
        (["--seed", "1", "--assistant-early-exit", "2"], "was made with plan=None"),
        (["--seed", "1", "--top-k", "3", "--do-sample"], "was made with do_sample=None"),
    ):
        code, _, err = run("--resume", *arguments)
        assert (code, difference in err) == (2, True), err
    files[0].write_text("\n".join([LINES[1], *LINES]))
    assert "line 1 of" in (error := run("--resume", "--seed", "1")[2])
    assert "another prompt than line 1" in error
    files[0].write_text(LINES[0])
    assert "2 results" in run("--resume", "--seed", "1")[2]
    assert files[1].read_bytes() == before
