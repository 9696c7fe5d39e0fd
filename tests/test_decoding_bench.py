"""`redraft bench live`: every contender answers, texts are checked, the figures add up, the record and picture are written."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from test_generate_command import model_folder  # noqa: F401 - a fixture
from tiny_models import random_prompts, tiny_model
from transformers import AutoTokenizer

from redraft.cli import main
from redraft.decoding.live_benchmark import Prompt, Settings, measure, task_of, task_rows
from redraft.retrieval.config import DraftConfig
from redraft.retrieval.drafter import Drafter

torch.set_num_threads(1)


@pytest.fixture
def prompts_file(tmp_path, model_folder):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} "
    tokenizer.save_pretrained(model_folder)
    file = tmp_path / "prompts.jsonl.gz"
    records = [{"category": category, "turns": [f"{word} {word} abc"]} for word in ("one", "two", "six") for category in
               ("writing", "qa")]  # fmt: skip
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    return file


@pytest.mark.parametrize("options", [[], ["--batch", "3"], ["--temperature", "0.7"]], ids=str)
def test_table_record_and_picture(prompts_file, model_folder, tmp_path, capsys, options):  # noqa: F811
    record_file, picture = tmp_path / "live.json", tmp_path / "live.png"
    arguments = ["bench", "live", prompts_file, "--model", model_folder, "--per-task", "3", "--new-tokens", "24"]
    arguments += ["--json", record_file, "--picture", picture, *options]
    assert main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    assert "mt_bench" in printed and "macro" in printed and "texts that leave the reference: 0" in printed
    record = json.loads(record_file.read_text())
    assert record["lossless"] is True
    assert record["tasks"]["macro"]["redraft same text"] == 1.0
    assert record["tasks"]["macro"]["redraft / plain"] > 0
    contenders = {answer["contender"] for answer in record["answers"]}
    assert contenders == {"generate", "plain", "redraft"} | ({"lookup"} if "--batch" not in options else set())
    assert sum(record["accepted by source"].values()) == sum(record["accepted by depth"].values())
    assert picture.stat().st_size > 1000


def test_bad_prompts_are_named(tmp_path, model_folder, capsys):  # noqa: F811
    file = tmp_path / "bad.jsonl"
    file.write_text('{"turns": ["abc"]}\n{"turns": []}\n')
    assert main(["bench", "live", str(file), "--model", str(model_folder)]) == 1
    assert f"{file}, line 2" in capsys.readouterr().err
    assert main(["bench", "live", str(file), "--model", str(model_folder), "--only", "vllm"]) == 1
    assert "--only: wanted some of" in capsys.readouterr().err


def test_figures_add_up():
    model = tiny_model("llama")
    prompts = [Prompt("a", ids, torch.ones_like(ids)) for ids in random_prompts(3, seed=71)]
    with Drafter(DraftConfig(vocab_size=64)) as drafter:
        answers = [answer for group in measure(model, prompts, {"redraft": drafter}, Settings(30)) for answer in group]
    generated, plain, lookup, drafted = (answers[i::4] for i in range(4))
    for one, two, three, four in zip(generated, plain, lookup, drafted):
        assert one.tokens == two.tokens == three.tokens == four.tokens
        assert one.steps == two.steps == one.tokens - 1
        assert three.steps <= one.steps and four.steps <= one.steps
        assert four.outside_steps <= four.steps and four.outside_tokens <= four.tokens - 1
        assert one.same and two.same and three.same and four.same
    row = task_rows(answers)["a"]
    steps = sum(answer.steps for answer in drafted)
    assert row["redraft tokens/step"] == pytest.approx(sum(answer.tokens - 1 for answer in drafted) / steps)
    assert 0 < row["redraft overhead"] < 1
    assert task_of("writing") == "mt_bench" and task_of("qa") == "qa"
