"""The target's own text: its prompts, its greedy answers, and the same text after a kill as without one."""

import json
import resource

import pytest
import torch
from chat import ASSISTANT, BEGIN, END, PAD, SPECIAL, TEMPLATE, USER, make_chat_tokenizer
from stubs import make_target

import hf_ddtree.training.selfgen as selfgen
from hf_ddtree.training.selfgen import TextSettings, Writer, generate_text
from hf_ddtree.training.sources import Limits, load_sequences

SETTINGS = TextSettings(
    count=20, batch_size=8, max_new_tokens=16, max_prompt_tokens=40, min_prompt_characters=3, seed=5
)
ROOM = 2048 - SETTINGS.max_new_tokens  # for prompts, the tiny llama having 2048 positions
PROMPTS = [[USER, 10 + n, 20, END, ASSISTANT] for n in range(20)]


@pytest.fixture
def target():
    target = make_target("llama")
    target.generation_config.eos_token_id = END
    return target


@pytest.fixture(scope="module")
def tokenizer():
    return make_chat_tokenizer()


@pytest.fixture
def warnings(monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(selfgen.logger, "warning", given.append)
    return given


def changed(**changes):
    return TextSettings(**{**vars(SETTINGS), **changes})


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy_answer(target, prompt, length):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": length, "attention_mask": torch.ones_like(ids)}
    return target.generate(ids, **options)[0, len(prompt) :].tolist()


def test_prompts_are_the_templates_and_different(target, tokenizer, tmp_path):
    assert generate_text(target, tokenizer, tmp_path / "text.jsonl", SETTINGS) >= 20
    rows = read(tmp_path / "text.jsonl")
    assert len({tuple(row["p"]) for row in rows}) == len(rows) >= 20
    for row in rows:
        text = tokenizer.decode(row["p"])
        assert text.startswith("<user>") and text.endswith("<end>\n<assistant>")
        content = text.removeprefix("<user>").removesuffix("<end>\n<assistant>")
        assert content == content.strip() and len(content) >= 3 and not any(mark in content for mark in SPECIAL)
        assert len(row["p"]) <= 40 + 4  # of the template
    own = load_sequences(str(tmp_path / "text.jsonl"), tokenizer, Limits(vocab_size=64))
    assert len(own) == len(rows) and sum(s.greedy for s in own) == sum(row["t"] is None for row in rows) > 0


def test_answers_are_the_targets_own(target, tokenizer, tmp_path):
    generate_text(target, tokenizer, tmp_path / "text.jsonl", SETTINGS)
    rows = read(tmp_path / "text.jsonl")
    assert {row["t"] for row in rows} == {None, 0.7, 1.0}
    for row in rows:
        assert 2 <= len(row["g"]) <= 16 and END not in row["g"][:-1]
        if row["t"] is None:
            assert row["g"] == greedy_answer(target, row["p"], 16)
    assert any(row["g"][-1] == END and len(row["g"]) < 16 for row in rows)
    assert not any(row["t"] == 1.0 and row["g"] == greedy_answer(target, row["p"], 16) for row in rows)


def test_given_prompts_are_answered_once_each(target, tokenizer, tmp_path, warnings):
    prompts = [*PROMPTS[:10], PROMPTS[3], [7] * 60, [7] * (ROOM + 1)]
    generate_text(target, tokenizer, tmp_path / "text.jsonl", SETTINGS, prompts)
    given = [row["p"] for row in read(tmp_path / "text.jsonl")]
    assert given == [prompt for prompt in [*PROMPTS[:10], [7] * 60] if prompt in given] and len(given) >= 9
    assert [7] * 60 in given  # a longer one than the target makes up
    assert "2 of 13 prompts left out" in warnings[0] and "used up" in warnings[1]


def test_base_models_begin_texts(target, tmp_path):
    bare = make_chat_tokenizer(template=None)
    generate_text(target, bare, tmp_path / "text.jsonl", SETTINGS)
    for row in read(tmp_path / "text.jsonl"):
        assert row["p"][0] == BEGIN and len(row["p"]) == 1 + selfgen.BASE_PROMPT and min(row["p"][1:]) >= len(SPECIAL)


class Killed(BaseException):
    pass


def killed_after(monkeypatch, batches):
    """Makes a run end in the forward of batch number `batches`."""
    real, calls = Writer.answer, []

    def answer(self, *args):
        calls.append(args)
        if len(calls) > batches:
            raise Killed
        return real(self, *args)

    monkeypatch.setattr(Writer, "answer", answer)


@pytest.mark.parametrize(
    ("prompts", "torn"),
    [(None, "a line and a half"), (PROMPTS, "nothing"), (PROMPTS, "half a line"), (PROMPTS, "a line and a half")],
    ids=["made up", "given, whole", "given, torn", "given, more than is known"],
)
def test_a_killed_run_goes_on_to_the_same_text(prompts, torn, target, tokenizer, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    generate_text(target, tokenizer, whole, SETTINGS, prompts)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_after(patch, 2)
        generate_text(target, tokenizer, parts, SETTINGS, prompts)
    before = parts.read_text()
    assert before and whole.read_text().startswith(before) and before != whole.read_text()
    line = '{"p": [2, 30, 4, 3], "g": [9, 9], "t": null}\n'
    parts.write_text(before + {"nothing": "", "half a line": line[:20], "a line and a half": line + line[:20]}[torn])
    torch.manual_seed(123)
    torch.rand(7)
    generate_text(target, tokenizer, parts, SETTINGS, prompts)
    assert parts.read_text() == whole.read_text()


def test_more_lines_later_are_the_lines_of_a_longer_run(target, tokenizer, tmp_path):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    lines = generate_text(target, tokenizer, first, changed(count=8))
    before = first.read_text()
    assert generate_text(target, tokenizer, first, changed(count=8)) == lines == len(read(first))
    assert first.read_text() == before
    generate_text(target, tokenizer, first, SETTINGS)
    generate_text(target, tokenizer, second, SETTINGS)
    assert first.read_text() == second.read_text() != before


def test_another_seed_is_another_text(target, tokenizer, tmp_path):
    for seed in (0, 1):
        generate_text(target, tokenizer, tmp_path / str(seed), changed(seed=seed, count=8))
    texts = [{tuple(row["p"]) for row in read(tmp_path / str(seed))} for seed in (0, 1)]
    assert not texts[0] & texts[1]


def test_the_targets_settings_and_the_random_state_are_left_alone(target, tokenizer, tmp_path, monkeypatch):
    generate_text(target, tokenizer, tmp_path / "plain", SETTINGS)
    config = target.generation_config
    config.repetition_penalty, config.top_p, config.min_p, config.max_length = 9.0, 0.1, 0.9, 5
    kept, state = config.to_dict(), torch.get_rng_state()
    generate_text(target, tokenizer, tmp_path / "penalised", SETTINGS)
    assert target.generation_config is config and config.to_dict() == kept
    assert torch.equal(torch.get_rng_state(), state)
    assert (tmp_path / "plain").read_text() == (tmp_path / "penalised").read_text()

    def failing(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(target, "generate", failing)
    with pytest.raises(Killed):
        generate_text(target, tokenizer, tmp_path / "x", SETTINGS)
    assert target.generation_config is config


def test_sampling_is_from_all_of_the_distribution(target, tokenizer, tmp_path, monkeypatch):
    real, seen = target.generate, []

    def watched(**kwargs):
        seen.append(target.generation_config)
        return real(**kwargs)

    monkeypatch.setattr(target, "generate", watched)
    writer = Writer(target, tokenizer, SETTINGS)
    writer.answer(PROMPTS[:2], 0.7)
    assert (seen[0].do_sample, seen[0].temperature, seen[0].top_k, seen[0].top_p) == (True, 0.7, 0, 1.0)
    writer.sample_prompts(set())
    assert (seen[1].temperature, seen[1].top_k) == (0.9, 60)


@pytest.mark.parametrize("ends", [[END, 20], None])
def test_every_end_token_of_the_target_ends_answers(ends, target, tokenizer, tmp_path):
    target.generation_config.eos_token_id = ends
    generate_text(target, tokenizer, tmp_path / "text", changed(max_new_tokens=30), PROMPTS)
    answers = [row["g"] for row in read(tmp_path / "text")]
    for answer in answers:
        assert not set(answer[:-1]) & set(ends or [])
        assert len(answer) == 30 or answer[-1] in (ends or [])
    assert {answer[-1] for answer in answers if len(answer) < 30} == set(ends or [])


@pytest.mark.parametrize(
    ("turn", "prompt"),
    [
        ("why is it so !! because<end>", "Q why is it so !!"),
        ("why is it so !!", "Q why is it so !!"),
        ("why is it so<end>", "Q why is it so !!"),
        ("why is it so", None),
        ("why is it so<user>", None),
        ("<end>", None),
        ("a<end>", None),
    ],
)
def test_turns_that_end_in_plain_text(turn, prompt, target, monkeypatch):
    plain = make_chat_tokenizer("{% for turn in messages %}Q {{ turn.content }} !!{% endfor %}")
    writer = Writer(target, plain, SETTINGS)
    ids = plain(turn, add_special_tokens=False).input_ids
    monkeypatch.setattr(writer, "_generate", lambda *args: [ids])
    found = [plain.decode(ids) for ids in writer.sample_prompts(set())]
    assert found == ([] if prompt is None else [prompt])


def test_left_padding_changes_nothing(target, tokenizer):
    prompts = [PROMPTS[0], [*PROMPTS[1], 9, 9, 9, 9], [30]]
    rows = Writer(target, tokenizer, SETTINGS).answer(prompts, None)
    assert [row["g"] for row in rows] == [greedy_answer(target, prompt, 16) for prompt in prompts]
    assert not any(PAD in row["p"] for row in rows)


def test_answers_of_one_token_are_dropped(target, tokenizer, monkeypatch):
    writer = Writer(target, tokenizer, SETTINGS)
    monkeypatch.setattr(writer, "_generate", lambda *args: [[END], [9, END], []])
    assert writer.answer(PROMPTS[:3], None) == [{"p": PROMPTS[1], "g": [9, END], "t": None}]


def test_a_target_that_writes_nothing_usable(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(selfgen, "PATIENCE", 3)
    with pytest.raises(ValueError, match=r"nothing usable in 3 batches.*0 prompts.*prompts of your own with `--data`"):
        generate_text(target, tokenizer, tmp_path / "text", changed(min_prompt_characters=1000))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "`--batch-size` is 0"),
        ({"max_new_tokens": 1}, "`--answer-tokens` is 1.*at least 2"),
        ({"temperatures": ()}, "`temperatures` is"),
        ({"temperatures": (0.0,)}, "`temperatures` is"),
        ({"max_new_tokens": 10**6}, "`--answer-tokens` is .*positions, prompts included"),
        ({"max_new_tokens": 2044}, "`--answer-tokens` is 2044, which leaves 4 .* the template alone has 4 tokens"),
    ],
)
def test_settings_that_do_not_fit(changes, named, target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=named):
        generate_text(target, tokenizer, tmp_path / "text", changed(**changes))
    assert not (tmp_path / "text").exists()


def test_a_long_template_leaves_prompts_their_length(target, tmp_path):
    long = make_chat_tokenizer(TEMPLATE.replace("<{{ turn.role }}>", "be good. " * 20 + "<{{ turn.role }}>"))
    generate_text(target, long, tmp_path / "text.jsonl", changed(count=4))
    lengths = [len(row["p"]) for row in read(tmp_path / "text.jsonl")]
    assert all(9 * 20 < length <= 9 * 20 + 4 + 40 for length in lengths) and len(lengths) >= 4


@pytest.mark.parametrize("positions", [SETTINGS.max_new_tokens + 5, SETTINGS.max_new_tokens + 14])
def test_prompts_fit_beside_answers_in_the_targets_positions(positions, target, tokenizer, tmp_path):
    target.config.max_position_embeddings = positions
    generate_text(target, tokenizer, tmp_path / "text.jsonl", changed(count=4, min_prompt_characters=1))
    rows = read(tmp_path / "text.jsonl")
    assert rows and all(len(row["p"]) + SETTINGS.max_new_tokens <= positions for row in rows)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }} {{ messages[0].content }}!!", "{{ messages[0].role }}"]
)
def test_templates_that_hide_the_user_are_refused(template, target, tmp_path):
    with pytest.raises(ValueError, match="prompts of your own"):
        generate_text(target, make_chat_tokenizer(template), tmp_path / "text", SETTINGS)
    generate_text(target, make_chat_tokenizer(template), tmp_path / "text", changed(count=4), PROMPTS)


