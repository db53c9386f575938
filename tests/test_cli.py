"""The command line in process, on tiny checkpoints: what goes where, exit codes, and that every option takes effect."""

import io
import json
import os
import subprocess
import sys

import pytest

import layerskip
from layerskip.cli import main
from layerskip.cli.options import SETTINGS
from layerskip.cli.parser import layer_numbers
from layerskip.cli.terminal import show_stream
from layerskip.request import GOVERNORS
from layerskip.rules import RULES
from layerskip.stream import StreamPiece
from tests.checkpoints import save_tiny

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def model(checkpoint):
    return layerskip.load(checkpoint)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line: (exit code, standard output, standard error)."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        capsys.readouterr()
        code = main([str(each) for each in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def generate(run, checkpoint):
    """`layerskip generate` on the checkpoint with --json: the object it prints."""

    def generate(*arguments):
        code, out, err = run(
            "generate", "--model", checkpoint, "--no-chat", "--json", "--max-new-tokens", 12, *arguments
        )
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return generate


def test_text_goes_to_stdout_and_a_line_about_it_to_stderr(run, checkpoint, model):
    code, out, err = run("generate", "--model", checkpoint, "--no-chat", "--max-new-tokens", 12, PROMPT)
    assert code == 0
    assert out == model.generate(PROMPT, max_new_tokens=12).text + "\n"
    assert err.startswith("12 tokens (length), ")
    assert err.count("\n") == 1


def test_json_says_what_python_says(generate, model):
    printed = generate("--assistant-early-exit", 2, "--governor", "off", PROMPT)
    result = model.generate(PROMPT, max_new_tokens=12, assistant_early_exit=2, governor="off")
    assert printed["text"] == result.text
    assert printed["token_ids"] == result.new_token_ids[0]
    assert printed["drafted"] == result.drafted[0]
    assert printed["finish_reason"] == "length"
    assert printed["plan"] == json.loads(json.dumps(result.plan.to_dict()))
    assert printed["stats"].keys() == result.stats.to_dict().keys()
    assert printed["settings"].keys() == result.settings.keys()


def test_default_length(run, checkpoint):
    _, out, _ = run("generate", "--model", checkpoint, "--no-chat", "--json", PROMPT)
    assert json.loads(out)["settings"]["max_new_tokens"] == 256


PLANS = {
    "exit": (["--assistant-early-exit", "2", "--num-assistant-tokens", "3"], {"exit_layer": 2, "num_draft_tokens": 3}),
    "skip": (
        ["--skip-attention", "1-2", "--skip-mlp", "3", "--assistant-confidence-threshold", "0.01"],
        {"skip_attention": [1, 2], "skip_mlp": [3], "confidence_threshold": 0.01},
    ),
    "both": (["--assistant-early-exit", "3", "--skip-mlp", "1"], {"exit_layer": 3, "skip_mlp": [1]}),
    "lookup": (["--prompt-lookup-num-tokens", "5"], {"lookup_tokens": 5, "num_draft_tokens": 0}),
    "lookahead": (
        ["--lookahead-window", "3", "--lookahead-ngram", "3"],
        {"lookahead_window": 3, "lookahead_guesses": 5},
    ),
    "lookup beside": (
        ["--prompt-lookup-num-tokens", "5", "--assistant-early-exit", "2"],
        {"lookup_tokens": 5, "num_draft_tokens": 4, "exit_layer": 2},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_drafting_options(generate, model, name):
    arguments, fields = PLANS[name]
    printed = generate(*arguments, "--governor", "off", PROMPT)
    assert printed["text"] == model.generate(PROMPT, max_new_tokens=12).text
    assert printed["plan"] | fields == printed["plan"]
    assert printed["stats"]["proposed"] > 0


def test_plan_file_and_draft_model(generate, model, tmp_path):
    layerskip.DraftPlan.skip(attention=[2]).save(tmp_path / "plan.json")
    plain = model.generate(PROMPT, max_new_tokens=12).text
    printed = generate("--plan", tmp_path / "plan.json", "--num-assistant-tokens", 2, PROMPT)
    assert (printed["text"], printed["plan"]["skip_attention"]) == (plain, [2])
    assert printed["plan"]["num_draft_tokens"] == 2
    save_tiny(tmp_path / "draft", seed=1)
    printed = generate("--assistant-model", tmp_path / "draft", PROMPT)
    assert (printed["text"], printed["plan"]["draft_model"]) == (plain, str(tmp_path / "draft"))


def test_compiling_is_asked_for(generate):
    """Together with what cannot be compiled, so that nothing is."""
    assert generate("--compile", "--pass-width", 4, PROMPT)["stats"]["execution"].startswith("eager: pass_width")


SETTINGS_GIVEN = {
    "max_new_tokens": 9, "min_new_tokens": 2, "do_sample": True, "temperature": 0.7, "top_k": 11, "top_p": 0.9,
    "min_p": 0.01, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "eos_token_id": [7, 9],
    "stop_strings": ["qq", "zz"], "max_time": 100.0, "acceptance_rule": "invariant", "pass_width": 6,
}  # fmt: skip


def test_every_setting_arrives(generate):
    arguments = []
    for name, value in SETTINGS_GIVEN.items():
        for each in value if isinstance(value, list) else [value]:
            arguments += ["--" + name.replace("_", "-")] + ([] if each is True else [each])
    settings = generate(*arguments, "--seed", 5, PROMPT)["settings"]
    assert set(SETTINGS) <= SETTINGS_GIVEN.keys()
    assert settings | SETTINGS_GIVEN == settings
    assert settings["seed"] == [5]


def test_rules_and_governors_are_those_of_the_runtime(run):
    for name in (*RULES, *GOVERNORS):
        assert name in run("generate", "--help")[1]


def test_costs_for_the_fixed_governor_arrive(generate):
    plan = ["--assistant-early-exit", 2, "--governor", "fixed"]
    settings = generate(*plan, "--draft-cost", 0.4, "--verify-slope", 0.05, PROMPT)["settings"]
    assert (settings["governor"], settings["cost_ratios"]) == ("fixed", {"draft": 0.4, "verify_slope": 0.05})
    assert generate(*plan, PROMPT)["settings"]["cost_ratios"]["draft"] is None


def test_a_seed_decides_and_the_invariant_rule_ignores_the_plan(generate):
    sampled = ["--do-sample", "--seed", "3", "--acceptance-rule", "invariant"]
    texts = {generate(*sampled, *plan, PROMPT)["text"] for plan in ([], ["--assistant-early-exit", "2"])}
    assert len(texts) == 1
    assert generate("--do-sample", "--seed", 4, PROMPT)["text"] not in texts


def test_chat(run, checkpoint, model):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
    code, out, _ = run(
        "generate", "--model", checkpoint, "--chat", "--system", "be brief", "--max-new-tokens", 9, PROMPT
    )
    assert (code, out) == (0, model.generate(messages, max_new_tokens=9).text + "\n")


def test_raw_text_on_a_chat_model_is_pointed_out_once(run, checkpoint):
    short = ["--model", checkpoint, "--max-new-tokens", 1, PROMPT]
    assert "--chat has the model answer it" in run("generate", *short)[2]
    assert "note" not in run("generate", "--no-chat", *short)[2]
    assert "note" not in run("generate", "--chat", *short)[2]


@pytest.mark.parametrize("piped", [PROMPT, PROMPT + "\n", PROMPT + "\r\n"])
def test_prompt_from_standard_input(generate, model, monkeypatch, piped):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped, newline=""))
    assert generate()["text"] == model.generate(PROMPT, max_new_tokens=12).text


def test_a_prompt_may_look_like_an_option(generate, model):
    assert generate("--", "--seed")["text"] == model.generate("--seed", max_new_tokens=12).text


def pieces():
    parts = [("The", False), (" sky", True), (" is", True), (" blue", False), ("\x1b[2J.\n", True)]
    return [StreamPiece(text, (1,), drafted) for text, drafted in parts]


def test_accepted_drafts_are_coloured_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_stream(pieces())
    drafted = "\x1b[4;32m{}\x1b[0m".format
    expected = ["The", drafted(" sky"), drafted(" is"), " blue", drafted("\N{SYMBOL FOR ESCAPE}[2J.\n")]
    assert capsys.readouterr().out == "".join(expected)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}])
def test_plain_text_elsewhere(capsys, monkeypatch, environment):
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    show_stream(pieces())
    assert capsys.readouterr().out == "The sky is blue\x1b[2J.\n"
    show_stream(pieces()[:3], marks=("<", ">"))
    assert capsys.readouterr().out == "The< sky is>\n"


ERRORS = {
    "no command": ([], ["required: COMMAND"]),
    "command": (["gnerate"], ["got 'gnerate'", "Did you mean 'generate'?"]),
    "global option": (["--verison"], ["unknown option --verison", "Did you mean '--version'?"]),
    "option": (["generate", "--modle", "M", "hi"], ["unknown option --modle", "Did you mean '--model'?"]),
    "abbreviation": (["generate", "--model", "M", "--max-new", "3", "hi"], ["unknown option --max-new"]),
    "option with value": (["generate", "--model=M", "--top_k=3", "hi"], ["--top_k", "Did you mean '--top-k'?"]),
    "quotes": (["generate", "--model", "M", "hello", "world"], ["'world' beyond", "quotes"]),
    "no model": (["generate", "hi"], ["required: --model"]),
    "model": (["generate", "--model", "./nowhere", "hi"], ["'./nowhere'", "Check the path"]),
    "layers": (["generate", "--model", "M", "--skip-mlp", "3-1", "hi"], ["'3-1'", "such as 3,5,7-9"]),
    "number": (["generate", "--model", "M", "--num-assistant-tokens", "0", "hi"], ["'0'", "at least 1"]),
    "rule": (["generate", "--model", "M", "--acceptance-rule", "maximum", "hi"], ["Did you mean 'maximal'?"]),
    "plan file": (["generate", "--model", "M", "--plan", "nowhere.json", "hi"], ["cannot read the plan nowhere.json"]),
    "two plans": (
        ["generate", "--model", "M", "--skip-mlp", "1", "--assistant-model", "D", "hi"],
        ["--assistant-model and --skip-mlp", "expected one of them"],
    ),
    "nothing to draft with": (
        ["generate", "--model", "M", "--num-assistant-tokens", "3", "hi"],
        ["--num-assistant-tokens without anything that drafts"],
    ),
    "system": (["generate", "--model", "M", "--system", "be brief", "hi"], ["--system without --chat"]),
    "output": (["generate", "--model", "M", "--output", "r.jsonl", "hi"], ["--output without --input"]),
    "resume": (["generate", "--model", "M", "--input", "p.jsonl", "--resume"], ["--resume without --output"]),
    "prompt and file": (["generate", "--model", "M", "--input", "p.jsonl", "hi"], ["both a prompt and --input"]),
    "file": (["generate", "--model", "M", "--input", "nowhere.jsonl"], ["cannot read the prompts nowhere.jsonl"]),
    "inspect": (["inspect", "./nowhere"], ["'./nowhere'"]),
    "plan command": (["plan", "chek"], ["Did you mean 'check'?"]),
    "idle loading option": (["plan", "make", "--skip-mlp", "1", "--dtype", "bf16"], ["dtype without --model"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_before_a_model_is_loaded(run, case):
    arguments, expected = ERRORS[case]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2
    for part in expected:
        assert part in err


MODEL_ERRORS = {
    "exit": (["--assistant-early-exit", "4", PROMPT], "exit at layer 4 on a model of 4 layers"),
    "idle setting": (["--no-do-sample", "--temperature", "0.5", PROMPT], "temperature with do_sample=False"),
    "pass width": (["--assistant-early-exit", "2", "--pass-width", "4", PROMPT], "pass_width=4"),
    "empty prompt": ([""], "empty prompt"),
    "long prompt": (["a" * 160], "prompt of 160 tokens"),
    "length": (["--max-new-tokens", "0", PROMPT], "max_new_tokens=0"),
    "dtype": (["--dtype", "float17", PROMPT], "Did you mean 'float16'?"),
}


@pytest.mark.parametrize("output", [["--json"], []])
@pytest.mark.parametrize("case", MODEL_ERRORS)
def test_errors_of_the_call(run, checkpoint, case, output):
    arguments, expected = MODEL_ERRORS[case]
    code, out, err = run("generate", "--model", checkpoint, "--no-chat", *output, *arguments)
    assert (code, out) == (2, "")
    assert expected in err


def test_layer_numbers():
    assert layer_numbers("3,5,7-9") == (3, 5, 7, 8, 9)
    assert layer_numbers("0") == (0,)
    for wrong in ("", "3,", "a", "-1", "1-", "9-7", "1--2", "²", "0-99999"):
        with pytest.raises(Exception, match="expected layer numbers"):
            layer_numbers(wrong)


def test_help_of_every_command(run):
    for command in ([], ["generate"], ["inspect"], ["plan"], ["plan", "check"], ["plan", "make"], ["demo"]):
        code, out, err = run(*command, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: {' '.join(['layerskip', *command])}")


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("layerskip ")
    assert "torch" in out


def test_interruption_is_quiet(run, checkpoint, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(layerskip.Model, "generate", interrupted)
    assert run("generate", "--model", checkpoint, "--no-chat", "--json", PROMPT) == (130, "", "")


def test_other_exceptions_are_bugs_and_keep_their_traceback(run, checkpoint, monkeypatch):
    monkeypatch.setattr(layerskip.Model, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("generate", "--model", checkpoint, "--no-chat", "--json", PROMPT)


def test_a_closed_pipe_is_quiet(checkpoint):
    """As in `layerskip inspect … | head -1`; also runs `python -m layerskip.cli`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "layerskip.cli", "inspect", checkpoint]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_reference_prints_the_folder_alone(run, monkeypatch, tmp_path):
    def made(progress):
        progress("downloading")
        return tmp_path

    monkeypatch.setattr("layerskip.models.reference.smollm2_path", made)
    assert run("reference") == (0, f"{tmp_path}\n", "downloading\n")


def test_inspect(run, checkpoint):
    code, out, err = run("inspect", checkpoint)
    assert (code, err) == (0, "")
    for part in ("LlamaForCausalLM (llama)", "vocabulary 61", "bytes a token", "early exits", "thm. 3.8"):
        assert part in out
    code, out, err = run("inspect", checkpoint, "--json", "--dtype", "bfloat16")
    printed = json.loads(out)
    assert (code, err) == (0, "")
    assert printed["dtype"] == "bfloat16"
    assert printed["parameters"] == sum(each.numel() for each in layerskip.load(checkpoint).hf_model.parameters())
    assert [each["exit_layer"] for each in printed["exits"]] == [1, 2, 3]
    assert 0 < printed["exits"][0]["cost"] < printed["exits"][1]["cost"] < 1


@pytest.fixture
def made_plan(run, tmp_path):
    """A plan file made with these options."""

    def make(*arguments, name="plan.json"):
        assert run("plan", "make", *arguments, "--out", tmp_path / name) == (0, "", "")
        return tmp_path / name

    return make


def test_plan_make_and_check(run, checkpoint, made_plan):
    plan = made_plan("--skip-attention", "1,2", "--assistant-early-exit", 3, "--num-assistant-tokens", 2)
    assert layerskip.DraftPlan.load(plan) == layerskip.DraftPlan.skip([1, 2], exit_layer=3, num_draft_tokens=2)
    code, out, err = run("plan", "check", plan, checkpoint)
    assert (code, err) == (0, "")
    assert "1 of 4 attentions and 3 of 4 MLPs, up to layer 3" in out
    assert "leaves out attention 1, 2" in out
    assert run("plan", "make", "--skip-mlp", 1, "--out", plan)[0] == 2  # it exists
    printed = json.loads(run("plan", "make", "--skip-mlp", 1)[1])
    assert layerskip.DraftPlan.from_dict(printed).skip_mlp == (1,)
    assert "got nothing to draft with" in run("plan", "make")[2]


def test_a_plan_without_target_is_checked_without_weights(run, checkpoint, made_plan, monkeypatch):
    monkeypatch.setattr(layerskip, "load", None)
    plan = made_plan("--assistant-early-exit", 2)
    code, out, _ = run("plan", "check", plan, checkpoint, "--json")
    printed = json.loads(out)
    assert (code, printed["fits"], printed["plan"]["exit_layer"]) == (0, True, 2)
    assert 0 < printed["cost"] < 1
    code, out, err = run("plan", "check", made_plan("--assistant-early-exit", 4, name="4.json"), checkpoint, "--json")
    printed = json.loads(out)
    assert (code, printed["fits"]) == (2, False)
    assert "exit at layer 4" in printed["reason"]
    assert printed["reason"] in err


def test_a_bound_plan_is_for_those_weights_only(run, checkpoint, made_plan, tmp_path):
    plan = made_plan("--assistant-early-exit", 2, "--model", checkpoint)
    assert run("plan", "check", plan, checkpoint, "--dtype", "bfloat16")[0] == 0
    other = save_tiny(tmp_path / "other", seed=1)
    code, _, err = run("plan", "check", plan, other)
    assert code == 2
    assert "made for weights" in err
    code, _, err = run("generate", "--model", other, "--plan", plan, "hi")
    assert (code, "made for weights" in err) == (2, True)


def test_a_draft_model_is_checked_too(run, checkpoint, made_plan, tmp_path):
    draft = save_tiny(tmp_path / "draft", seed=1)
    assert "pass --out" in run("plan", "make", "--assistant-model", draft)[2]
    plan = made_plan("--assistant-model", draft)
    assert f"drafts with the model {draft}" in run("plan", "check", plan, checkpoint)[1]
    tokenizer = draft / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"q"', '"?"'))
    code, _, err = run("plan", "check", plan, checkpoint)
    assert (code, "another vocabulary" in err) == (2, True)