def test_a_text_of_something_else_is_not_appended_to(target, tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    generate_text(target, tokenizer, path, changed(count=4))
    before = path.read_text()
    with pytest.raises(ValueError, match=r"another --answer-tokens, --seed; .*another --out"):
        generate_text(target, tokenizer, path, changed(seed=6, max_new_tokens=20))
    with pytest.raises(ValueError, match="another --data"):
        generate_text(target, tokenizer, path, SETTINGS, PROMPTS)
    other = make_target("llama", seed=3)
    other.generation_config.eos_token_id = END
    with pytest.raises(ValueError, match="another --model"):
        generate_text(other, tokenizer, path, SETTINGS)
    assert path.read_text() == before
    path.write_text(before[:-5])
    with pytest.raises(ValueError, match="shorter"):
        generate_text(target, tokenizer, path, SETTINGS)
    (tmp_path / "mine.jsonl").write_text("precious\n")
    with pytest.raises(ValueError, match="not ours"):
        generate_text(target, tokenizer, tmp_path / "mine.jsonl", SETTINGS)
    assert (tmp_path / "mine.jsonl").read_text() == "precious\n"
    with pytest.raises(ValueError, match=r"without \.gz"):
        generate_text(target, tokenizer, tmp_path / "text.jsonl.gz", SETTINGS)


def test_a_full_disk_says_so_and_the_text_goes_on_later(target, tokenizer, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    generate_text(target, tokenizer, whole, SETTINGS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1400, limits[1]))
    try:
        with pytest.raises(OSError, match=r"can't be written.*goes on"):
            generate_text(target, tokenizer, parts, SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < parts.stat().st_size <= 1400 < whole.stat().st_size
    generate_text(target, tokenizer, parts, SETTINGS)
    assert parts.read_text() == whole.read_text()
